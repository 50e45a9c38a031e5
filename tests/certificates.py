"""Certificates for tests: an authority and what it signs, made by the `openssl` command.

They have what X.509 asks for, and what Python 3.13 and newer insist on: an authority says that it may sign,
and every certificate names the key of who has signed it.
"""

import subprocess
from pathlib import Path
from typing import Final

KEY: Final = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
HERE: Final = "DNS:localhost,IP:127.0.0.1"


def openssl(folder: Path, command: str) -> None:
    done = subprocess.run(
        ["openssl", *command.split()], cwd=folder, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr


def make_authority(folder: Path, name: str = "ca") -> None:
    """NAME.pem and NAME.key. A server may have them as its own, for those who trust this authority."""
    openssl(
        folder,
        f"req -x509 {KEY} -days 2 -subj /CN={name} -addext keyUsage=critical,digitalSignature,keyCertSign"
        f" -addext subjectAltName={HERE} -keyout {name}.key -out {name}.pem",
    )


def make_certificate(
    folder: Path, name: str, authority: str = "ca", names: str = HERE, days: int = 2
) -> None:
    """NAME.pem and NAME.key for a server with these names, signed by an authority."""
    (folder / f"{name}.ext").write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\n")
    openssl(folder, f"req -new {KEY} -subj /CN={name} -keyout {name}.key -out {name}.csr")
    openssl(
        folder,
        f"x509 -req -in {name}.csr -CA {authority}.pem -CAkey {authority}.key -CAcreateserial -days {days}"
        f" -extfile {name}.ext -out {name}.pem",
    )


def make_certificates(folder: Path) -> None:
    """An authority, and by it one for a server and one for a client."""
    make_authority(folder)
    for name in ("server", "client"):
        make_certificate(folder, name)
