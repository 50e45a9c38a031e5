"""Users at the three wires: who a connection is, and whether that one may say what it says.

A client is known by its certificate, where its listener asks for one. Who is not known so is whom the
listener stands for (`user`); without that, the listener's own `queues` and `mode` say what may be done, as
they always do. As soon as users have certificates, one that is nobody's opens nothing; when the last of these
users is removed, that stays so until a restart: whose rights were taken away must not have all of them.

A name counts where the authority of the user's certificates has signed it (`certificate-ca`): one that is
trusted at another listener, for less, cannot make somebody of it.

Rule that always holds: what a connection holds it may settle, whatever has become of its rights.
"""

import os.path
from collections.abc import Iterable, Sequence
from typing import Any, Final

from penstock.model.rights import Right, User
from penstock.model.words import Broadcast, Command, Consume, Publish
from penstock.server.settings import Listener, UserSettings
from penstock.server.settings_users import authorities_of

_NAMED: Final = ("DNS", "email", "URI")


class Users:
    def __init__(
        self, users: Sequence[UserSettings], listeners: Iterable[Listener], before: "Users | None" = None
    ) -> None:
        """`listeners` are those that are open, whatever the settings say by now."""
        self._by_name = {it.user.name: it.user for it in users}
        authorities = authorities_of(listeners)
        only = next(iter(authorities)) if len(authorities) == 1 else ""
        self._by_certificate = {
            (os.path.abspath(it.certificate_ca) if it.certificate_ca else only, name): it.user
            for it in users
            if it.certificate_ca or only
            for name in it.certificates
        }
        self._asks: bool = any(it.certificates for it in users) or (before is not None and before._asks)

    def find(self, certificate: dict[str, Any] | None, listener: Listener) -> User | None:
        """Who shows a certificate (as the ssl module has it) at a listener; None: nobody in particular."""
        names = names_in(certificate or {})
        authority = os.path.abspath(listener.tls_client_ca) if listener.tls_client_ca is not None else ""
        for name in names:
            if (authority, name) in self._by_certificate:
                return self._by_certificate[authority, name]
        if listener.user:
            return self._by_name.get(listener.user, User(listener.user))
        if listener.tls_client_ca is not None and self._asks:
            return User(f"certificate:{names[0]}" if names else "certificate")  # which is no user's name
        return None


def names_in(certificate: dict[str, Any]) -> list[str]:
    """The common name of its subject, and its alternative names."""
    subject = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return subject + [value for kind, value in certificate.get("subjectAltName", ()) if kind in _NAMED]


def refusal(user: User | None, listener: Listener, command: Command, now_us: int) -> str:
    """Why something may not be said; empty: it may."""
    if isinstance(command, Publish | Broadcast):
        right, verb, may = Right.SEND, "send to", listener.may_send
    elif isinstance(command, Consume):
        right, verb, may = Right.RECEIVE, "consume from", listener.may_receive
    else:
        return ""
    queue = command.queue
    if not may or not listener.allows(queue):
        return f"refused: this listener does not let {verb} queue {queue!r}"
    if user is None:
        return ""
    if user.is_over(now_us):
        return f"refused: user {user.name!r} may not {verb} queue {queue!r}: its time is over"
    if not user.may(right, queue):
        return (
            f"refused: user {user.name!r} may not {verb} queue {queue!r}: it has not the right {right.word}"
        )
    return ""
