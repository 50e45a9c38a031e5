"""`penstock import`: what waits in another server moves into a queue here, each message once where it can be.

`source.py` says what a source is; each kind of server has a module. `run.py` is the loop, `sink.py` the way
into Penstock, `journal.py` what is remembered from one run to the next.
"""
