"""What holds for all tests: what they say when they fail, in which order they run, and the flags of Java.

Helpers of the tests make assertions too; when one fails, pytest shows the values in it.

Several processes share the work file by file, and what takes longest begins first (`FIRST`), so that none
works on alone at the end. Files that share something dear count as one (`TOGETHER`): one process makes it,
once. No test depends on any of that.
"""

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

HERE = Path(__file__).parent

TOGETHER = {
    "a Spark session": (
        "spark/test_exactly_once.py",
        "spark/test_read_stream.py",
        "spark/test_read_batch.py",
        "spark/test_write_stream.py",
        "spark/test_write_batch.py",
        "spark/test_redrive_at_scale.py",
        "spark/test_direct.py",
        "spark/test_shards.py",
        "spark/test_spark_docs.py",
        "spark/test_writing_docs.py",
        "spark/test_tables.py",
        "spark/test_sql_docs.py",
        "spark/test_files.py",
        "spark/test_filters.py",
        "spark/test_deleted.py",
        "spark/test_rates.py",
        "spark/test_lake.py",
    ),
    "another Spark session": (
        "report/test_numbers.py",
        "report/test_page.py",
        "pipeline/test_runs.py",
        "pipeline/test_graph.py",
        "pipeline/test_exporting.py",
        "pipeline/test_testing.py",
        "pipeline/test_parsing.py",
        "pipeline/test_judging.py",
        "pipeline/test_batchwise.py",
        "pipeline/test_service.py",
        "spark/test_addresses.py",
    ),
    "a cluster of Spark's": (
        "spark/test_cluster.py",
        "spark/test_speculation.py",
    ),
    "a browser": (
        "dashboard/test_message_page.py",
        "dashboard/test_overview.py",
        "dashboard/test_readers_page.py",
        "dashboard/test_connections_page.py",
        "dashboard/test_redrive_page.py",
        "dashboard/test_search_page.py",
        "dashboard/test_send_page.py",
        "dashboard/test_history_page.py",
        "dashboard/test_audit_page.py",
        "dashboard/test_dead_page.py",
    ),
    "another browser": (
        "dashboard/test_queue_page.py",
        "dashboard/test_engine_page.py",
        "dashboard/test_door.py",
        "dashboard/test_link.py",
        "dashboard/test_selection_page.py",
        "dashboard/test_connection_page.py",
        "dashboard/test_rights_pages.py",
        "dashboard/test_attention.py",
        "dashboard/test_weight.py",
        "dashboard/test_words.py",
    ),
}
"""By what they share."""
UNITS = {HERE / name: what for what, names in TOGETHER.items() for name in names}


def unit_of(path: Path) -> str:
    """The files of a unit are tested by one process, one after the other."""
    return UNITS.get(path, str(path))


FIRST = (
    *TOGETHER["a Spark session"],
    *TOGETHER["another Spark session"],
    # Beside the two of them, what is one process, or waits.
    "client/test_cut.py",
    "client/test_http_consume.py",
    "nats/test_stream_contract.py",
    "cli/test_messaging.py",
    # From here, what has many processes (Spark, a browser) and what has few take turns.
    *TOGETHER["a browser"],
    "cluster/test_shards_http.py",
    *TOGETHER["another browser"],
    "cluster/test_shards.py",
    "cli/test_demo.py",
    "lake/test_archiving.py",
    "spark/test_sql_commands.py",
    *TOGETHER["a cluster of Spark's"],
    "cluster/test_shard_backups.py",
    "test_release.py",
    "test_image.py",
    "cluster/test_shard_archive.py",
    "test_tutorials.py",
    "cluster/test_storage.py",
    "log/test_stage_cuts.py",
    "celery/test_crashes.py",
    "importing/test_crashes.py",
    "importing/test_rabbitmq.py",
    "log/test_walks.py",
    "celery/test_workers.py",
    "http/test_transactions.py",
    "cluster/test_faults.py",
    "cluster/test_partitions.py",
    "nats/test_stream_log.py",
    "log/test_contract.py",
    "log/test_damage.py",
    "cluster/test_rules.py",
    "top/test_top.py",
    "spark/test_discovery.py",
    "log/test_model.py",
    "log/test_retention.py",
    "cluster/test_up.py",
    "log/test_backup.py",
    "http/test_backup.py",
    "cluster/test_upgrades.py",
    "report/test_cli.py",
    "http/test_search.py",
    "http/test_messages.py",
    "log/test_crash.py",
    "http/test_events.py",
    "server/test_second.py",
    "cluster/test_terms.py",
    "protocols/test_fuzz.py",
    "pipeline/test_pipeline_docs.py",
    "nats/test_replica.py",
    "server/test_cross_rules.py",
    "cluster/test_cross_relayed.py",
    "bench/test_peers.py",
    "http/test_commits.py",
    "protocols/test_rq_codec.py",
    "http/test_log.py",
    "server/test_phpmq_rules.py",
    "cluster/test_phpmq_relayed.py",
    "server/test_endings.py",
    "client/test_send_many.py",
    "http/test_openapi.py",
    "http/test_queues.py",
    "http/test_taking.py",
    "server/test_flow_control.py",
    "server/test_chaos.py",
)
"""What takes a quarter of a minute and more, about the longest first; the others follow by their names."""

