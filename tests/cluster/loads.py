"""Load on several queues of a site at once, with transactions over all of these, and what is done with it."""

from typing import Final

from tests.cluster.load import Load
from tests.cluster.processes import FrontEnd, Site
from tests.cluster.transacting import Transacting

LOGS_MAX: Final = 2
"""So many logs of a cluster are under load: two cores have to run all of this."""


class Loads:
    """The same on a queue of each of some logs of a site, of which the first is meant where one is; and
    transactions over these and more queues."""

    def __init__(self, site: Site, logs_max: int = LOGS_MAX) -> None:
        self.loads = [Load(site, site.queue(shard)) for shard in range(min(site.shards, logs_max))]
        self.transactions = Transacting(site, self.loads)

    def __enter__(self) -> "Loads":
        for load in self.loads:
            load.__enter__()
        self.transactions.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.transactions.end()
        for load in self.loads:
            load.__exit__()

    def flows(self, fronts: list[FrontEnd] | None = None) -> None:
        for load in self.loads:
            load.flows(fronts)
        self.transactions.flows(fronts)

    def wait(self, seconds: float) -> None:
        self.loads[0].wait(seconds)

    def lead_changed(self, since: float, until: float | None = None) -> None:
        for load in self.loads:
            load.lead_changed(since, until)

    def pauses(self, since: float, without: FrontEnd | None = None) -> str:
        return "; ".join(load.pauses(since, without) for load in self.loads)

    def check(self) -> str:
        self.transactions.end()
        told = [load.check() for load in self.loads]
        return "\n".join([*told, self.transactions.check()])
