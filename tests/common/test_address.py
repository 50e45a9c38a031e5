"""Addresses: every form there and back, every mistake with its sentence, and which two cannot be together."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.common.address import (
    Address,
    AddressError,
    TcpAddress,
    UnixAddress,
    addresses_clash,
    is_loopback,
    parse_address,
)
from penstock.errors import PenstockError


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("127.0.0.1:8888", TcpAddress("127.0.0.1", 8888), "127.0.0.1:8888"),
        ("0.0.0.0:0", TcpAddress("0.0.0.0", 0), "0.0.0.0:0"),
        ("[::1]:9100", TcpAddress("::1", 9100), "[::1]:9100"),
        ("[0:0::0:1]:65535", TcpAddress("::1", 65535), "[::1]:65535"),
        ("[FE80::1%eth0]:1", TcpAddress("fe80::1%eth0", 1), "[fe80::1%eth0]:1"),
        ("localhost:007", TcpAddress("localhost", 7), "localhost:7"),
        ("Broker-1.example.:80", TcpAddress("Broker-1.example.", 80), "Broker-1.example.:80"),
        ("my_service:80", TcpAddress("my_service", 80), "my_service:80"),
        ("unix:/run/penstock.sock", UnixAddress("/run/penstock.sock"), "unix:/run/penstock.sock"),
        ("unix:a:1", UnixAddress("a:1"), "unix:a:1"),
        ("unix:" + "x" * 107, UnixAddress("x" * 107), "unix:" + "x" * 107),
    ],
)
def test_what_can_be_written(text: str, address: Address, shown: str) -> None:
    assert parse_address(text) == address
    assert str(address) == shown


FORMS = "use HOST:PORT, [IPV6]:PORT or unix:PATH"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", f"there is no port; {FORMS}"),
        ("off", f"there is no port; {FORMS}"),
        ("127.0.0.1", f"there is no port; {FORMS}"),
        ("[::1]", f"there is no port; {FORMS}"),
        (
            ":8888",
            "there is no host; use 127.0.0.1:8888 for this machine only, 0.0.0.0:8888 for every network",
        ),
        ("a:", "the port '' is none; use a number from 0 (any free one) to 65535"),
        ("a:http", "the port 'http' is none; use a number from 0 (any free one) to 65535"),
        ("a:65536", "the port '65536' is none; use a number from 0 (any free one) to 65535"),
        ("a:-1", "the port '-1' is none; use a number from 0 (any free one) to 65535"),
        ("a:٣", "the port '٣' is none; use a number from 0 (any free one) to 65535"),
        ("::1:8888", "an IPv6 address needs brackets and a port; use the form [::1]:9100"),
        ("::1", "an IPv6 address needs brackets and a port; use the form [::1]:9100"),
        ("[1.2.3.4]:1", f"'1.2.3.4' is no IPv6 address; {FORMS}"),
        ("127.1:80", "'127.1' is no IPv4 address; use four numbers, as in 127.0.0.1"),
        ("127.0.0.256:80", "'127.0.0.256' is no IPv4 address; use four numbers, as in 127.0.0.1"),
        ("010.0.0.1:80", "'010.0.0.1' is no IPv4 address; use four numbers, as in 127.0.0.1"),
        ("a..b:80", f"'a..b' can be no host's name; {FORMS}"),
        ("-a:80", f"'-a' can be no host's name; {FORMS}"),
        ("http://a:80", f"'http://a' can be no host's name; {FORMS}"),
        ("bücher:80", f"'bücher' can be no host's name; {FORMS}"),
        ("x" * 64 + ":80", f"{'x' * 64!r} can be no host's name; {FORMS}"),
        (".".join(["x" * 50] * 5) + ":80", f"{'.'.join(['x' * 50] * 5)!r} can be no host's name; {FORMS}"),
        ("a :80", "there can be no blanks and control characters in it; leave them out"),
        ("unix:/a b", "there can be no blanks and control characters in it; leave them out"),
        ("unix:/a\0b", "there can be no blanks and control characters in it; leave them out"),
        ("unix:", "there is no path; use unix:PATH"),
        ("unix:" + "ü" * 54, "the path has 108 bytes; use one of at most 107"),
    ],
)
def test_what_cannot(text: str, problem: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert caught.value.problem == problem
    assert str(caught.value) == f"address {text!r}: {problem}"
    assert isinstance(caught.value, PenstockError)


@settings(max_examples=300, deadline=None)
@example("[::1]:0")
@example("unix:x")
@given(
    st.text(alphabet="[]:.-%0123456789abcdefunix/ \n", max_size=30)
    | st.from_regex(r"([0-9]{1,3}\.){3}[0-9]{1,3}:[0-9]{1,5}", fullmatch=True)
    | st.builds("[{}]:{}".format, st.ip_addresses(v=6), st.integers(0, 65535))
)
def test_any_text_is_an_address_that_comes_back_or_an_error(text: str) -> None:
    try:
        address = parse_address(text)
    except AddressError:
        return  # the table above has the sentences
    assert parse_address(str(address)) == address
    assert len(str(address).split()) == 1


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("127.0.0.1:1", "127.0.0.1:1", True),
        ("127.0.0.1:1", "127.0.0.1:2", False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("127.0.0.1:1", "127.0.0.2:1", False),
        ("0.0.0.0:1", "127.0.0.1:1", True),
        ("[::]:1", "[::1]:1", True),
        ("[::]:1", "0.0.0.0:1", False),
        ("[::1]:1", "[0::1]:1", True),
        ("[::1]:1", "127.0.0.1:1", False),
        ("0.0.0.0:1", "localhost:1", False),
        ("a.example:1", "A.Example:1", True),
        ("a.example:1", "b.example:1", False),
        ("unix:/run/a", "unix:/run/a", True),
        ("unix:/run/a", "unix:/run//x/../a", True),
        ("unix:/run/a", "unix:/run/b", False),
        ("unix:a", "a:1", False),
    ],
)
def test_which_two_cannot_be_together(one: str, other: str, clash: bool) -> None:
    assert addresses_clash(parse_address(one), parse_address(other)) is clash
    assert addresses_clash(parse_address(other), parse_address(one)) is clash


@pytest.mark.parametrize(
    ("text", "only_here"),
    [
        ("127.0.0.1:1", True),
        ("127.255.0.9:0", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("LOCALHOST.:1", True),
        ("unix:0.0.0.0", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("[::ffff:127.0.0.1]:1", False),
        ("[::1%lo]:1", False),
        ("[127::1]:1", False),
        ("12.7.0.1:1", False),
        ("127-a.example:1", False),
        ("127.example:1", False),
        ("localhost.example:1", False),
        ("notlocalhost:1", False),
    ],
)
def test_which_are_for_this_machine_only(text: str, only_here: bool) -> None:
    assert is_loopback(parse_address(text)) is only_here
