"""Health: what can be wrong with a queue, a reader or the broker, as one table of rules.

    rule      a state: when it is entered, when it is left, why, what to do, where to look; a row of `rules`
    figures   the plain numbers that a rule looks at (`health_figures.py`)
    phase     how far one thing is with one rule, from moment to moment (`health_phases.py`)

The API, the page, the command, the metrics and the report have their states and sentences from here.

Rule that always holds: every time in the table is a multiple of the patience (`[http] health-seconds`): one
number makes all of them longer or shorter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from penstock.common import units
from penstock.common.health_figures import BrokerFigures, QueueFigures, ReaderFigures

PATIENCE_SECONDS: Final = 120.0
WARN: Final = "warn"
BAD: Final = "bad"
LEVELS: Final = (BAD, WARN)
"""From the more urgent one on."""

BACKLOG_MIN: Final = 100
"""Fewer messages than this are no backlog that can grow."""

USUAL_TIMES: Final = 3.0
"""What takes so many times as long as usual is not usual."""

DIED_MIN: Final = 10
SOON_SECONDS: Final = 3600.0
FAR_SECONDS: Final = 30 * 86400.0
"""What is so far away is not worth a word."""

Figures = Any  # of the rule's scope: a table of rules for three kinds of them has no better type


@dataclass(frozen=True, slots=True)
class Rule:
    """A row. Conditions are asked at a moment; times say for how long they must hold without a break."""

    state: str
    scope: str  # "queue", "reader" or "broker"
    level: str
    title: str
    enters: str  # for people: the two conditions and their times, as the documentation has them
    leaves: str
    enter: Callable[[Figures], bool]
    stay: Callable[[Figures], bool]
    enter_seconds: float
    leave_seconds: float
    why: Callable[[Figures], str]
    do: str
    part: str = ""  # of the page of its scope, where one sees more
    lasted: Callable[[Figures], float] | None = None  # for how long it has been so, where the figures know
    is_bad: Callable[[Figures], bool] | None = None  # then it is worse than its level
    hides: tuple[str, ...] = ()  # states of the same thing that are only a consequence
    shown: tuple[str, ...] = ()  # names of the figures behind it


def rules(patience: float = PATIENCE_SECONDS) -> tuple[Rule, ...]:
    """The table, the most urgent first among those of one level."""
    say = units.duration
    lately, moment = 2.5 * patience, patience / 12

    def unusual(figures: QueueFigures | ReaderFigures, seconds: float) -> float:
        return max(seconds, USUAL_TIMES * figures.usual_seconds)

    def is_slow(figures: BrokerFigures, absolute: float, least: float, times: float) -> bool:
        usual = figures.sync_usual_seconds if figures.syncs_before >= 200 else float("inf")
        slow = figures.sync_seconds >= absolute
        return figures.syncs >= 20 and (
            slow or (figures.sync_seconds >= least and figures.sync_seconds >= times * usual)
        )

    def grows(figures: QueueFigures) -> bool:
        enough = figures.grown >= max(BACKLOG_MIN, figures.ready // 10)
        return figures.ready >= BACKLOG_MIN and enough and figures.grown_late * 5 >= figures.grown

    def falls_behind(figures: ReaderFigures) -> bool:
        return figures.lag >= 10_000 and figures.grown >= figures.lag // 5 and figures.grown_late > 0

    return (
        Rule(
            "failed",
            "broker",
            BAD,
            "The log has failed",
            "a write or a sync was refused by the disk",
            "never: the broker has to be started again",
            enter=lambda it: bool(it.failed),
            stay=lambda it: bool(it.failed),
            enter_seconds=0,
            leave_seconds=0,
            why=lambda it: f"{it.failed}. Nothing is written any more.",
            do="Look after the disk, check the log with penstock verify, then start the broker again.",
        ),
        Rule(
            "disk-full",
            "broker",
            BAD,
            "The disk is full",
            "there is no room for new messages",
            f"there is room again, for {say(moment)}",
            enter=lambda it: it.full,
            stay=lambda it: it.full,
            enter_seconds=0,
            leave_seconds=moment,
            why=lambda it: (
                f"{units.size(it.disk_bytes_free)} are free. New messages are not taken: their senders wait. "
                "Nothing that was accepted is lost."
            ),
            do="Make room beside the log, let readers catch up, or shorten retention; the broker goes on "
            "by itself.",
            hides=("not-ready", "disk-low"),
            shown=("disk_bytes_free", "disk_bytes_reserve"),
        ),
        Rule(
            "not-ready",
            "broker",
            BAD,
            "The broker is not ready",
            f"it says so for {say(moment)}",
            f"it is ready, for {say(moment)}",
            enter=lambda it: not it.ready and not it.failed,
            stay=lambda it: not it.ready and not it.failed,
            enter_seconds=moment,
            leave_seconds=moment,
            why=lambda it: f"It says: {it.reason}.",
            do="Look at the broker's log. Clients wait or are sent away until it is ready.",
        ),
        Rule(
            "damaged",
            "broker",
            BAD,
            "The log is damaged",
            "places of the log were found that are not as they were written",
            "never: damage is told until the broker is started on a log without it",
            enter=lambda it: it.damage > 0,
            stay=lambda it: it.damage > 0,
            enter_seconds=0,
            leave_seconds=0,
            why=lambda it: (
                f"{units.counted(it.damage, 'place')} of the log cannot be read. What is damaged is left "
                f"out, and "
                "what a start has found is copied to a quarantine file beside the log. The rest is served."
            ),
            do="Check the disk, and see with penstock verify what the log lacks.",
            shown=("damage",),
        ),
        Rule(
            "full",
            "queue",
            BAD,
            "The queue is full",
            f"senders wait for room in it, or it has 95 % of its max-bytes, for {say(moment)}",
            f"nobody waits, and it has less than 90 %, for {say(moment)}",
            enter=lambda it: it.bytes_max > 0 and (it.senders_wait or it.bytes >= 0.95 * it.bytes_max),
            stay=lambda it: it.bytes_max > 0 and (it.senders_wait or it.bytes >= 0.9 * it.bytes_max),
            enter_seconds=moment,
            leave_seconds=moment,
            why=lambda it: (
                f"It has {units.size(it.bytes)} of at most {units.size(it.bytes_max)} (max-bytes): "
                f"{'senders wait' if it.senders_wait else 'soon senders wait, or are refused'}."
            ),
            do="Let consumers settle what is there, add some, or raise max-bytes of this queue.",
            hides=("growing",),
            shown=("bytes", "bytes_max", "ready", "held", "consumers"),
        ),
        Rule(
            "blocked",
            "queue",
            BAD,
            "A consumer does not read",
            f"a consumer has not read what was sent to it for {say(patience / 4)}",
            f"all of them read, for {say(moment)}",
            enter=lambda it: it.blocked_seconds >= patience / 4,
            stay=lambda it: it.blocked > 0,
            enter_seconds=0,
            leave_seconds=moment,
            lasted=lambda it: it.blocked_seconds,
            why=lambda it: (
                f"{units.counted(it.blocked, 'consumer')} {'does' if it.blocked == 1 else 'do'} not read "
                f"what is sent, "
                f"for {units.age(it.blocked_seconds)} now; {units.counted(it.held, 'message')} "
                f"{'is' if it.held == 1 else 'are'} held."
            ),
            do="See what that program does: it hangs, or its machine has too much to do. Restarted, it "
            "gives back "
            "what it holds.",
            hides=("stalled", "growing"),
            shown=("blocked", "blocked_seconds", "held", "ready", "consumers"),
        ),
        Rule(
            "stalled",
            "queue",
            BAD,
            "Nothing is settled",
            f"messages are held, and none was settled for {say(patience)} or {USUAL_TIMES:.0f} times as "
            f"long as usual",
            f"one was settled within half of that time, or none is held, for {say(moment)}",
            enter=lambda it: it.held > 0 and it.unsettled_seconds >= unusual(it, patience),
            stay=lambda it: it.held > 0 and it.unsettled_seconds >= unusual(it, patience) / 2,
            enter_seconds=0,
            leave_seconds=moment,
            lasted=lambda it: it.unsettled_seconds,
            why=lambda it: (
                f"{units.counted(it.held, 'message')} {'is' if it.held == 1 else 'are'} held, and none "
                f"was settled for "
                f"{units.age(it.unsettled_seconds)}; {units.count(it.ready)} wait."
            ),
            do="Look at the consumers that hold them: they hang, or wait for something else. Restarted, "
            "they give "
            "back what they hold.",
            hides=("growing",),
            shown=("held", "unsettled_seconds", "usual_seconds", "ready", "consumers"),
        ),
        Rule(
            "reader-capped",
            "reader",
            BAD,
            "A reader is too far behind",
            "not all that it has not read is kept for it",
            f"it has caught up so far that it is, for {say(moment)}",
            enter=lambda it: it.capped,
            stay=lambda it: it.capped,
            enter_seconds=0,
            leave_seconds=moment,
            why=lambda it: (
                f"It is {units.count(it.lag)} behind. A reader holds at most [log] reader-bytes-max of "
                f"the log in a "
                "queue: what it reads next may be gone."
            ),
            do="Let it catch up, or set a higher bound while there is room on the disk.",
            hides=("reader-behind", "reader-ended"),
            shown=("lag",),
        ),
        Rule(
            "archive-failing",
            "broker",
            WARN,
            "Archiving does not get on",
            f"[archive] has a path, and what archives says for {say(moment)} why it cannot",
            f"it gets on, for {say(moment)}",
            enter=lambda it: bool(it.archive_error),
            stay=lambda it: bool(it.archive_error),
            enter_seconds=moment,
            leave_seconds=moment,
            why=lambda it: (
                f"It says: {it.archive_error}. What is not in the table is kept in the log, at most [log] "
                "reader-bytes-max of a queue."
            ),
            do="See with penstock archive status what is not archived yet, and look after the store or the "
            "queue that it names; it goes on by itself.",
        ),
        Rule(
            "node-offline",
            "broker",
            WARN,
            "NATS nodes are offline",
            f"a node that has a copy of the log has not been heard of for {say(moment)}",
            f"all of them are there, for {say(moment)}",
            enter=lambda it: it.nodes_offline > 0,
            stay=lambda it: it.nodes_offline > 0,
            enter_seconds=moment,
            leave_seconds=moment,
            is_bad=lambda it: it.nodes_offline * 2 >= it.nodes,
            why=lambda it: (
                f"{it.nodes_offline} of {it.nodes} NATS nodes {'is' if it.nodes_offline == 1 else 'are'} "
                f"offline. The "
                "log is stored on the others as long as most of them are there."
            ),
            do="Start what is down before another one goes.",
            shown=("nodes", "nodes_offline"),
        ),
        Rule(
            "disk-low",
            "broker",
            WARN,
            "There is little room on the disk",
            f"less is free than disk-bytes-reserve, for {say(moment)}",
            f"a tenth more than that is free, for {say(moment)}",
            enter=lambda it: it.disk_bytes_free < it.disk_bytes_reserve,
            stay=lambda it: it.disk_bytes_free < 1.1 * it.disk_bytes_reserve,
            enter_seconds=moment,
            leave_seconds=moment,
            why=lambda it: (
                f"{units.size(it.disk_bytes_free)} are free. When there is none, senders have to wait."
            ),
            do="Make room, or shorten the retention of queues that keep much.",
            shown=("disk_bytes_free", "disk_bytes_reserve"),
        ),
        Rule(
            "memory",
            "broker",
            WARN,
            "Clients hold much memory",
            f"they make the broker hold 80 % of memory-bytes-max, for {say(patience / 4)}; from 95 % on "
            f"it is bad",
            f"less than 70 %, for {say(patience / 4)}",
            enter=lambda it: 0 < it.memory_bytes_max * 0.8 <= it.memory_bytes,
            stay=lambda it: 0 < it.memory_bytes_max * 0.7 <= it.memory_bytes,
            enter_seconds=patience / 4,
            leave_seconds=patience / 4,
            is_bad=lambda it: it.memory_bytes >= 0.95 * it.memory_bytes_max,
            why=lambda it: (
                f"Clients make the broker hold {units.size(it.memory_bytes)} of at most "
                f"{units.size(it.memory_bytes_max)}. Beyond that it closes connections that hold most, "
                "and reads no large body over HTTP."
            ),
            do="See who does not read, or has sent half of a large message; raise [limits] "
            "memory-bytes-max where the "
            "machine has more.",
            shown=("memory_bytes", "memory_bytes_max"),
        ),
        Rule(
            "slow-syncs",
            "broker",
            WARN,
            "Syncs have become slow",
            f"half of the syncs of {say(patience / 2)} take 100 ms or longer, or 25 ms and 5 times as "
            f"long as before, "
            f"for {say(patience / 2)}",
            f"half take less than 60 ms, or less than 15 ms or 3 times as long as before, for "
            f"{say(patience / 2)}",
            enter=lambda it: is_slow(it, 0.1, 0.025, 5),
            stay=lambda it: is_slow(it, 0.06, 0.015, 3),
            enter_seconds=patience / 2,
            leave_seconds=patience / 2,
            why=lambda it: (
                f"Half of the last {units.count(it.syncs)} syncs took {units.duration(it.sync_seconds)} "
                f"or longer"
                + (f"; before, {units.duration(it.sync_usual_seconds)}." if it.syncs_before else ".")
                + " Receipts wait for them."
            ),
            do="See what else uses the disk, and whether it is failing.",
            shown=("syncs", "sync_seconds", "sync_usual_seconds"),
        ),
        Rule(
            "cluster-check",
            "broker",
            WARN,
            "The NATS cluster is not as it should be",
            "the checks of this front-end have found something",
            "they find nothing: most are made at the start only",
            enter=lambda it: bool(it.checks),
            stay=lambda it: bool(it.checks),
            enter_seconds=0,
            leave_seconds=0,
            why=lambda it: f"The checks of this front-end say: {'; '.join(it.checks)}",
            do="Mend what they name; what is looked at only at the start is gone at the next one.",
        ),
        Rule(
            "dying",
            "queue",
            WARN,
            "More messages die than usual",
            f"within {say(lately)}, {DIED_MIN} or more messages died: {USUAL_TIMES:.0f} times as many as "
            f"usual, and 1 % "
            "of all deliveries; from half of them on it is bad",
            f"fewer than half of that, for {say(patience / 2)}",
            enter=lambda it: (
                it.died >= max(DIED_MIN, USUAL_TIMES * it.died_usually) and it.died * 100 >= it.ended
            ),
            stay=lambda it: (
                it.died * 2 >= max(DIED_MIN, USUAL_TIMES * it.died_usually) and it.died * 200 >= it.ended
            ),
            enter_seconds=0,
            leave_seconds=patience / 2,
            is_bad=lambda it: it.died * 2 >= it.ended,
            why=lambda it: (
                f"{units.counted(it.died, 'message')} died within {say(lately)} "
                f"({units.listed(it.reasons or {})}); "
                f"usually {units.rate(it.died_usually)}."
            ),
            do="Look at the letters and what they say; when the cause is gone, redrive them.",
            part="dead",
            shown=("died", "died_usually", "ended"),
        ),
        Rule(
            "no-consumers",
            "queue",
            WARN,
            "Nobody consumes it",
            f"messages wait, nobody consumes or holds any, and none was handed out for {say(patience)}",
            f"somebody consumes, one was handed out, or none waits, for {say(moment)}",
            enter=lambda it: (
                it.ready > 0
                and not it.consumers
                and not it.held  # by one that comes for more when it has settled these
                and not it.is_log
                and not it.paused
                and it.undelivered_seconds >= patience
            ),
            stay=lambda it: (
                it.ready > 0 and not it.consumers and not it.is_log and it.undelivered_seconds >= patience / 2
            ),
            enter_seconds=0,
            leave_seconds=moment,
            lasted=lambda it: it.undelivered_seconds,
            why=lambda it: (
                f"{units.counted(it.ready, 'message')} {'waits' if it.ready == 1 else 'wait'}, and nobody "
                f"consumes this "
                f"queue: nothing was handed out for {units.age(it.undelivered_seconds)}."
            ),
            do="Start its consumers, or see why they cannot connect. Who only reads it as a log should "
            "have a name: "
            "then nobody is missed.",
            hides=("growing",),
            shown=("ready", "undelivered_seconds", "consumers"),
        ),
        Rule(
            "paused",
            "queue",
            WARN,
            "It is paused, and messages wait",
            f"it is paused and messages wait, for {say(lately)}",
            "it is resumed, or none waits",
            enter=lambda it: it.paused and it.ready > 0,
            stay=lambda it: it.paused and it.ready > 0,
            enter_seconds=lately,
            leave_seconds=0,
            why=lambda it: (
                f"Somebody has paused it, and {units.counted(it.ready, 'message')} "
                f"{'waits' if it.ready == 1 else 'wait'}."
            ),
            do="Resume it when what it was paused for is done.",
            hides=("no-consumers", "growing", "stalled"),
            shown=("ready", "held", "consumers"),
        ),
        Rule(
            "growing",
            "queue",
            WARN,
            "More comes than goes",
            f"{BACKLOG_MIN} or more wait, {BACKLOG_MIN} and a tenth of them more than {say(lately)} ago, "
            f"and it goes on, "
            f"for {say(patience / 2)}; where it is full within an hour it is bad",
            f"it is not more than {say(lately)} ago, or fewer than {BACKLOG_MIN // 2} wait, for "
            f"{say(patience)}",
            enter=lambda it: grows(it) and it.consumers > 0 and not it.paused,
            stay=lambda it: it.ready * 2 >= BACKLOG_MIN and it.grown > 0,
            enter_seconds=patience / 2,
            leave_seconds=patience,
            lasted=lambda it: lately,
            is_bad=lambda it: it.full_seconds is not None and it.full_seconds < SOON_SECONDS,
            why=lambda it: (
                f"{units.rate(it.rate_in)}/s come and {units.rate(it.rate_out)}/s go: "
                f"{units.count(it.ready)} wait, "
                f"{units.count(it.grown)} more than {say(lately)} ago."
                + (
                    f" At this pace there is no room in {units.age(it.full_seconds)}."
                    if it.full_seconds is not None
                    else ""
                )
            ),
            do="Add consumers, or see what makes them slow.",
            shown=("ready", "grown", "rate_in", "rate_out", "full_seconds", "consumers"),
        ),
        Rule(
            "reader-behind",
            "reader",
            WARN,
            "A reader falls behind",
            f"it has something to read, and has read nothing for {say(7.5 * patience)} or "
            f"{USUAL_TIMES:.0f} times as long "
            f"as usual; or its lag is 10,000 or more and has grown by a fifth within {say(7.5 * patience)}",
            f"it reads, and its lag does not grow, for {say(patience)}",
            enter=lambda it: (
                it.holds
                and it.lag > 0
                and (it.unmoved_seconds >= unusual(it, 7.5 * patience) or falls_behind(it))
            ),
            stay=lambda it: (
                it.holds
                and it.lag > 0
                and (it.unmoved_seconds >= unusual(it, 7.5 * patience) / 2 or it.grown > 0)
            ),
            enter_seconds=0,
            leave_seconds=patience,
            lasted=lambda it: it.unmoved_seconds,
            why=lambda it: (
                f"It is {units.count(it.lag)} behind, and has read nothing for "
                f"{units.age(it.unmoved_seconds)}. What it "
                "has not read stays on the disk."
            ),
            do="See whether its pipeline runs, and is fast enough; where nobody needs it any more, "
            "release it.",
            shown=("lag", "grown", "unmoved_seconds"),
        ),
        Rule(
            "reader-ended",
            "reader",
            WARN,
            "The lease of a reader has ended",
            "it has not said where it is for its whole lease, and has not read everything",
            "it says so again, or is forgotten",
            enter=lambda it: not it.holds and it.lag > 0,
            stay=lambda it: not it.holds and it.lag > 0,
            enter_seconds=0,
            leave_seconds=0,
            why=lambda it: f"Nothing is kept for it any more, and it is {units.count(it.lag)} behind.",
            do="Start its pipeline again before retention takes what it has not read.",
            shown=("lag",),
        ),
    )


RULES: Final = rules()
BY_STATE: Final = {rule.state: rule for rule in RULES}
STATES: Final = tuple(BY_STATE)
