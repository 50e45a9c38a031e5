"""The time of a log: it follows the machine's clock, and never goes back."""

import logging

import pytest

from penstock.common.clock import Clock

SECOND = 1_000_000
START_US = 1_700_000_000 * SECOND


class Machine:
    """A machine whose clock can be set."""

    def __init__(self) -> None:
        self.steady_us = 5 * SECOND
        self.set_us = START_US - self.steady_us
        self.clock = Clock(lambda: 1000 * (self.steady_us + self.set_us), lambda: 1000 * self.steady_us)

    def later(self, seconds: float, looks: int = 1) -> int:
        """So long, with a look at the end of each part; by how much the time was put forward."""
        forward = 0
        for _ in range(looks):
            before = self.clock.now_us()
            self.steady_us += round(seconds * SECOND / looks)
            assert self.clock.now_us() >= before
            forward += self.clock.look()
            assert self.clock.now_us() >= before
        return forward

    def now(self) -> float:
        """In seconds since the start."""
        return (self.clock.now_us() - START_US) / SECOND


@pytest.fixture
def machine(caplog: pytest.LogCaptureFixture) -> Machine:
    caplog.set_level(logging.INFO)
    return Machine()


def test_it_is_the_time_of_the_machine(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert machine.now() == 0
    machine.steady_us += 7 * SECOND
    assert machine.now() == 7
    machine.set_us += 300_000  # kept right by somebody, little by little
    assert machine.later(1) == 0
    assert machine.now() == 8.3
    assert caplog.messages == []


def test_a_step_forward_counts_from_the_next_look_on(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.set_us += 86_400 * SECOND
    machine.steady_us += SECOND
    assert machine.now() == 1
    assert machine.clock.look() == 86_400 * SECOND
    assert machine.now() == 86_401
    assert machine.later(10, looks=200) == 0
    assert machine.now() == 86_411
    assert caplog.messages == ["the clock of this machine was set forward by 86400.0 s"]


def test_after_a_step_back_it_goes_on_slower_until_the_machine_is_there(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.set_us -= 60 * SECOND
    assert machine.later(1) == 0
    assert machine.now() == 1
    assert machine.later(100, looks=50) == 0
    assert machine.now() == 91
    assert machine.later(490, looks=1) == 0  # the machine was busy: that is no step
    assert machine.now() == 532
    machine.later(500, looks=5000)
    assert machine.now() == pytest.approx(1031, abs=0.1)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the clock of this machine was set back by 60.0 s: ")


def test_a_step_forward_that_only_makes_up_for_one_back_puts_nothing_forward(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.set_us -= 3600 * SECOND
    machine.later(1)
    machine.set_us += 3599 * SECOND
    assert machine.later(1) == 0
    assert machine.now() == pytest.approx(1.9)
    machine.set_us += 11 * SECOND
    assert machine.later(1) == pytest.approx(10 * SECOND, abs=SECOND)
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "the clock of this machine was set back by 3600.0 s",
        "the clock of this machine was set forward by 3599.0 s",
        "the clock of this machine was set forward by 11.0 s",
    ]


def test_a_log_that_is_ahead_is_where_it_begins(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert machine.clock.not_before(START_US - SECOND) == 0
    assert machine.now() == 0
    assert caplog.messages == []
    assert machine.clock.not_before(START_US + 90 * SECOND) == 90 * SECOND
    assert machine.now() == 90
    assert machine.clock.not_before(START_US + 90 * SECOND + SECOND // 2) == 0
    assert machine.clock.stepped_us == 90 * SECOND
    assert machine.now() == 90.5
    assert caplog.messages == [
        "the clock of this machine is behind the log: the log's time never goes back, is 90.0 s ahead and "
        "waits for it"
    ]
    machine.later(10)
    assert machine.now() == 99.5
    machine.later(2000, looks=20_000)
    assert machine.now() == pytest.approx(2010, abs=0.1)
