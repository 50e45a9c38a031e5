"""One contract, every engine: what must hold wherever messages live.

A new engine writes a `Harness` (see `contract_rig.py`) and one class:

    class TestJetStream(EngineContract):
        @pytest.fixture
        def harness(self) -> Iterator[Harness]: ...

and runs everything below, unchanged. Every test speaks of `penstock.engines.interface.Engine` and of
nothing else. What belongs to one engine alone (files, crashes of the disk, retention by segments) has
tests of its own.
"""

import pytest

from tests.engines.contract_accept import Accepting, Steps, Transactions
from tests.engines.contract_deadletters import DeadLetters, Redriving, Removing, SentDead
from tests.engines.contract_delivery import GivingBack, Order, Settling, Taking
from tests.engines.contract_log import Describing, Events, ReadersAndPolicies, Reading
from tests.engines.contract_looking import Changes, Counting, States, TheEngine
from tests.engines.contract_repairs import Repairing
from tests.engines.contract_restart import Restarts
from tests.engines.contract_resuming import Durable, Resuming
from tests.engines.contract_rig import Harness, Rig
from tests.engines.contract_time import Expiry, ExpiryWhileHeld, NewTtl

__all__ = ["EngineContract", "Harness", "Rig"]


class EngineContract(
    Accepting,
    Transactions,
    Steps,
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
):
    """All parts. A subclass brings the fixture `harness`."""

    @pytest.fixture
    def rig(self, harness: Harness) -> Rig:
        return Rig(harness)
