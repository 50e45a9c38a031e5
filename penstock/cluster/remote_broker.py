"""RemoteBroker: a follower's broker. It has the face of `Broker`, and the leader behind it.

    attach, detach, left, handle, blocked, idle, turn, tick, drain, dismiss, is_drained, end_requests,
    set_policies, holds_back                as `Broker` has them
    connect(leader)                         the leader is there (from now on, whatever was before)
    lost(why)                               there is no leader that anybody knows of
    is_linked                               whether the leader hears us
    move_to(broker, log, now_us)            this front-end leads now: everything goes on in its own broker
    adopt(broker, log, ports, now_us)       it hands over: everything goes on here; `all_stored` when it is so
    take_over(broker, log, ports, now_us)   it has lost its log: everything goes on here; `decided` when it is
                                            known what of it is stored
    on_link(is_up, why)                     is called when a link begins, has ended or could not be had

Words of clients become frames, frames of the leader become deliveries. What it remembers besides is what a
new leader, or the same one after a lost link, must be told so that clients notice nothing (`seating.py`):
demands, what they hold, settlements that are not known to be durable, and messages that are not stored
(`sending.py`).

Rules that always hold:
  * A message that a client has published is stored once, or the client is told that it is not, or its
    connection ends first. Nothing is confirmed before the leader has said that it is durable.
  * What a client holds is claimed before anything is demanded for it, so that it is not given to it again.
  * A delivery that nobody wants any more when it arrives (the client has cancelled meanwhile) goes back
    uncounted.

How it fails: without a link, publishing waits and nothing is delivered; requests that the leader had are told
to be undelivered, broadcasts are dropped. A client feels that as a pause.
"""

import secrets
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Final

from penstock.broker.broker import Broker
from penstock.broker.port import Port
from penstock.broker.ports import Attached
from penstock.cluster.columns import pack_ranges, unpack_batch, unpack_slices
from penstock.cluster.follower_link import Dialer, FollowerLink
from penstock.cluster.frames import (
    COUNT,
    FINISH_ENDED,
    FINISH_LATE,
    NUMBER,
    Body,
    Buffer,
    Frame,
    Hello,
    Kind,
    decode_json,
    encode_frame,
    text_bytes,
    violation,
)
from penstock.cluster.lanes import LANES, Words, number_of, series_of
from penstock.cluster.rooms import Rooms
from penstock.cluster.routing import ShardPort
from penstock.cluster.seating import Seating, end_late, user_of
from penstock.cluster.seats import Claim, Demand, Held, Seat, Settlement
from penstock.cluster.sending import Sending
from penstock.cluster.trust import Leader
from penstock.cluster.word_codec import NO_NUMBER, pack_words
from penstock.log.errors import LogRefused
from penstock.log.log import Log
from penstock.model import words
from penstock.model.policy import Policies, QueueNameError
from penstock.model.ranges import RangeMap
from penstock.model.words import Command
from penstock.server.connection import Connection


