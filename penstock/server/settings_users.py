"""The users of the settings: who there is, what each is known by, and what each may do.

Rules that always hold:
  * A name, a name in certificates and a hash are one user's. A name of a user is no name of a token, too.
  * Whoever could never be recognised, or may do nothing, is a mistake.
  * Where listeners trust several authorities, it is said whose certificates are a user's: another one could
    sign its name.

How it fails: `SettingsError`, at the line of what is to blame; no hash is in it.
"""

import os.path
from collections.abc import Iterable, Iterator

from penstock.common.given import File, Given, SettingsError, Spot, read_section, sections_of
from penstock.model.rights import WORDS, Grant, Right, User
from penstock.server.settings import GRANT_KEYS, USER_KEYS, Listener, Token, UserSettings


def users_in_file(file: File | None, tokens: Iterable[Token]) -> tuple[UserSettings, ...]:
    if file is None:
        return ()
    # By what may be there once only: the section that has it. Hashes are looked up, never shown.
    seen = {("name", token.name): f"[[http.tokens]] {token.name!r}" for token in tokens}
    users = []
    for spot, section in sections_of(file, ("user",), "user"):
        given = read_section(spot, section, USER_KEYS)
        for key in ("name", "certificate", "token-hash"):
            if key in given:
                values = given[key].value
                for value in values if isinstance(values, tuple) else (values,):
                    first = seen.setdefault((key, value), spot.name)
                    if first != spot.name:
                        raise given[key].spot.wrong(f"{first} has the same; use another")
        users.append(_user(spot, given))
    return tuple(users)


def _user(spot: Spot, given: dict[str, Given]) -> UserSettings:
    values = {name: it.value for name, it in given.items()}
    is_admin = values.get("admin", False)
    if is_admin and "rights" in given:
        raise given["rights"].spot.wrong("an admin may do everything; leave rights out, or admin")
    if "certificate-ca" in given and "certificate" not in given:
        raise given["certificate-ca"].spot.wrong(
            "it needs certificate, too: the names that it may have signed"
        )
    if not is_admin and "rights" not in given:
        raise spot.wrong("it may do nothing; add rights = [{queues = …, may = […]}], or admin = true")
    grants = tuple(_grants(given["rights"])) if "rights" in given else ()
    return UserSettings(
        User(values["name"], grants, is_admin, values.get("expires", 0)),
        values.get("certificate", ()),
        values.get("token-hash", ()),
        values.get("certificate-ca", ""),
    )


def _grants(given: Given) -> Iterator[Grant]:
    for number, section in enumerate(given.value):
        at = given.spot
        spot = Spot(at.source, f"{at.name} {number + 1}", at.file, (*at.keys, number))
        said = read_section(spot, section, GRANT_KEYS)
        may = Right.NONE
        for word in said["may"].value:
            may |= WORDS[word]
        yield Grant(said["queues"].value, may)


def authorities_of(listeners: Iterable[Listener]) -> set[str]:
    """Who signs the certificates of clients."""
    return {os.path.abspath(it.tls_client_ca) for it in listeners if it.tls_client_ca is not None}


def check_known(users: Iterable[UserSettings], listeners: Iterable[tuple[Listener, Spot]]) -> None:
    """Whoever a listener stands for is there; and whoever is there can be recognised, as nobody else can."""
    names = {it.user.name for it in users}
    authorities = authorities_of(listener for listener, _ in listeners)
    for it in users:
        if it.certificate_ca and os.path.abspath(it.certificate_ca) not in authorities:
            raise SettingsError(
                f"[[user]] {it.user.name!r} certificate-ca: no [[listener]] has {it.certificate_ca!r} as its "
                f"tls-client-ca; name one of those"
            )
        if it.certificates and not it.certificate_ca and len(authorities) > 1:
            raise SettingsError(
                f"[[user]] {it.user.name!r} certificate: listeners trust {len(authorities)} authorities, and "
                f"each could sign this name; add certificate-ca, the tls-client-ca whose certificates count"
            )
    standing = set()
    for listener, spot in listeners:
        if listener.user and listener.user not in names:
            raise spot.inner("user").wrong(f"there is no [[user]] {listener.user!r}; add one")
        standing.add(listener.user)
    for it in users:
        if not it.certificates and not it.hashes and it.user.name not in standing:
            raise SettingsError(
                f"[[user]] {it.user.name!r}: nobody can be recognised as this one; add certificate or "
                f"token-hash, or name it as user of a [[listener]]"
            )
