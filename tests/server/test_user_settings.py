"""The users of the settings: what can be said, and every mistake with its line."""

from pathlib import Path

import pytest

from penstock.common.tokens import hash_token
from penstock.model.rights import Grant, Right, User
from penstock.server.settings_read import reloadable_difference
from tests.server.settings_source import Source

HASH = hash_token("ann.secret")
RIGHTS = 'rights = [{queues = "a.*", may = ["send", "read"]}]\n'
ANN = f'[[user]]\nname = "ann"\ntoken-hash = "{HASH}"\n'


@pytest.fixture
def read(tmp_path: Path) -> Source:
    return Source(tmp_path)


def test_a_user_with_everything(read: Source) -> None:
    (it,) = read(
        file=f'[[user]]\nname = "ann"\ncertificate = ["x", "y"]\ntoken-hash = ["{HASH}"]\n'
        "expires = 2030-01-31T12:00:00+01:00\n"
        'rights = [{queues = ["a", "b.*"], may = ["send", "receive"]}, {queues = "c", may = ["operate"]}]\n'
    ).users
    assert it.user == User(
        "ann",
        (Grant(("a", "b.*"), Right.SEND | Right.RECEIVE), Grant(("c",), Right.OPERATE)),
        expires_us=1_896_087_600_000_000,
    )
    assert (it.certificates, it.hashes) == (("x", "y"), (HASH,))
    assert HASH not in repr(it)


def test_an_admin(read: Source) -> None:
    (it,) = read(file=ANN + "admin = true\n").users
    assert it.user == User("ann", is_admin=True)


def test_with_tokens_others_may_reach_the_api(read: Source) -> None:
    assert read("--http 0.0.0.0:1", ANN + RIGHTS).http is not None
    by_certificate = f'[[user]]\nname = "ann"\ncertificate = "x"\n{RIGHTS}'
    assert "no token to keep them out" in read.error("--http 0.0.0.0:1", by_certificate)


@pytest.mark.parametrize(
    ("file", "error"),
    [
        (
            ANN,
            "line 1: [[user]] 1: it may do nothing; add rights = [{queues = …, may = […]}], or admin = true",
        ),
        (
            ANN + RIGHTS + "admin = true",
            "line 4: [[user]] 1 rights: an admin may do everything; leave rights out, or admin",
        ),
        (ANN + RIGHTS + ANN + RIGHTS, "line 6: [[user]] 2 name: [[user]] 1 has the same; use another"),
        (
            ANN + RIGHTS + ANN.replace("ann", "bob") + RIGHTS,
            "line 7: [[user]] 2 token-hash: [[user]] 1 has the same; use another",
        ),
        (
            f'[[http.tokens]]\nname = "ann"\nrole = "read"\ntoken = "0123456789abcdef"\n{ANN}{RIGHTS}',
            "line 6: [[user]] 1 name: [[http.tokens]] 'ann' has the same; use another",
        ),
        (
            ANN + 'rights = [{queues = "a", may = ["fly"]}]',
            "line 4: [[user]] 1 rights 1 may = ['fly']: use a list of some of send, receive, read, operate",
        ),
        (
            ANN + 'rights = [{queue = "a", may = ["send"]}]',
            "line 4: [[user]] 1 rights 1 queue: there is no such setting; did you mean queues?",
        ),
        (ANN + "rights = []", "rights = []: use a list, as in"),
        (ANN + RIGHTS + 'expires = "soon"', "expires = 'soon': use a date, 2027-01-31, or a time"),
        (ANN + RIGHTS + "expires = 2030-01-31T12:00:00", "use a date, 2027-01-31, or a time with its zone"),
        (
            '[[user]]\nname = "ann"\ntoken-hash = "secret"\nadmin = true',
            "token-hash: use what `penstock token",
        ),
        (f'[[user]]\nname = "ann"\n{RIGHTS}', "[[user]] 'ann': nobody can be recognised as this one"),
        (
            '[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:1"\nuser = "x"',
            "there is no [[user]] 'x'; add one",
        ),
        ("[user]\nname = 1", "user: begin each one with [[user]]"),
    ],
)
def test_mistakes_are_told_with_their_line(read: Source, file: str, error: str) -> None:
    told = read.error(file=file)
    assert error in told
    assert HASH not in told
    assert "secret" not in told


def test_users_are_in_force_at_once(read: Source) -> None:
    none, one = read(), read(file=ANN + RIGHTS)
    assert reloadable_difference(none, one).users == one.users
    assert reloadable_difference(none, one).others == []
    assert reloadable_difference(one, none).users == ()


def test_an_open_door_does_not_lose_its_last_user(read: Source) -> None:
    old = read("--http 0.0.0.0:1", ANN + RIGHTS)
    reload = reloadable_difference(old, read("--http 127.0.0.1:1"))
    assert reload.users == old.users
    assert "[[http.tokens]]" in reload.others


DOORS = "".join(
    f'[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:{port}"\ntls-certificate = "s.pem"\n'
    f'tls-key = "s.key"\ntls-client-ca = "{authority}.pem"\n'
    for port, authority in ((7001, "own"), (7002, "others"))
)


def test_where_there_are_several_authorities_one_says_whose_names_count(read: Source) -> None:
    by_name = f'[[user]]\nname = "ann"\ncertificate = "x"\n{RIGHTS}'
    one = DOORS.replace("others.pem", "own.pem")
    assert read(file=one + by_name).users[0].certificate_ca == ""
    assert "'ann' certificate: listeners trust 2 authorities, and each could sign this name" in read.error(
        "", DOORS + by_name
    )
    (it,) = read(file=DOORS + by_name + 'certificate-ca = "own.pem"\n').users
    assert it.certificate_ca == "own.pem"
    assert "no [[listener]] has 'none.pem'" in read.error(
        "", DOORS + by_name + 'certificate-ca = "none.pem"\n'
    )
    no_name = ANN + RIGHTS + 'certificate-ca = "own.pem"\n'
    assert "certificate-ca: it needs certificate, too" in read.error("", DOORS + no_name)