class RemoteBroker:
    def __init__(
        self,
        front_end: str,
        wants_turn: Callable[[], None],
        *,
        connection_buffer_bytes: int,
        on_link: Callable[[bool, str], None] | None = None,
        shard: int = 0,
    ) -> None:
        self._front_end = front_end
        self._shard = shard
        self._life = secrets.token_hex(6)
        self._wants_turn = wants_turn
        self._on_link = on_link
        self._seating = Seating(connection_buffer_bytes)
        self._sending = Sending(self._say_request, self._may_finish, self._seating)
        self._rooms = Rooms(connection_buffer_bytes)
        self._link: FollowerLink | None = None
        self._syncing: dict[Seat, None] = {}  # these want to hear when all that they have said is durable
        self._dialer = Dialer(self._link_up, self._link_down, self._hear, wants_turn)
        self._draining = False
        self._adopted: list[Seat] = []  # what these had said to a broker of our own may not be durable

    # --- the leader --------------------------------------------------------------------------------

    def connect(self, leader: Leader) -> None:
        """The leader is there; keep a link to it."""
        self._dialer.dial(leader, Hello("words", self._front_end, leader.term, self._life, shard=self._shard))

    def lost(self, why: str) -> None:
        """There is no leader; wait to be told of one."""
        self._dialer.hang_up(why)

    @property
    def is_linked(self) -> bool:
        return self._link is not None

    def _link_down(self, why: str) -> None:
        was_up = self._link is not None
        self._link = None
        self._sending.link_down()
        self._rooms.link_down()
        if was_up:
            # The leader withdraws them, and nobody would answer.
            for seat in self._seating:
                seat.end_asked()
                seat.hold(Held.LEADER, False)
        if self._on_link is not None:
            self._on_link(False, why)

    def _link_up(self, link: FollowerLink) -> None:
        """Everything that a leader must know, in an order that gives nothing twice."""
        self._link = link
        # Messages first: no settlement of who has sent them overtakes them.
        self._sending.link_up(link)

        def tell(seat: Seat, kind: Kind, buffers: Iterable[Buffer], flag: int) -> None:
            link.write(encode_frame(kind, *buffers, port=seat.number, flag=flag))

        self._seating.tell(tell)
        link.write(encode_frame(Kind.RESUMED))
        self._wants_turn()
        if self._on_link is not None:
            self._on_link(True, "")

    def _write(
        self,
        seat: Seat,
        kind: Kind,
        buffers: Iterable[Buffer] = (),
        flag: int = 0,
        settlement: Settlement | None = None,
    ) -> None:
        """Behind the messages of this turn, and behind all that the connection has published before."""
        if self._link is None and settlement is None:
            return
        frame = encode_frame(kind, *buffers, port=seat.number, flag=flag)
        if seat.gathered or seat.waiting or (seat.unstored and settlement is not None):
            self._sending.say_behind(Words(seat, frame, settlement))
        elif self._link is not None:
            self._sending.say(frame)
            self._wants_turn()

    def _write_aside(self, seat: Seat, kind: Kind, buffers: Iterable[Buffer] = (), flag: int = 0) -> None:
        """Whatever it has published: there may be no room for that, and others wait for what this tells."""
        if self._link is not None:
            self._sending.say(encode_frame(kind, *buffers, port=seat.number, flag=flag))
            self._wants_turn()

    def _write_at_once(self, seat: Seat, kind: Kind, buffers: Iterable[Buffer]) -> None:
        """Among the messages of this turn, before all other words."""
        if self._link is not None:
            self._link.write(encode_frame(kind, *buffers, port=seat.number))

    # --- ports -------------------------------------------------------------------------------------

    def attach(self, port: Port) -> None:
        seat = self._seating.attach(port)
        self._write_at_once(seat, Kind.ATTACH, [self._seating.attachment(seat)])

    def detach(self, port: Port, now_us: int, *, lost: bool = True) -> None:
        seat = self._seating.detach(port)
        if seat is not None:
            self._syncing.pop(seat, None)
            self._sending.leave(seat)
            self._rooms.leave(seat)
            self._write(seat, Kind.DETACH, flag=not lost)
            self._wants_turn()

    def named(self, port: Port) -> None:
        seat = self._seating.of(port)
        if seat is not None:
            self._write_aside(seat, Kind.USER, [text_bytes(user_of(port))])

    def left(self, port: Port, now_us: int, *, lost: bool = True) -> None:
        seat = self._seating.of(port)
        if seat is not None:
            cancelled: list[Command] = [words.Cancel(*door) for door in seat.demands]
            if cancelled:
                self._write_aside(seat, Kind.WORDS, pack_words(NO_NUMBER, cancelled))
            for (queue, dead), holds in seat.holds.items():
                ranges = [(first, end) for first, end, _ in holds]
                self._write_aside(seat, Kind.RETURN, (text_bytes(queue), pack_ranges(ranges)), dead)
            for settlement in self._sending.forget_waiting(seat):
                for (queue, dead), _, its_ranges, _ in settlement.claims:
                    self._write_aside(seat, Kind.RETURN, (text_bytes(queue), pack_ranges(its_ranges)), dead)
            seat.demands.clear()
            seat.holds.clear()
            seat.attempts.clear()

    def blocked(self, port: Port, blocked: bool) -> None:
        seat = self._seating.of(port)
        if seat is not None:
            seat.blocked = blocked
            self._write_aside(seat, Kind.BLOCKED, flag=blocked)
            self._rooms.check(seat, self._link)

    def idle(self, port: Port, idle: bool) -> None:
        seat = self._seating.of(port)
        if seat is not None:
            seat.idle = idle
            self._write_aside(seat, Kind.IDLE, flag=idle)

    # --- words -------------------------------------------------------------------------------------

    def handle(self, port: Port, commands: Iterable[Command], now_us: int) -> None:
        """What a port has said in one chunk."""
        seat = self._seating.of(port)
        if seat is None:
            return  # It is being disconnected: the log has failed in the middle of what was done for it.
        said: list[Command] = []
        settling: list[words.Settle | words.Reply] = []
        asks = False
        for command in commands:
            if isinstance(command, words.Publish):
                command.batch.protocol = port.protocol
                self._sending.publish(seat, command)
            elif isinstance(command, words.Settle | words.Reply):
                settling.append(command)
                said.append(command)
            elif isinstance(command, words.Sync):
                asks = True
            elif self._remember(seat, command):
                said.append(command)
        settlement = self._seating.settle(seat, settling) if settling else None
        if settling and seat.counts_room:
            self._rooms.check(seat, self._link)
        if said:
            number = NO_NUMBER
            if settlement is not None and (seat.unstored or seat.waiting or seat.gathered):
                # Behind messages for which there may be no room, it is said by itself.
                others = [it for it in said if not isinstance(it, words.Settle | words.Reply)]
                if others:
                    self._write(seat, Kind.WORDS, pack_words(number, others))
                said = settlement.commands
            elif settlement is not None:
                number = self._seating.number(settlement)
                if self._link is None:
                    said = settlement.commands  # all else is told with the demands, as it is by then
            self._write(seat, Kind.WORDS, pack_words(number, said), settlement=settlement)
            self._sending.check_link(seat)
        if asks:
            self._ask(seat)
        self._wants_turn()

    def _ask(self, seat: Seat) -> None:
        if seat.syncing:
            seat.asks_again = True
        else:
            seat.ask()
            self._syncing[seat] = None
            self._may_finish(seat)

    def demands(self, port: Port) -> list[tuple[str, bool]]:
        seat = self._seating.of(port)
        return list(seat.demands) if seat is not None else []

    def _remember(self, seat: Seat, command: Command) -> bool:
        """What else a client can say; whether the leader has to hear it now."""
        if isinstance(command, words.Consume):
            door = command.queue, command.dead
            if self._draining or seat.closing:
                seat.port.decline(*door)
                return False
            demand = seat.demands.get(door)
            if demand is None:
                seat.demands[door] = Demand(command)
            else:
                demand.command = command
                demand.unanswered += 1
        elif isinstance(command, words.Cancel):
            seat.demands.pop((command.queue, command.dead), None)
        elif isinstance(command, words.Closing):
            seat.closing = True
            seat.demands.clear()
        elif isinstance(command, words.Ignored):
            text = f"{command.reason}: {command.detail}" if command.detail else command.reason
            seat.port.log(text, command.count)
            return False
        elif isinstance(command, words.Broadcast) and self._link is None:
            seat.port.log(
                f"queue {command.queue!r}: there is no leader, a broadcast is lost", len(command.batch)
            )
        return True

    def _say_request(self, seat: Seat, command: words.Publish) -> None:
        if command.tickets is not None:
            seat.asked.update(command.tickets)
        self._write_at_once(seat, Kind.WORDS, pack_words(NO_NUMBER, [command]))

    # --- turns -------------------------------------------------------------------------------------

    def turn(self, now_us: int) -> None:
        """The end of a turn of the loop: to the leader with what came."""
        self._sending.send()
        if self._link is not None:
            self._link.flush()

    def tick(self, now_us: int, step_us: int = 0) -> None:
        self._sending.tick()
        if not self._sending.is_empty:
            self._wants_turn()

    def drain(self) -> None:
        """From now on nothing is handed out; what is out may be settled."""
        self._draining = True
        for seat in self._seating:
            cancelled: list[Command] = [words.Cancel(queue, dead) for queue, dead in seat.demands]
            for queue, dead in list(seat.demands):
                seat.port.decline(queue, dead)
            seat.demands.clear()
            if cancelled:
                self._write(seat, Kind.WORDS, pack_words(NO_NUMBER, cancelled))

    def dismiss(self) -> None:
        """Let every port go as soon as nothing of its own is pending."""
        for seat in self._seating:
            if not seat.closing:
                seat.closing = True
                self._write(seat, Kind.WORDS, pack_words(NO_NUMBER, [words.Closing()]))

    @property
    def is_drained(self) -> bool:
        """Nobody holds anything any more, and all that was published or settled is durable."""
        return self._seating.is_settled and self._sending.is_empty and not self._adopted

    def end_requests(self, now_us: int) -> None:
        for seat in self._seating:
            seat.end_asked()

    def set_policies(self, policies: Policies) -> None:
        """The leader's count."""

    @property
    def holds_back(self) -> int:
        return self._sending.held_count

    # --- what the leader says ------------------------------------------------------------------------

    def _hear(self, frame: Frame) -> None:
        heard = _HEARD.get(frame.kind)
        if heard is not None:
            heard(self, frame)
            return
        handler = _HANDLERS.get(frame.kind)
        if handler is None:
            raise violation(f"a {frame.kind.name} frame, which is not the leader's to send", frame.position)
        seat = self._seating.at(frame.port)
        if seat is not None:  # otherwise it has left meanwhile
            handler(self, seat, frame)

    def _deliver(self, seat: Seat, frame: Frame) -> None:
        body = Body(frame)
        queue = body.text()
        (now_us,) = body.numbers(NUMBER)
        slices = unpack_slices(body)
        body.end()
        door = queue, bool(frame.flag)
        count = sum(map(len, slices))
        seat.received_count += count
        seat.received_bytes += sum(piece.payload_bytes for piece in slices)
        demand = seat.demands.get(door)
        if demand is None or count > seat.port.count_room():
            if demand is None:  # its cancel may wait, and it would get this again
                self._write_aside(seat, Kind.WORDS, pack_words(NO_NUMBER, [words.Cancel(*door)]))
            ranges = [(piece.offset_start, piece.offset_end) for piece in slices]
            self._write_aside(seat, Kind.RETURN, (text_bytes(queue), pack_ranges(ranges)), door[1])
        else:
            if demand.command.once:
                del seat.demands[door]
            seat.took(door, slices)
            seat.port.deliver(queue, slices, now_us, door[1])
        self._rooms.check(seat, self._link)

    def _consuming(self, seat: Seat, frame: Frame) -> None:
        queue, dead = _name_of(frame), bool(frame.flag)
        demand = seat.demands.get((queue, dead))
        if demand is not None:
            demand.active = True
            if demand.unanswered:
                demand.unanswered -= 1
                seat.port.consuming(queue, dead)

    def _decline(self, seat: Seat, frame: Frame) -> None:
        queue, dead = _name_of(frame), bool(frame.flag)
        if seat.demands.pop((queue, dead), None) is not None:
            seat.port.decline(queue, dead)

    def _delivered(self, seat: Seat, frame: Frame) -> None:
        seat.port.delivered(_tickets_of(frame))

    def _replies(self, seat: Seat, frame: Frame) -> None:
        body = Body(frame)
        (count,) = body.numbers(COUNT)
        tickets = body.column("I", count)
        answers = unpack_batch(body)
        body.end()
        seat.asked.difference_update(tickets)
        seat.port.replies(tickets, answers)

    def _undelivered(self, seat: Seat, frame: Frame) -> None:
        tickets = _tickets_of(frame)
        seat.asked.difference_update(tickets)
        seat.port.undelivered(tickets)

    def _hold(self, seat: Seat, frame: Frame) -> None:
        seat.hold(Held.LEADER, bool(frame.flag))

    def _finish(self, seat: Seat, frame: Frame) -> None:
        if frame.flag & FINISH_LATE:
            end_late(seat.port)
            return
        if frame.flag & FINISH_ENDED and isinstance(seat.port, Connection | ShardPort):
            seat.port.end()
            return
        seat.finishing = True
        self._may_finish(seat)

    def _may_finish(self, seat: Seat) -> None:
        if seat.waiting or seat.gone:
            return
        if seat.syncing and not seat.asked_after:
            seat.syncing = False
            del self._syncing[seat]
            again, seat.asks_again = seat.asks_again, False
            seat.port.synced()
            if again:
                self._ask(seat)
        if seat.finishing and not (seat.syncing or seat.unstored):
            seat.port.finish()

    def _log(self, seat: Seat, frame: Frame) -> None:
        fields = decode_json(frame)
        seat.port.log(str(fields.get("text")), int(fields.get("count", 1)))

    def _broadcast(self, frame: Frame) -> None:
        body = Body(frame)
        queue = body.text()
        (count,) = body.numbers(COUNT)
        ports = body.column("I", count)
        batch = unpack_batch(body)
        body.end()
        for number in ports:
            seat = self._seating.at(number)
            if seat is not None and (queue, False) in seat.demands:
                seat.port.broadcast(queue, batch)

    def _stored(self, frame: Frame) -> None:
        (number,) = Body(frame).numbers(NUMBER)
        self._sending.stored(frame.flag, number)

    def _refused(self, frame: Frame) -> None:
        fields = decode_json(frame)
        try:
            number, fault = int(fields["number"]), {int(at) for at in fields["parts"]}
            full, never = bool(fields["full"]), bool(fields["never"])
            self._sending.told_of_disk(bool(fields.get("disk")))  # a leader of an older version does not say
            self._sending.refused(frame.flag, number, fault, full, never, str(fields["text"]))
        except (KeyError, TypeError, ValueError) as error:
            raise violation(f"a REFUSED frame that lacks or spoils {error}", frame.position) from None

    def _settled(self, frame: Frame) -> None:
        (number,) = Body(frame).numbers(NUMBER)
        self._seating.settled(number)
        for seat in list(self._syncing):
            self._may_finish(seat)

    # --- this front-end leads ------------------------------------------------------------------------

    def move_to(self, broker: Broker, log: Log, now_us: int) -> None:
        """Everything goes on in a broker of our own, whose log has what the last leader stored."""
        self._dialer.hang_up("this front-end leads now")
        for seat in self._seating:  # Also who has left, and of whom something is still to be heard.
            if isinstance(seat.port, Connection | ShardPort):
                seat.port.move(broker)
        numbered, gathered = self._sending.take_all()
        newest = {
            lane: number_of(log.transaction_newest(series_of(self._front_end, self._life, lane)))
            for lane in LANES
        }

        def publish() -> None:
            for lane, shipment in numbered:
                for seat, command, *_ in shipment.items():
                    if shipment.number > newest[lane]:
                        self._move_publish(seat, command, broker, log, now_us)
                    elif command.tickets is not None and not seat.gone:
                        seat.port.delivered(command.tickets)
            for seat, command, *_ in gathered:
                self._move_publish(seat, command, broker, log, now_us)

        self._seating.move_to(broker, now_us, publish)
        for seat in self._syncing:
            broker.handle(seat.port, [words.Sync()], now_us)
        self._syncing.clear()

    def adopt(self, broker: Broker, log: Log, ports: Iterable[ShardPort], now_us: int) -> None:
        """Everything of these goes on here, as it is at a broker of our own that hands nothing out any more.

        What that has not confirmed yet it still does, and lets nobody go. Until `all_stored`, it is not known
        that what these have said before is durable.
        """
        for port in ports:
            attached = broker.ports.attached.get(port)
            if attached is None:
                continue
            seat = self._seat(port, attached, log)
            seat.unstored += 1
            self._adopted.append(seat)
            waiting = self._take_waiting(broker, seat, attached, now_us)
            if waiting and port.asked > port.answered:
                self._ask(seat)

    def _seat(self, port: Port, attached: Attached, log: Log) -> Seat:
        """As the port stands at a broker of our own, where nothing is handed out any more."""
        seat = self._seating.attach(port)
        seat.closing, attached.closing = attached.closing, False
        seat.idle, seat.blocked = attached.idle, attached.blocked
        demands = port.demands if isinstance(port, ShardPort) else {}
        for door, command in demands.items():
            known = attached.doors.get(door)
            active = known is not None and known.consumers.window(port)[1]
            seat.demands[door] = Demand(command, unanswered=not active, active=active)
        for queue in {queue for queue, _ in attached.holds}:
            for first, end, dead, origin, attempts in log.holds_of(queue, port.name):
                seat.holds.setdefault((queue, dead), RangeMap()).add(first, end, origin)
                if attempts:
                    seat.attempts.setdefault((queue, dead), RangeMap()).add(first, end, attempts)
        return seat

    def _take_waiting(self, broker: Broker, seat: Seat, attached: Attached, now_us: int) -> bool:
        """What there was no room for, and what is settled behind it; whether there is such."""
        waiting, attached.waiting = attached.waiting, []
        broker.publishing.forget(attached)
        seat.port.hold(False)
        self.handle(seat.port, waiting, now_us)
        return bool(waiting)

    def all_stored(self) -> None:
        """What those had said to a broker of our own who were adopted is durable."""
        adopted, self._adopted = self._adopted, []
        for seat in adopted:
            seat.stored()
            self._may_finish(seat)

    def take_over(self, broker: Broker, log: Log, ports: Iterable[ShardPort], now_us: int) -> None:
        """Everything of these goes on here: the log has failed, or is not ours any more. The broker does
        nothing for them from now on.

        Nothing may be said to the next leader before it is `decided` what of it is stored.
        """
        taken: list[tuple[ShardPort, Seat, Attached]] = []
        for port in ports:
            attached = broker.ports.attached.get(port)
            if attached is not None:
                seat = self._seat(port, attached, log)
                seat.late = True
                taken.append((port, seat, attached))
        left: list[ShardPort] = []
        for sender, command, claims, start, end in broker.undurable or ():
            if not isinstance(sender, ShardPort):
                continue  # Its own front-end knows.
            found = self._seating.of(sender)
            if found is None:
                found = self._seating.attach(sender)
                left.append(sender)
            if isinstance(command, words.Publish):
                self._sending.doubt(found, command, start, end)
            else:
                dead = isinstance(command, words.Settle) and command.dead
                its = [Claim((command.queue, dead), command.origin, *it) for it in claims]
                self._sending.doubt(found, self._seating.unsaid(found, [command], its), start, end)
        for port, seat, attached in taken:
            self._take_waiting(broker, seat, attached, now_us)
            broker.ports.detach(port)
        for port, seat, attached in taken:
            for it in attached.asked.values():
                if tickets := it.end_all():
                    port.undelivered(tickets)
            if port.asked > port.answered:
                self._ask(seat)
        for port in left:
            self.detach(port, now_us)

    def decided(self, stored: int, unstored: int) -> list[Port]:
        """The log that was lost is stored up to one position, and not from the other one on; who has sent
        what is between, and is there to be told."""
        seats = self._sending.decided(stored, unstored)
        for seat in list(self._syncing):
            self._may_finish(seat)
        return [seat.port for seat in seats if not seat.gone]

    @staticmethod
    def _move_publish(seat: Seat, publish: words.Publish, broker: Broker, log: Log, now_us: int) -> None:
        if not seat.gone:
            broker.handle(seat.port, [publish], now_us)
            return
        if publish.wants_reply:
            return  # Nobody waits for the answer any more.
        try:
            broker.doors.check_names([publish.queue])
            log.append(publish.queue, publish.batch, now_us)
            broker.stir(publish.queue)
        except (LogRefused, QueueNameError) as error:
            seat.port.log(f"refused: {error}", len(publish.batch))