SLOW = (
    "bench",
    "celery",
    "cli",
    "client",
    "cluster",
    "dashboard",
    "http",
    "importing",
    "lake",
    "nats",
    "pipeline",
    "report",
    "spark",
    "top",
    "test_image.py",
    "test_release.py",
    "broker/test_consumers.py",
    "broker/test_cost.py",
    "broker/test_restarts.py",
    "log/test_arrow.py",
    "log/test_backup.py",
    "log/test_crash.py",
    "log/test_damage.py",
    "log/test_disk_full.py",
    "log/test_kill9.py",
    "log/test_large_log.py",
    "log/test_model.py",
    "log/test_reader_walks.py",
    "log/test_retention.py",
    "log/test_stage_cuts.py",
    "log/test_staging.py",
    "log/test_walks.py",
    "protocols/test_fuzz.py",
    "protocols/test_rq_conversation.py",
    "protocols/test_ways.py",
    "server/test_bad_folder.py",
    "server/test_chaos.py",
    "server/test_costs.py",
    "server/test_cross_rules.py",
    "server/test_endings.py",
    "server/test_flow_control.py",
    "server/test_lifecycle.py",
    "server/test_memory.py",
    "server/test_private_files.py",
    "server/test_rounds.py",
    "server/test_second.py",
    "server/test_stops.py",
    "server/test_supervisor.py",
    "server/test_tls_files.py",
    "server/test_unix_sockets.py",
    "server/test_users.py",
    "test_build.py",
    "test_mutate.py",
    "test_project.py",
    "test_site.py",
    "test_tutorials.py",
)
"""What `--fast` (`make test-fast`) leaves out: Spark, browsers, NATS, and what takes seconds."""
SLOW_TESTS = {
    "test_a_block_with_many_moments_is_not_looked_at_for_each",
    "test_a_flood_of_commands_is_one_event",
    "test_an_entry_takes_less_than_40_bytes",
    "test_following_a_writer_that_rolls_trims_and_compacts",
    "test_many_take_few_bytes_each",
    "test_no_error_shows_a_token",
    "test_scattered_messages_take_few_bytes_each",
    "test_ten_thousand_queues",
}
"""The same, in files that are quick otherwise."""


def helpers() -> list[str]:
    """The modules below this folder that tests import."""
    return [
        ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
        for path in sorted(HERE.rglob("*.py"))
        if not path.stem.startswith(("test_", "conftest", "fuzz_", "__"))
    ]


pytest.register_assert_rewrite(*helpers())
from tests import sharing  # noqa: E402 - helpers, and rewritten by now
from tests.seeds import SEEDED  # noqa: E402

# Nothing fails because a machine has much else to do.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_configure() -> None:
    from tests import java  # which is a helper, and rewritten by now

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As shells start what runs in the background; commands of tests would inherit it, and hear no Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["JDK_JAVA_OPTIONS"] = java.options()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="only what is quick, without Spark, browser and NATS"
    )
    parser.addoption("--long", action="store_true", help="also what is marked `long`, as make test-long does")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # None: let others decide.
    return True if config.getoption("fast") and collection_path in {HERE / name for name in SLOW} else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("fast"):
        items[:] = [item for item in items if getattr(item, "originalname", item.name) not in SLOW_TESTS]
    if not SEEDED and not config.getoption("long"):
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
    places = {HERE / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="module")
def cold() -> Iterator[None]:
    """Brokers of the module begin from nothing, and are not forked (`tests/warm.py`)."""
    from tests.server.harness import BrokerProcess

    BrokerProcess.is_warm = False
    yield
    BrokerProcess.is_warm = True


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command in this process sends the log to the standard error of its test, and no longer."""
    loggers = [logging.getLogger(name) for name in ("penstock", "penstock.client")]
    before = [(it, it.handlers[:], it.level, it.propagate) for it in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay: they are not looked at again whenever Python looks for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """What a file leaves open is told of the file itself, and not of whichever test finds the garbage."""
    sharing.goes_on = nextitem is not None and unit_of(item.path) == unit_of(nextitem.path)
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
    return done


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which tests have failed, for `scripts/test`."""
    file = os.environ.get("FAILED_TESTS_FILE")
    if file:
        failed = {it.nodeid for kind in ("failed", "error") for it in terminalreporter.stats.get(kind, ())}
        Path(file).write_text("".join(f"{nodeid}\n" for nodeid in sorted(failed)), encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """As `--dist loadfile` does it, but in the order above, and for what counts as one file."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # it would begin with most tests, and the longest files have few
    scheduler = LoadFileScheduling(config, log)
    file_of = scheduler._split_scope
    scheduler._split_scope = lambda nodeid: unit_of(HERE.parent / file_of(nodeid))
    return scheduler  # type: ignore[no-any-return]
