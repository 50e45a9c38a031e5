"""Links: the connection to NATS of a Python worker, one for as long as the worker lives.

Spark gives a worker one task after the other, of queries that mostly name the same servers. Connecting for
each of them would cost more than many a task reads.

Rules that always hold:
  * What is made here belongs to this process: a worker that was forked makes its own.
  * A connection that breaks is made again by itself (`log/jetstream/link.py`); meanwhile whoever asks is
    told so, and asks again.

How it fails: `Interrupted` where no server answers, which may pass; `NotAdmitted` where the servers do not
want us, or a file that the options name cannot be used, which does not.
"""

import atexit
import os
import threading
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError
from penstock.spark.api import Interrupted
from penstock.spark.options import ReadOptions

if TYPE_CHECKING:
    from penstock.log.jetstream.link_thread import LinkThread
    from penstock.log.jetstream.options import LinkOptions


class NotAdmitted(PenstockError):
    """NATS cannot be read with these options. Says what is wrong with them."""


_WHICH: Final = attrgetter("engine", "credentials", "tls_ca", "tls_certificate", "tls_key")
"""What decides which connection it is, beside the process."""

_lock = threading.Lock()
_links: "dict[tuple[object, ...], LinkThread]" = {}


def link_for(options: ReadOptions) -> "LinkThread":
    """The connection that these options name."""
    from penstock.common.given import SettingsError
    from penstock.log.jetstream.credentials import CredentialsError
    from penstock.log.jetstream.errors import ClientMissing, LinkError
    from penstock.log.jetstream.link_thread import LinkThread
    from penstock.log.jetstream.servers import parse_servers

    key = (os.getpid(), *_WHICH(options))
    with _lock:
        nats = _links.get(key)
        if nats is None:
            try:
                nats = LinkThread.open(parse_servers(options.engine), _wire_options(options))
            except (ClientMissing, CredentialsError, SettingsError) as error:
                raise NotAdmitted(str(error)) from None
            except LinkError as error:
                if error.refused:
                    raise NotAdmitted(f"{error}; the option credentials says who you are") from None
                raise Interrupted(str(error)) from None
            _links[key] = nats
        return nats


def _wire_options(options: ReadOptions) -> "LinkOptions":
    from penstock.common.tls import client_context
    from penstock.log.jetstream.credentials import read_credentials
    from penstock.log.jetstream.options import LinkOptions

    credentials = None
    if options.credentials is not None:
        credentials = read_credentials(Path(options.credentials))
    tls = None
    if options.tls_ca is not None or options.tls_certificate is not None:
        tls = client_context("NATS", options.tls_ca, options.tls_certificate, options.tls_key)
    return LinkOptions(name="penstock spark", credentials=credentials, tls=tls)


def close_links() -> None:
    """End the connections of this process."""
    with _lock:
        for key, nats in list(_links.items()):
            if key[0] == os.getpid():
                nats.close()
        _links.clear()


atexit.register(close_links)