def _name_of(frame: Frame) -> str:
    try:
        return str(frame.body, "utf-8")
    except UnicodeDecodeError as error:
        raise violation(f"a {frame.kind.name} frame without a name ({error})", frame.position) from None


def _tickets_of(frame: Frame) -> "array[int]":
    if len(frame.body) % 4:
        raise violation(f"a {frame.kind.name} frame of {len(frame.body)} bytes", frame.position)
    return Body(frame).column("I", len(frame.body) // 4)


# Any: methods of the class that this module has.
_HANDLERS: Final[dict[Kind, Callable[[Any, Seat, Frame], None]]] = {
    Kind.DELIVER: RemoteBroker._deliver,
    Kind.CONSUMING: RemoteBroker._consuming,
    Kind.DECLINE: RemoteBroker._decline,
    Kind.DELIVERED: RemoteBroker._delivered,
    Kind.REPLIES: RemoteBroker._replies,
    Kind.UNDELIVERED: RemoteBroker._undelivered,
    Kind.HOLD: RemoteBroker._hold,
    Kind.FINISH: RemoteBroker._finish,
    Kind.LOG: RemoteBroker._log,
}
_HEARD: Final[dict[Kind, Callable[[Any, Frame], None]]] = {
    Kind.BROADCAST: RemoteBroker._broadcast,
    Kind.STORED: RemoteBroker._stored,
    Kind.REFUSED: RemoteBroker._refused,
    Kind.SETTLED: RemoteBroker._settled,
}
