"""Tally: attempted, confirmed, delivered, settled; and what that says about a broker.

Messages are known by numbers that their sender gives them. The verdict:

    lost       confirmed to the sender, and never seen again
    invented   delivered, and never sent
    doubled    delivered again after its settlement was known to be safe: nobody allows that
    repeated   delivered more than once otherwise: its consumer, or the broker, died in between

Used by the demonstration and by the tests, so both mean the same by "nothing was lost".
"""

from collections import Counter
from collections.abc import Iterable


class Tally:
    """Counts over any number of broker lives."""

    def __init__(self) -> None:
        self._attempted: set[int] = set()
        self._confirmed: set[int] = set()
        self._delivered: Counter[int] = Counter()
        self._settled: set[int] = set()
        self._doubled: set[int] = set()

    def attempted(self, numbers: Iterable[int]) -> None:
        """About to be sent. Say it before the first byte leaves."""
        self._attempted.update(numbers)

    def confirmed(self, numbers: Iterable[int]) -> None:
        """The broker has given its receipt."""
        self._confirmed.update(numbers)

    def delivered(self, numbers: Iterable[int]) -> None:
        """A consumer has got them."""
        for number in numbers:
            self._delivered[number] += 1
            if number in self._settled:
                self._doubled.add(number)

    def settled(self, numbers: Iterable[int]) -> None:
        """Their settlement is known to be safe: they must not come again."""
        self._settled.update(numbers)

    @property
    def lost(self) -> set[int]:
        return self._confirmed - self._delivered.keys()

    @property
    def invented(self) -> set[int]:
        return self._delivered.keys() - self._attempted

    @property
    def doubled(self) -> set[int]:
        return self._doubled

    @property
    def repeated(self) -> int:
        return sum(1 for count in self._delivered.values() if count > 1) - len(self._doubled)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.invented or self.doubled)

    def counts(self) -> dict[str, int]:
        """Every figure by its name, in the order in which one reads them."""
        return {
            "attempted": len(self._attempted),
            "confirmed": len(self._confirmed),
            "delivered": len(self._delivered),
            "lost": len(self.lost),
            "invented": len(self.invented),
            "doubled": len(self.doubled),
            "repeated": self.repeated,
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {count:,}" for name, count in self.counts().items())
