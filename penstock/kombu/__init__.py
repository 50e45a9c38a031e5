"""Penstock as a broker of kombu, and so of Celery: `import penstock.kombu`, and `penstock://` URLs are known.

    app = Celery(broker="penstock://127.0.0.1:9180")

It speaks the HTTP API alone. What each module has:

    line.py        one HTTP connection, whose answer is waited for, or read as it comes
    envelope.py    what a message of kombu is as a message of a queue, and back
    bindings.py    which queues are bound to which exchanges, for all processes, in a queue of its own
    intake.py      who asks which queue for how much: windows, priorities, nothing that polls
    settling.py    acknowledgements on their way
    channel.py     what kombu calls a channel
    transport.py   a connection: its channels, its leases, and the event loop that drives it
"""

from kombu.transport import TRANSPORT_ALIASES

from penstock.kombu.transport import Transport

__all__ = ["Transport"]

# The second is the first with TLS.
TRANSPORT_ALIASES["penstock"] = TRANSPORT_ALIASES["penstocks"] = "penstock.kombu:Transport"
