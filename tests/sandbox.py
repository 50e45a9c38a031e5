"""Runs a command under what a systemd unit forbids: `python -m tests.sandbox UNIT STATE COMMAND…`, as root.

There is no systemd where tests run, so this does to itself what systemd would do, with the same library: the
filter of system calls and address families, no memory that is written and executed, no capabilities, all
read-only but the unit's folder (/var/lib/penstock is STATE), /proc without the rest of the machine. It runs
as the owner of the sources, for these may be where nobody else can read them.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STATE = "/var/lib/penstock"

_ALLOW, _EPERM = 0x7FFF0000, 0x00050001
_EQ, _MASKED_EQ = 4, 7
_WRITE_AND_EXEC, _EXEC = 6, 4
_NEW_MOUNTS = 0x00020000
_NO_NEW_PRIVILEGES, _DROP = 38, 24
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}

_seccomp = ctypes.CDLL("libseccomp.so.2")
_seccomp.seccomp_init.restype = ctypes.c_void_p
_libc = ctypes.CDLL(None, use_errno=True)


class _Compared(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("how", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def values(unit: str, name: str) -> list[str]:
    """What a unit says under a name, once for every time."""
    return re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)


def calls_of(group: str) -> set[str]:
    """The system calls of a word of `SystemCallFilter`."""
    if not group.startswith("@"):
        return {group}
    said = subprocess.run(
        ["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    words = [line.strip() for line in said.splitlines()[1:] if line.strip() and "#" not in line]
    return set().union(*map(calls_of, words))


def allowed_calls(unit: str) -> set[str]:
    allowed: set[str] = set()
    for line in values(unit, "SystemCallFilter"):
        calls = set().union(*map(calls_of, line.removeprefix("~").split()))
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    return allowed


def forbid(unit: str) -> None:
    """The filters, from here on and for all that is started."""
    pointer = ctypes.c_void_p
    only = pointer(_seccomp.seccomp_init(_EPERM))
    for name in sorted(allowed_calls(unit) - {"socket"}):
        _rule(only, _ALLOW, name)
    (families,) = values(unit, "RestrictAddressFamilies")
    for family in families.split():
        _rule(only, _ALLOW, "socket", _Compared(0, _EQ, _FAMILIES[family], 0))
    memory = pointer(_seccomp.seccomp_init(_ALLOW))
    assert values(unit, "MemoryDenyWriteExecute") == ["yes"]
    _rule(memory, _EPERM, "mmap", _Compared(2, _MASKED_EQ, _WRITE_AND_EXEC, _WRITE_AND_EXEC))
    for name in ("mprotect", "pkey_mprotect"):
        _rule(memory, _EPERM, name, _Compared(2, _MASKED_EQ, _EXEC, _EXEC))
    for made in (memory, only):
        assert _seccomp.seccomp_load(made) == 0


def _rule(where: Any, action: int, name: str, *compared: _Compared) -> None:
    number = _seccomp.seccomp_syscall_resolve_name(name.encode())
    if number != -1:  # else no machine of this kind has it
        arguments = (_Compared * len(compared))(*compared)
        done = _seccomp.seccomp_rule_add_array(where, action, number, len(compared), arguments)
        assert done == 0 or number < 0, (name, done)  # below 0: only other kinds of machines have it


def mount(*words: str, must: bool = True) -> None:
    subprocess.run(["mount", *words], capture_output=not must, check=must, timeout=30)


def main(unit_path: str, state: str, *command: str) -> None:
    unit, owner = Path(unit_path).read_text(encoding="utf-8"), ROOT.stat()
    assert values(unit, "ProtectSystem") == ["strict"]
    assert (values(unit, "ProtectProc"), values(unit, "ProcSubset")) == (["invisible"], ["pid"])
    assert _libc.unshare(_NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    mount("--make-rprivate", "/")
    os.chown(state, owner.st_uid, owner.st_gid)
    folder = os.open(state, os.O_PATH)  # what is mounted below may hide it
    mount("-t", "tmpfs", "tmpfs", str(Path(STATE).parent))
    Path(STATE).mkdir()
    mount("--bind", f"/proc/{os.getpid()}/fd/{folder}", STATE)
    os.close(folder)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = line.split()[4]
        hidden = not os.path.exists(place)  # by what was mounted above it just now
        if place != STATE and not hidden and not place.startswith(("/proc", "/sys", "/dev")):
            mount("-o", "remount,bind,ro", place)
    mount("-t", "proc", "-o", "subset=pid,hidepid=invisible", "proc", "/proc")
    os.umask(int(values(unit, "UMask")[0], 8))
    for number in range(64):
        _libc.prctl(_DROP, number, 0, 0, 0)
    os.setgroups([])
    os.setresgid(*[owner.st_gid] * 3)
    os.setresuid(*[owner.st_uid] * 3)
    assert _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    forbid(unit)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
