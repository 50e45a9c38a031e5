"""The settings of the HTTP API: its tokens, who may reach it, and what people should know about that.

Rules that always hold:
  * Without a token everybody who reaches the door may do everything, so nobody but this machine can: such a
    door has a loopback address or a Unix socket. Reading settings again cannot undo that either.
  * No two tokens have the same name, and no two the same text: one caller is one token.
  * Tokens are judged also where the API is off, and none is in an error.

How it fails: `SettingsError`, at the line of what is to blame.
"""

from collections.abc import Iterable, Iterator, Mapping

from penstock.common.address import TcpAddress, is_loopback
from penstock.common.given import File, Given, check_tls, read_section, sections_of
from penstock.server.settings import TOKEN_KEYS, HttpSettings, Settings, Token, UserSettings

_TLS = ("tls-certificate", "tls-key")


def http_settings(
    given: Mapping[str, Given],
    numbers: Mapping[str, int],
    file: File | None,
    tokens: tuple[Token, ...],
    users: Iterable[UserSettings],
) -> HttpSettings | None:
    """What the settings (by label) and the file add up to; None where the API is off."""
    tls = {name: given[f"[http] {name}"] for name in _TLS if f"[http] {name}" in given}
    check_tls(tls)
    address, spot = given["http"]
    if address is None:
        return None
    if not is_closed(tokens, users) and not is_loopback(address):
        form = ", with this as address under [http]" if spot.keys == ("http",) else ""
        port = address.port if isinstance(address, TcpAddress) else 0
        raise spot.wrong(
            f"{address} can be reached by others, and there is no token to keep them out;"
            f" add a [[user]] with one (penstock token new NAME){form}, or use 127.0.0.1:{port}"
        )
    return HttpSettings(
        address=address,
        tokens=tokens,
        tls_certificate=tls["tls-certificate"].value if tls else None,
        tls_key=tls["tls-key"].value if tls else None,
        **numbers,
        place=file.path if file is not None else "",
    )


def is_closed(tokens: tuple[Token, ...], users: Iterable[UserSettings]) -> bool:
    """Whether callers are asked for a token."""
    return bool(tokens) or any(it.hashes for it in users)


def tokens_in_file(file: File | None) -> tuple[Token, ...]:
    return tuple(_tokens(file)) if file is not None else ()


def _tokens(file: File) -> Iterator[Token]:
    # By what may be there once only: the section that has it. The texts of tokens are looked up, never shown.
    seen: dict[tuple[str, str], str] = {}
    for spot, section in sections_of(file, ("http", "tokens"), "http.tokens"):
        given = read_section(spot, section, TOKEN_KEYS)
        for name in ("name", "token"):
            first = seen.setdefault((name, given[name].value), spot.name)
            if first != spot.name:
                raise given[name].spot.wrong(f"{first} has the same; use another")
        yield Token(**{name: it.value for name, it in given.items()})


def may_reload(old: HttpSettings | None, new: Settings) -> bool:
    """Whether a door opened by `old` goes by the new tokens and users; else those in force stay.

    They stay where the new settings have no tokens for a door that others can reach: it keeps its address
    until a restart, and must not be open to everybody until then.
    """
    tokens = new.http.tokens if new.http is not None else ()
    return old is None or is_loopback(old.address) or is_closed(tokens, new.users)


def warnings(settings: Settings) -> list[str]:
    """What is allowed, but should be known to whoever starts a broker with these settings."""
    http = settings.http
    if http is not None and settings.users and not is_closed(http.tokens, settings.users):
        return [
            f"http: whoever reaches {http.address} may do everything there, whatever rights users have, as "
            "none has a token; give one to each who needs it (penstock token new NAME), or switch http off"
        ]
    if http is None or http.tls_certificate is not None or is_loopback(http.address):
        return []
    return [
        f"http: {http.address} can be reached by others, and tokens travel there unencrypted;"
        " set tls-certificate and tls-key under [http], unless a proxy with TLS stands before it"
    ]
