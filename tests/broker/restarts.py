"""Seeded runs of a broker that restarts: random work at all its doors, through every kind of end.

    python -m tests.broker.restarts SEED           repeats a run and tells its steps
    python -m tests.broker.restarts SEED COUNT     runs COUNT seeds and tells what happened in them

A run is ports of all protocols that send, ask, consume, settle, block, fall silent and leave, and callers
that hold messages by leases (`restarts_callers.py`), beside an operator who pauses, purges and redrives, on a
log on a simulated disk. Messages are delayed, and come again later. Again and again the broker ends: in
order, by a kill, by a power cut, or because another one leads from now on, to which ports that live on bring
what they hold. Then a new broker opens the same log.

What must hold, as `restarts_ports.py` and the checks here know it:

  * Every request ends once, with its own answer, and its sender hears once, before that, that a consumer has
    it. One that is open is in the queue, alive; when its time is over, it is not.
  * Whoever is active at a door, has credit and room, and is neither blocked nor silent, gets what is ready.
    Nobody gets more than that, or anything of a paused queue.
  * What was accepted and confirmed is there after every end, unless somebody has ended it, and under the
    payload with which it was sent.
  * A queue that exists is never refused; names at which nobody waits any more are forgotten.
  * Nothing stays behind a port that left: no message in its hands, no request, no deadline.
  * What the broker counts (held, delivered, acknowledged) is what the ports have seen.
  * When everybody takes and settles, everything ends: nothing is ready or held, nobody waits or is held back.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.broker.broker import Broker
from penstock.broker.operate import Operator
from penstock.broker.taking import Taker
from penstock.log.errors import LogError, LogRefused, QueueFull
from penstock.log.log import Log
from penstock.log.results import Stored
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason, State
from penstock.model.policy import Policies
from penstock.model.words import Where
from tests.broker.restarts_callers import Callers
from tests.broker.restarts_ports import SECOND_US, Message, WildPort
from tests.log.inline import InlineWorker
from tests.log.simdisk import SimDisk
from tests.seeds import Say, run_seeds

START_US = 1_700_000_000 * SECOND_US
LIVES_MAX = 5
STEPS_MAX = 150
QUEUES = ("a", "b", "off", "small", "drop")
NAMES = (*QUEUES, "x", "y", "z")
QUEUES_MAX = 6
SMALL_BYTES = 400
POLICIES = Policies(
    {
        "a": {"retry-delays": [0.5, 0], "deliver-after": "sync"},
        "b": {"max-deliveries": 2, "retry-delays": [1]},
        "off": {"dead-letters": "off", "max-deliveries": 3},
        "small": {"max-bytes": SMALL_BYTES},
        "drop": {"on-expiry": "drop", "durability": "interval", "deliver-after": "sync"},
    }
)
PORTS_MAX = (2, 3, 6)  # the fewer, the more often one has a number that another had before
TURNS_MAX = 2000


class Broken(AssertionError):
    """The broker has broken a promise. Says which seed shows it."""


class Run:
    """One seed: a disk, and the brokers that lead on it one after the other."""

    def __init__(self, seed: int, say: Say | None = None) -> None:
        self.rng = random.Random(seed)
        self.say = say
        self.now_us = START_US
        self.counts: Counter[str] = Counter()
        self.messages: dict[bytes, Message] = {}  # by payload, of which no two are the same
        self.paused: set[str] = set()
        self.ports: list[WildPort] = []
        self.callers = Callers(self)
        self.ports_max = self.rng.choice(PORTS_MAX)
        self.names = 0
        self.wanted = False
        self.settings = LogSettings(
            segment_bytes=8192,
            cache_bytes=self.rng.choice((0, 4000)),
            interval_us=SECOND_US,
            snapshot_blocks=9,
            syncs_apart_us=0,
        )
        self.disk = SimDisk()
        self.open()

    def open(self) -> None:
        self.log = Log.open(
            self.disk,
            self.now_us,
            settings=self.settings,
            policies=POLICIES,
            writer=InlineWorker(),
            keeper=InlineWorker(),
        )
        self.broker = Broker(self.log, self.want_turn, queues_max=QUEUES_MAX)
        self.operator = Operator(self.broker, self.log)
        self.delivered: Counter[str] = Counter()  # since the log was opened, by queue
        self.acked: Counter[str] = Counter()
        self.paused = {queue for queue in self.log.queues() if self.log.is_paused(queue)}

    def want_turn(self) -> None:
        self.wanted = True

    def run(self) -> "Counter[str]":
        for _ in range(self.rng.randint(2, LIVES_MAX)):
            self.live()
            if self.rng.random() < 0.3:
                self.use_up()
            self.end(self.rng.choice(("close", "kill", "cut", "cut", "lead", "lead")))
        self.use_up()
        self.counts["messages"] = len(self.messages)
        return self.counts

    # --- a life ----------------------------------------------------------------------------------

    def live(self) -> None:
        if self.rng.random() < 0.5:
            self.old_questions()
        weights, steps = zip(*self.weighted, strict=True)
        for step in self.rng.choices(steps, weights, k=self.rng.randint(5, STEPS_MAX)):
            if self.say:
                self.say(step.__name__)
            self.counts[step.__name__] += 1
            step()
            if self.rng.random() < 0.12:
                self.rest()
                self.check()

    def old_questions(self) -> None:
        """Dead ones are in the queue again, while ports ask whose numbers others had; some of theirs die."""
        for queue in QUEUES:
            if self.log.has_queue(queue):
                sum(self.operator.redrive(queue, self.now_us))
        queue = self.rng.choice(QUEUES)
        self.port("rq").publish(queue, 3, wants_reply=True)
        if self.rng.random() < 0.6:
            undertaker = self.connect("phpmq")
            undertaker.consume(queue, 5)
            self.rest()
            undertaker.reject_all()
        elif self.rng.random() < 0.6:
            worker = self.connect("rq")
            for queue in QUEUES:
                worker.consume(queue, 5)
            self.rest()
            worker.settle_all()

    @property
    def weighted(self) -> list[tuple[int, Callable[[], None]]]:
        return [
            (10, self.send),
            (14, self.ask),
            (3, self.append),
            (4, self.ask_to_sync),
            (14, self.consume),
            (3, self.cancel),
            (30, self.settle),
            (4, self.bury),
            (8, self.take),
            (8, self.settle_taken),
            (2, self.untake),
            (1, self.lose_link),
            (6, self.change_room),
            (3, self.fall_silent),
            (2, self.leave),
            (1, self.close),
            (2, self.pause),
            (1, self.purge),
            (6, self.redrive),
            (6, self.turn),
            (6, self.sync),
            (6, self.tick),
        ]

    def port(self, protocol: str = "") -> WildPort:
        """One that is there, or a new one."""
        fitting = [port for port in self.ports if protocol in ("", port.protocol)]
        if not fitting or (len(self.ports) < self.ports_max and self.rng.random() < 0.2):
            return self.connect(protocol or self.rng.choice(("sspq", "phpmq", "phpmq", "rq", "rq")))
        return self.rng.choice(fitting)

    def connect(self, protocol: str) -> WildPort:
        self.names += 1
        where = Where.TAIL if protocol == "sspq" else Where.PLACE
        port = WildPort(self, f"{protocol}#{self.names}", protocol, where)
        self.ports.append(port)
        self.broker.attach(port)
        return port

    def some(self, queue: str, count: int) -> list[Message]:
        """New messages, none like another; some are hardly longer than their number."""
        made = []
        for _ in range(count):
            payload = b"%d" % len(self.messages) + b"." * self.rng.choice((0, 0, 1, 20, 150))
            made.append(Message(queue, payload))
            self.messages[payload] = made[-1]
        return made

    def send(self) -> None:
        port = self.port()
        port.publish(self.rng.choice(NAMES), self.rng.randint(1, 6), wants_reply=False)

    def ask(self) -> None:
        self.port("rq").publish(self.rng.choice(QUEUES), self.rng.randint(1, 3), wants_reply=True)

    def ask_to_sync(self) -> None:
        self.port().sync()

    def append(self) -> None:
        queue = self.rng.choice(NAMES)
        messages = self.some(queue, self.rng.randint(1, 3))

        def receipt(result: Stored | LogError) -> None:
            if isinstance(result, Stored):
                self.confirmed(messages)

        delays = [self.rng.choice((0, 300_000, 2 * SECOND_US)) for _ in messages]
        try:
            batch = Batch.of(
                [message.payload for message in messages],
                protocol="http",
                delay_us=delays if self.rng.random() < 0.5 else None,
            )
            self.operator.append(queue, batch, self.now_us, receipt)
        except QueueFull:
            self.counts["full"] += 1
        except LogRefused as error:
            self.refused(queue, str(error))

    def refused(self, queue: str, text: str) -> None:
        """Somebody was told that a queue cannot be used."""
        self.counts["refused"] += 1
        assert not self.log.has_queue(queue), f"queue {queue!r} is there, and was refused: {text}"
        waited_at = {name for port in self.ports for name, _ in port.demands} | self.callers.doors()
        used = self.log.queue_count + len(waited_at - {queue, *self.log.queues()})
        assert used >= QUEUES_MAX, f"there is room for a queue ({used} of {QUEUES_MAX}): {text}"

    def confirmed(self, messages: Sequence[Message]) -> None:
        for message in messages:
            message.confirmed = True

    def consume(self) -> None:
        self.port().demand(self.rng.choice(NAMES))

    def cancel(self) -> None:
        self.port().cancel()

    def settle(self) -> None:
        self.port().settle_some()

    def bury(self) -> None:
        self.port("phpmq").reject_all()

    def take(self) -> None:
        self.callers.take(self.rng.choice(NAMES))

    def settle_taken(self) -> None:
        self.callers.settle()

    def untake(self) -> None:
        self.callers.undo()

    def lose_link(self) -> None:
        self.callers.lose_link()

    def change_room(self) -> None:
        self.port().change_room()

    def fall_silent(self) -> None:
        port = self.port("rq")
        port.silent = not port.silent
        self.broker.idle(port, port.silent)

    def leave(self) -> None:
        if self.ports:
            port = self.ports.pop(self.rng.randrange(len(self.ports)))
            port.gone()
            self.broker.detach(port, self.now_us, lost=self.rng.random() < 0.8)

    def close(self) -> None:
        self.port("rq").say_closing()

    def pause(self) -> None:
        queue = self.rng.choice(QUEUES)
        paused = queue not in self.paused
        if self.log.has_queue(queue) or self.broker.doors.consumer_count(queue):
            self.operator.pause(queue, paused, self.now_us)
            (self.paused.add if paused else self.paused.discard)(queue)

    def purge(self) -> None:
        queue, dead = self.rng.choice(QUEUES), self.rng.random() < 0.5
        if self.log.has_queue(queue):
            self.rest()
            for state, _, message in self.living(queue):
                if state in ((State.DEAD,) if dead else (State.READY, State.DELAYED)):
                    message.may_end = True
            sum(self.operator.purge(queue, self.now_us, dead=dead))

    def redrive(self) -> None:
        queue = self.rng.choice(QUEUES)
        if self.log.has_queue(queue):
            sum(self.operator.redrive(queue, self.now_us))

    def turn(self) -> None:
        self.wanted = False
        self.broker.turn(self.now_us)
        for port in [port for port in self.ports if port.finished]:
            self.ports.remove(port)
            port.gone()
            self.broker.detach(port, self.now_us)

    def sync(self) -> None:
        self.turn()
        self.log.wait()

    def tick(self) -> None:
        self.now_us += self.rng.choice((50_000, SECOND_US, 3 * SECOND_US))
        self.broker.tick(self.now_us)

    def rest(self) -> None:
        """Turns and syncs until nobody wants another one, and a time-out that waited for a sync has come."""
        for _ in range(2):
            self.broker.tick(self.now_us)
            for _ in range(TURNS_MAX):
                self.sync()
                if not self.wanted:
                    break
            else:
                raise AssertionError(f"the broker wants another turn after {TURNS_MAX}")
            self.log.confirm(self.now_us, lambda error: None)
            self.log.wait()

    # --- checks, when the broker rests -----------------------------------------------------------

    def living(self, queue: str) -> list[tuple[State, str, Message]]:
        """State, holder and message of all that is not gone; all are synced."""
        payloads = {}
        for piece in self.log.read(queue, 0, 1 << 40):
            for offset, payload in enumerate(piece.messages(), piece.offset_start):
                payloads[offset] = payload
        runs = self.log.states(queue, 0, 1 << 40, 1 << 30)
        found = []
        for i in range(len(runs)):
            holder = runs.consumers[runs.consumer[i]] if runs.consumer[i] >= 0 else ""
            for offset in range(runs.first[i], runs.end[i]):
                message = self.messages[payloads[offset]]
                assert message.queue == queue, f"{message} is in queue {queue!r}"
                found.append((State(runs.state[i]), holder, message))
        return found

    def held_by(self, queue: str, name: str) -> set[int]:
        """The offsets that the log says to be in somebody's hands."""
        runs = self.log.states(queue, 0, 1 << 40, 1 << 30) if self.log.has_queue(queue) else None
        return {
            offset
            for i in range(len(runs) if runs is not None else 0)
            if runs is not None and runs.consumer[i] >= 0 and runs.consumers[runs.consumer[i]] == name
            for offset in range(runs.first[i], runs.end[i])
        }

    def check(self) -> None:
        self.counts["checks"] += 1
        alive: set[bytes] = set()
        there: set[bytes] = set()
        held: Counter[str] = Counter()
        waiting_for = {t.message.payload: t for port in self.ports for t in port.open_requests()}
        for queue in self.log.queues():
            living = self.living(queue)
            for state, holder, message in living:
                held[holder] += state in (State.HELD, State.DEAD_HELD)
                if state in (State.READY, State.DELAYED, State.HELD):
                    alive.add(message.payload)
                else:
                    assert message.payload not in waiting_for, f"{message} is dead, and somebody waits for it"
                there.add(message.payload)
            self.check_counts(queue)
        self.check_kept(there)
        held.pop("", None)
        for payload, ticket in waiting_for.items():
            assert payload in alive, f"{ticket} is open, and its message gone"
            assert not 0 < ticket.deadline_us <= self.now_us, f"{ticket} is open behind its time"
        for port in self.ports:
            assert port.is_held or port.asked_to_sync is None, f"{port.name} waits to hear that all is safe"
            port.check_room_is_used()
            in_hand = held.pop(port.name, 0)
            assert in_hand + port.taken_away() == port.held_count(), f"{port.name} holds {in_hand}: {port}"
        self.callers.check(held)
        assert not held, f"held by nobody who is there: {held}"
        self.check_left_behind()

    def check_kept(self, there: set[bytes]) -> None:
        for message in self.messages.values():
            if message.confirmed and not message.may_end:
                expired = message.queue in ("drop", "off") and 0 < message.expires_us <= self.now_us
                assert message.payload in there or expired, f"{message} was confirmed, and is lost"

    def check_counts(self, queue: str) -> None:
        counts = self.log.counts(queue)
        assert counts.get((Event.HELD, Reason.NONE), 0) == self.delivered[queue], f"deliveries of {queue!r}"
        assert counts.get((Event.ACKED, Reason.NONE), 0) == self.acked[queue], f"settlements in {queue!r}"

    def check_left_behind(self) -> None:
        broker, ports = self.broker, set(self.ports)
        callers = {port for port in broker.ports.attached if isinstance(port, Taker)}
        assert set(broker.ports.attached) == ports | callers
        waiting = (*broker.hand_out._starved, *broker.publishing.held_back, *broker.publishing._syncing)
        assert {attached.port for attached in waiting} <= ports | callers
        deadlines = broker.requests._deadlines
        over = sum(not asked.timed for _, _, asked in deadlines)
        assert 2 * over <= len(deadlines), f"{over} deadlines of requests that have ended"
        waited_at = {queue for port in self.ports for queue, _ in port.demands}
        left = set(broker.doors.by_queue) - waited_at - self.callers.doors()
        assert not left, f"names that nobody waits at: {left}"
        for requests in broker.requests.by_queue.values():
            assert {asked.port for _, _, asked in requests.asked} <= ports
            assert not requests.early, "all that was asked is synced"
            assert {name for _, _, name in requests.orphans} <= {port.name for port in ports | callers}

    # --- ends ------------------------------------------------------------------------------------

    def use_up(self) -> None:
        """Everybody takes what there is, and settles it: all that was begun ends."""
        self.counts["used up"] += 1
        if self.say:
            self.say("--- use up")
        for queue in list(self.paused):
            self.operator.pause(queue, False, self.now_us)
        self.paused.clear()
        for port in list(self.ports):
            port.widen()
        eager = self.connect("phpmq")
        for _ in range(TURNS_MAX):
            for queue in self.log.queues():
                if (queue, False) not in eager.demands:
                    eager.consume(queue, 0)  # One may come to be now: its first message waited for room.
            self.rest()
            settled = sum([port.settle_all() for port in self.ports]) + self.callers.settle_all()
            delayed = sum(self.log.describe(queue).delayed for queue in self.log.queues())
            stuck = [port for port in self.ports if port.is_held and port.held_count()]
            if not settled and not delayed and not stuck:
                break
            for port in stuck if not settled else ():
                # It is not read from, and what it holds may be what there is no room beside.
                self.ports.remove(port)
                port.gone()
                self.broker.detach(port, self.now_us)
            self.now_us += SECOND_US * bool(delayed)
        self.rest()
        self.check()
        for queue in self.log.queues():
            alone = any(port.wants_alone(queue) for port in self.ports)
            info = self.log.describe(queue)
            used_up = (info.ready, info.delayed, info.held) == (0, 0, 0)
            assert alone or used_up, f"{queue!r} is not used up: {info}"
            assert alone or not [t for p in self.ports for t in p.open_requests() if t.message.queue == queue]
        held_back = any(port.is_held for port in self.ports)
        alone = any(port.wants_alone("small") for port in self.ports)
        assert alone or not held_back, "there is room, and somebody waits"

    def end(self, how: str) -> None:
        if self.say:
            self.say(f"--- {how}")
        self.counts[how] += 1
        if how == "lead":
            self.rest()  # over a relay messages travel when they are durable
        elif how == "close":
            self.broker.drain()
            self.turn()
            assert not self.callers.waiting, "the broker ends, and somebody waits for messages"
            self.broker.end_requests(self.now_us)
            for port in self.ports:
                assert not port.open_requests(), "the broker ends, and somebody waits for an answer"
                port.gone()
                self.broker.detach(port, self.now_us)
            self.ports.clear()
            self.log.close(self.now_us)
        before = list(self.ports)
        self.callers.forget()
        for message in self.messages.values():
            message.may_end |= message.asks  # Whoever asked was connected to the broker that is gone.
            # What is written and not synced is all that this queue's receipts promise.
            message.confirmed &= how != "cut" or message.queue != "drop"
        self.disk = self.disk.crash(self.rng) if how == "cut" else self.disk.kill()
        self.ports.clear()
        self.open()
        if how == "lead":
            self.broker.wait_for_claims(True)
            for port in before:
                if self.rng.random() < 0.8:
                    self.ports.append(port)
                    port.move_over()
                else:
                    port.gone()
            self.broker.wait_for_claims(False)
        self.rest()
        self.check()


def run(seed: int, say: Say | None = None) -> "Counter[str]":
    """One run; Broken where it shows a broken promise, or an error that nobody expects."""
    try:
        return Run(seed, say).run()
    except Exception as error:
        raise Broken(
            f"seed {seed}: {type(error).__name__}: {error}\n"
            f"    python -m tests.broker.restarts {seed}    repeats it"
        ) from error


if __name__ == "__main__":
    run_seeds(sys.argv[1:], run)
