"""What /metrics says, parsed: for the tests of metrics and of those who rely on them."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.http.api import Api
from tests.server.harness import BrokerProcess

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scraped:
    """What one scrape has said."""

    samples: dict[tuple[str, Labels], float]
    families: dict[str, tuple[str, frozenset[str]]]  # by name: type and labels

    def __getitem__(self, key: tuple[str, dict[str, str]]) -> float:
        name, labels = key
        return self.samples[name, frozenset(labels.items())]

    def of_queue(self, name: str, queue: str) -> float:
        return self[name, {"queue": queue}]

    def labelled(self, label: str) -> set[str]:
        return {value for _, labels in self.samples for key, value in labels if key == label}


def scrape(api: Api) -> Scraped:
    reply = api.ask("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: dict[tuple[str, Labels], float] = {}
    families: dict[str, tuple[str, frozenset[str]]] = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels: set[str] = set()
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
            labels |= set(sample.labels) - {"le"}
        assert name not in families
        families[name] = family.type, frozenset(labels)
    return Scraped(samples, families)


def url(broker: BrokerProcess, protocol: str) -> str:
    """Where clients of that protocol find it."""
    return f"{protocol}://127.0.0.1:{broker.ports[protocol]}"
