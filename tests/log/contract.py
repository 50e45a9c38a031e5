"""One contract, every engine: what must hold wherever messages live.

A new engine writes a `Harness` (see `contract_rig.py`) and one class:

    class TestJetStream(EngineContract):
        @pytest.fixture
        def harness(self) -> Iterator[Harness]: ...

and runs everything below, unchanged. Every test speaks of `penstock.log.log.Log` and of
nothing else. What belongs to one engine alone (files, crashes of the disk, retention by segments) has
tests of its own.
"""

import pytest

from tests.log.contract_accept import Accepting, Steps, Transactions
from tests.log.contract_deadletters import DeadLetters, Redriving, Removing, SentDead
from tests.log.contract_delays import DelayedStages, Delays, DelaysAndRestarts, GivenBackLater, Headers, Whys
from tests.log.contract_deleting import Deleting
from tests.log.contract_delivery import GivingBack, Order, Settling, Taking
from tests.log.contract_log import Describing, Events, ReadersAndPolicies, Reading
from tests.log.contract_looking import Changes, Counting, States, TheEngine
from tests.log.contract_repairs import Repairing
from tests.log.contract_restart import Restarts
from tests.log.contract_resuming import Durable, Resuming
from tests.log.contract_rig import Harness, Rig
from tests.log.contract_stages import Committing, EndingStages, StagedRepairs, Staging
from tests.log.contract_time import ClockSteps, Expiry, ExpiryWhileHeld, NewTtl

__all__ = ["EngineContract", "Harness", "Rig"]


class EngineContract(
    Accepting,
    Transactions,
    Steps,
    Staging,
    Committing,
    StagedRepairs,
    EndingStages,
    Taking,
    Settling,
    GivingBack,
    Order,
    DeadLetters,
    SentDead,
    Redriving,
    Repairing,
    Removing,
    Expiry,
    ExpiryWhileHeld,
    NewTtl,
    ClockSteps,
    Delays,
    GivenBackLater,
    DelayedStages,
    DelaysAndRestarts,
    Headers,
    Whys,
    Reading,
    Events,
    Describing,
    ReadersAndPolicies,
    States,
    Counting,
    Changes,
    TheEngine,
    Restarts,
    Resuming,
    Durable,
    Deleting,
):
    """All parts. A subclass brings the fixture `harness`."""

    @pytest.fixture
    def rig(self, harness: Harness) -> Rig:
        return Rig(harness)
