"""`penstock top`: the queues of a broker, live in the terminal.

`feed.py` asks the HTTP API in a thread of its own, `history.py` remembers what it said, and the rest shows
it with Textual, which the extra `dashboard` installs. Only `feed.py`, `history.py`, `state.py` and
`sparks.py` can be imported without it.
"""
