"""Rights: what patterns give, and nothing else."""

import pytest

from penstock.model.rights import EVERYBODY, KEPT_NAMES, NOBODY, WORDS, Grant, Right, User, by_role

TEAM = User(
    "team", (Grant(("orders.*", "in?"), Right.SEND | Right.READ), Grant(("orders.x",), Right.RECEIVE))
)


@pytest.mark.parametrize(
    ("queue", "rights"),
    [
        ("orders.a", Right.SEND | Right.READ),
        ("orders.x", Right.SEND | Right.READ | Right.RECEIVE),
        ("orders.x.dead", Right.SEND | Right.READ | Right.RECEIVE),
        ("orders", Right.NONE),
        ("xorders.a", Right.NONE),
        ("in1", Right.SEND | Right.READ),
        ("in12", Right.NONE),
        ("ORDERS.a", Right.NONE),
    ],
)
def test_what_patterns_give(queue: str, rights: Right) -> None:
    for _ in range(2):  # once found, once remembered
        assert TEAM.rights(queue) == rights
    for right in Right.ALL | Right.ADMIN:
        assert TEAM.may(right, queue) == bool(rights & right)
    assert EVERYBODY.may(Right.ADMIN, queue)
    assert NOBODY.rights(queue) == Right.NONE


def test_brackets_are_letters() -> None:
    user = User("u", (Grant(("a[bc]*",), Right.READ),))
    assert user.may(Right.READ, "a[bc]d")
    assert not user.may(Right.READ, "ab")


def test_every_queue_and_some_queue() -> None:
    assert not TEAM.may(Right.READ)
    assert TEAM.may_some(Right.READ)
    assert TEAM.may_some(Right.OPERATE | Right.SEND)
    assert not TEAM.may_some(Right.OPERATE)
    assert by_role("r", "read").may(Right.READ)
    assert not by_role("r", "read").may_some(Right.SEND | Right.RECEIVE | Right.OPERATE | Right.ADMIN)
    assert all(by_role("o", "operate").may(right) for right in Right.ALL)
    assert not by_role("o", "operate").may(Right.ADMIN, "q")
    assert by_role("a", "admin").may(Right.ADMIN)


def test_what_is_seen() -> None:
    assert TEAM.visible(["orders.a", "payroll", "in1", "orders.a.dead"]) == [
        "orders.a",
        "in1",
        "orders.a.dead",
    ]


def test_names_are_remembered_within_a_bound() -> None:
    user = User("u", (Grant(("q1*",), Right.READ),))
    for number in range(3 * KEPT_NAMES):
        assert user.may(Right.READ, f"q{number}") == str(number).startswith("1")
    assert len(user._known) <= KEPT_NAMES


def test_the_end() -> None:
    assert not User("u").is_over(1 << 60)
    assert not User("u", expires_us=10).is_over(9)
    assert User("u", expires_us=10).is_over(10)


def test_words() -> None:
    assert list(WORDS) == ["send", "receive", "read", "operate"]
    assert (Right.SEND | Right.OPERATE).word == "send or operate"
    assert TEAM.words == "send, receive, read"
    assert EVERYBODY.words == "admin"
