"""TLS of a listener and of the HTTP API: handshakes in memory, and every file that can be wrong."""

import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.common.address import TcpAddress
from penstock.common.given import SettingsError
from penstock.server.settings import HttpSettings, Listener
from penstock.server.tls import tls_files
from tests.certificates import make_authority, make_certificate, openssl


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for authority in ("ours", "theirs"):
        make_authority(folder, authority)
    make_certificate(folder, "broker", "ours")
    make_certificate(folder, "client", "ours")
    make_certificate(folder, "stranger", "theirs")
    openssl(folder, "genpkey -algorithm ed25519 -out ed25519.key")
    openssl(folder, "pkey -in broker.key -aes256 -passout pass:secret -out locked.key")
    (folder / "empty").write_bytes(b"")
    (folder / "noise").write_bytes(b"\xff\x00 nothing of use")
    text = (folder / "broker.pem").read_text()
    (folder / "torn.pem").write_text(text[: len(text) // 2])
    return folder


@pytest.fixture
def listener(files: Path) -> Listener:
    return Listener(
        "phpmq",
        TcpAddress("127.0.0.1", 0),
        tls_certificate=str(files / "broker.pem"),
        tls_key=str(files / "broker.key"),
        setting="[[listener]] 1",
        place="penstock.toml",
    )


def client_context(files: Path, certificate: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files / "ours.pem"))
    if certificate is not None:
        context.load_cert_chain(files / f"{certificate}.pem", files / f"{certificate}.key")
    return context


def talk(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Shakes hands, sends a word to the server, and returns the protocol's version. No socket is involved."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    client_end = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    waiting = [client_end, server_end]
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert waiting == []
    client_end.write(b"hello")
    assert server_end.read(5) == b"hello"
    return server_end.version() or ""


def test_a_listener_without_a_certificate_has_no_tls() -> None:
    assert tls_files(Listener("rq", TcpAddress("127.0.0.1", 0))) is None
    assert tls_files(HttpSettings()) is None


def context_of(door: Listener | HttpSettings) -> ssl.SSLContext:
    files = tls_files(door)
    assert files is not None
    return files.context


def test_a_client_that_trusts_the_certificate_gets_in(files: Path, listener: Listener) -> None:
    context = context_of(listener)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_mode is ssl.CERT_NONE
    client = client_context(files)
    assert talk(context, client) == "TLSv1.3"
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert talk(context, client) == "TLSv1.2"
    names = [cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] == "TLSv1.2"]
    assert names
    assert all(name.startswith("ECDHE-") and ("GCM" in name or "CHACHA20" in name) for name in names)
    client.set_ciphers("ECDHE+AES:!AESGCM")  # the older mode of the same cipher
    with pytest.raises(ssl.SSLError, match="NO_SHARED_CIPHER"):
        talk(context, client)


def test_a_client_that_does_not_trust_it_stays_out(files: Path, listener: Listener) -> None:
    client = ssl.create_default_context(cafile=str(files / "theirs.pem"))
    with pytest.raises(ssl.SSLCertVerificationError):
        talk(context_of(listener), client)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_with_a_client_ca_only_its_clients_get_in(
    files: Path, listener: Listener, version: ssl.TLSVersion
) -> None:
    context = context_of(replace(listener, tls_client_ca=str(files / "ours.pem")))

    def client(certificate: str | None) -> ssl.SSLContext:
        made = client_context(files, certificate)
        made.maximum_version = version
        return made

    assert talk(context, client("client"))
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        talk(context, client(None))
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        talk(context, client("stranger"))


def test_a_certificate_file_may_hold_what_leads_to_the_root(files: Path, listener: Listener) -> None:
    chain = files / "chain.pem"
    chain.write_text((files / "broker.pem").read_text() + (files / "ours.pem").read_text())
    assert talk(context_of(replace(listener, tls_certificate=str(chain))), client_context(files))


@pytest.mark.parametrize(
    ("setting", "file", "problem"),
    [
        ("tls-certificate", "missing", "cannot be read (No such file or directory); name a file that can"),
        ("tls-key", "missing", "cannot be read (No such file or directory); name a file that can"),
        ("tls-client-ca", "missing", "cannot be read (No such file or directory); name a file that can"),
        ("tls-certificate", ".", "cannot be read (Is a directory); name a file that can"),
        ("tls-key", ".", "cannot be read (Is a directory); name a file that can"),
        ("tls-client-ca", ".", "cannot be read (Is a directory); name a file that can"),
        ("tls-certificate", "empty", "holds no certificate that can be read (*); name a file in PEM form"),
        ("tls-certificate", "noise", "holds no certificate that can be read (*); name a file in PEM form"),
        (
            "tls-certificate",
            "torn.pem",
            "holds no certificate that can be read (pem lib); name a file in PEM form",
        ),
        (
            "tls-certificate",
            "broker.key",
            "holds no certificate that can be read (*); name a file in PEM form",
        ),
        ("tls-client-ca", "broker.key", "holds no certificate that can be read (*); name a file in PEM form"),
        ("tls-client-ca", "empty", "holds no certificate that can be read (*); name a file in PEM form"),
        ("tls-key", "empty", "cannot be used with 'CERTIFICATE' (*); name a private key in PEM form"),
        ("tls-key", "broker.pem", "cannot be used with 'CERTIFICATE' (*); name a private key in PEM form"),
        (
            "tls-key",
            "client.key",
            "is not the key of the certificate 'CERTIFICATE'; name the one it was made with",
        ),
        (
            "tls-key",
            "ed25519.key",
            "is not the key of the certificate 'CERTIFICATE'; name the one it was made with",
        ),
        (
            "tls-key",
            "locked.key",
            "is locked with a passphrase; unlock it: openssl pkey -in FILE -out NEW",
        ),
    ],
)
def test_wrong_files(files: Path, listener: Listener, setting: str, file: str, problem: str) -> None:
    path = str(files / file)
    changes: dict[str, Any] = {setting.replace("-", "_"): path}  # Any: mypy takes each for every field
    wrong = replace(listener, **changes)
    with pytest.raises(SettingsError) as caught:
        tls_files(wrong)
    problem = problem.replace("CERTIFICATE", str(files / "broker.pem"))
    before, _, after = f"penstock.toml: [[listener]] 1 {setting}: {path!r} {problem}".partition("*")
    assert str(caught.value).startswith(before)
    assert str(caught.value).endswith(after)


def test_the_http_api_has_tls_too(files: Path) -> None:
    http = HttpSettings(
        tls_certificate=str(files / "broker.pem"), tls_key=str(files / "broker.key"), place="penstock.toml"
    )
    context = context_of(http)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_mode is ssl.CERT_NONE
    assert talk(context, client_context(files)) == "TLSv1.3"
    missing = str(files / "missing")
    with pytest.raises(SettingsError) as caught:
        tls_files(replace(http, tls_key=missing))
    assert str(caught.value) == (
        f"penstock.toml: [http] tls-key: {missing!r} cannot be read (No such file or directory);"
        " name a file that can"
    )
