"""Orders: the messages of the demonstration. Each has a number, and everything else in it follows from that.

    {"id": 17, "region": "south", "amount": 346.24}

Amounts are whole cents, so that sums can be compared to the last one.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

QUEUE: Final = "orders"
REGIONS: Final = ("east", "north", "south", "west")
CENTS_MAX: Final = 99_991
"""A prime, so that amounts do not repeat before all have been there."""

SCHEMA: Final = "id bigint not null, region string not null, amount decimal(12,2) not null"
"""What Spark makes of an order."""

NO_ORDER: Final = b'{"id": 0, "region": "north", "amount": "twelve"}'
"""What a sender with a fault might send: JSON, and no order."""

CLOSING: Final = "closing"
"""The region of an order that only says that time has gone on."""


class Sum(NamedTuple):
    """How many orders, and their amount."""

    orders: int
    cents: int


def body_of(number: int) -> bytes:
    cents = number * 7_919 % CENTS_MAX + 1
    region = REGIONS[number % len(REGIONS)].encode()
    return b'{"id": %d, "region": "%s", "amount": %d.%02d}' % (number, region, *divmod(cents, 100))


def closing_order(number: int) -> bytes:
    return b'{"id": %d, "region": "%s", "amount": 0.00}' % (number, CLOSING.encode())


def number_of(body: bytes) -> int:
    return int(json.loads(body)["id"])


def sums_of(numbers: Iterable[int]) -> Mapping[str, Sum]:
    """By region, in the order of the regions."""
    sums = dict.fromkeys(REGIONS, Sum(0, 0))
    for number in numbers:
        region = REGIONS[number % len(REGIONS)]
        orders, cents = sums[region]
        sums[region] = Sum(orders + 1, cents + number * 7_919 % CENTS_MAX + 1)
    return sums


def amount(cents: int) -> str:
    return f"{cents // 100:,}.{cents % 100:02}"
