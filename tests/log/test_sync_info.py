"""How long syncs take, in buckets."""

import pytest

from penstock.log.info import SyncInfo


@pytest.mark.parametrize(
    ("seconds", "part", "expected"),
    [
        ([], 0.5, 0.0),
        ([0.0001] * 10, 0.5, 0.000125),
        ([0.0001] * 10, 1.0, 0.00025),
        ([0.0002] * 98 + [0.003] * 2, 0.98, 0.00025),
        ([0.0002] * 98 + [0.003] * 2, 0.99, 0.00375),
        ([7.0] * 3, 0.5, 1.0),
    ],
)
def test_a_quantile_is_found_within_its_bucket(seconds: list[float], part: float, expected: float) -> None:
    sync = SyncInfo()
    for took in seconds:
        sync.add(took)
    assert sync.quantile(part) == pytest.approx(expected)
