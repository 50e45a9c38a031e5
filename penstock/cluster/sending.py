"""Sending: the messages that a follower's clients publish, from their chunk to the leader's receipt.

    doubtful    had gone to a log of our own, which we have lost: it may be stored, and nothing else leaves
                before that is known
    gathered    came in this turn, or there is no leader, or too much is on its way; requests too, and words
                that their connection has said behind messages, settlements above all
    main lane   on its way, in order
    waiting     of one connection: refused for lack of room, and whatever it has published since
    again lane  of all that waits, one batch at a time, tried again a few times a second

Rules that always hold:
  * What one connection sends to one queue is stored in the order in which it came.
  * No word of a connection leaves before the messages that it has published before, and what it settles
    behind them counts only if none of them is refused for lack of room: a client that has sent a result and
    then settled its input must not have settled alone. So it is, too, where what it has sent is dropped.
  * Words leave in the order of their numbers, those of one connection as it has said them.
  * A connection of which something waits, or that finds the window full, is not read from.
  * Lack of room in one queue does not delay those who send to others for longer than one refusal takes.

How it fails: what the leader refuses for good is told to the client where its protocol has a word for it, and
logged; nothing else is dropped while the connection is there. What finds no room when its connection has left
waits as well, up to `WINDOW_BYTES`; what is dropped then is logged.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from penstock.broker.publishing import DISK_SECONDS
from penstock.cluster.follower_link import FollowerLink
from penstock.cluster.frames import WORDS_BEHIND, WORDS_EPOCH, WORDS_EPOCHS, Kind, encode_frame
from penstock.cluster.lanes import AGAIN, MAIN, SHIPMENT_BYTES, Item, Lane, Shipment, Words, weight_of
from penstock.cluster.seating import Seating
from penstock.cluster.seats import Held, Seat, Settlement
from penstock.cluster.word_codec import NO_NUMBER, pack_words, renumbered
from penstock.model.words import Publish

WINDOW_BYTES: Final = 8 << 20
"""How much may be on its way or gathered, by weight, before connections that publish are held."""

SHIPMENTS_MAX: Final = 32
"""How many shipments may be on their way. While the leader's disk is busy, they grow instead."""


class Sending:
    def __init__(
        self,
        say_request: Callable[[Seat, Publish], None],
        may_finish: Callable[[Seat], None],
        seating: Seating,
    ) -> None:
        self._say_request = say_request
        self._may_finish = may_finish
        self._seating = seating
        self._link: FollowerLink | None = None
        self._main = Lane(MAIN)
        self._again = Lane(AGAIN)
        self._gathered: deque[Item | Words] = deque()
        self._gathered_weight = 0  # of what is doubtful, too
        self._doubtful: list[tuple[Item | Words, int, int]] = []  # and between which positions of that log
        self._said: list[bytes] = []  # in this turn, what waits for nothing else
        self._held: dict[Seat, None] = {}  # for the window's sake
        self._refused: dict[Seat, None] = {}  # of which something waits
        self._full: set[str] = set()  # queues that were found full since the last tick
        self._disk_full = 0.0  # since when there has been no room on the leader's disk; 0: there is some
        self._for_disk = False  # the last refusal was for the sake of that
        self._left_weight = 0  # of what waits for room, and who has sent it has left

    @property
    def is_empty(self) -> bool:
        return not (self._main.sent or self._again.sent or self._gathered or self._refused or self._doubtful)

    @property
    def held_count(self) -> int:
        return len(self._held.keys() | self._refused.keys())

    # --- links -----------------------------------------------------------------------------------

    def link_up(self, link: FollowerLink) -> None:
        """Everything that is not known to be stored, under its numbers."""
        self._link = link
        for lane in (self._main, self._again):
            lane.epoch = 0
            for shipment in lane.sent:
                link.write(lane.frame(shipment))
        self._ship_departed(link)

    def _ship_departed(self, link: FollowerLink) -> None:
        """The next leader is told of who has left once, and then no more: what it has published goes before,
        and what it has settled with the rest of that."""
        gathered, self._gathered = self._gathered, deque()
        items: list[Item] = []
        for item in gathered:
            if not item.seat.gone:
                self._gathered.append(item)
                continue
            self._leave_line(item)
            if isinstance(item, Words):
                assert item.settlement is not None  # others do not outlive their link
                self._seating.number(item.settlement)
            elif item.publish.wants_reply:
                item.seat.stored(item.questions)
            else:
                items.append(item)
        while items:
            count = size = 0
            for item in items:
                if count and (item.alone or size + item.weight > SHIPMENT_BYTES):
                    break
                count += 1
                size += SHIPMENT_BYTES if item.alone else item.weight
            link.write(self._main.ship(items[:count]))
            del items[:count]

    def link_down(self) -> None:
        """The next leader is told everything anew, but for settlements that are still queued here."""
        self._link = None
        self._said.clear()
        gathered, self._gathered = self._gathered, deque()
        if self._main.sent:  # What was said behind these is said behind them again.
            for settlement in self._seating.take_back(self._main.sent[0].number):
                self._line_up(_settling(settlement))
        for item in gathered:
            self._leave_line(item)
            if not isinstance(item, Words):
                self._line_up(item)
            elif item.settlement is not None:
                self._line_up(_settling(item.settlement))
        for seat in self._refused:
            waiting, seat.waiting = seat.waiting, deque()
            for item in waiting:
                if not isinstance(item, Words):
                    seat.waiting.append(item)
                elif item.settlement is not None:
                    seat.waiting.append(_settling(item.settlement))

    def _line_up(self, item: Item | Words) -> None:
        self._gathered.append(item)
        self._gathered_weight += item.weight
        item.seat.gathered += 1

    def _leave_line(self, item: Item | Words) -> None:
        self._gathered_weight -= item.weight
        item.seat.gathered -= 1

    # --- in --------------------------------------------------------------------------------------

    def publish(self, seat: Seat, command: Publish) -> None:
        if seat.waiting:
            seat.waiting.append(command)
            return
        late = time.monotonic() + command.timeout_seconds if command.timeout_seconds else 0.0
        self._line_up(Item(seat, command, late, weight=weight_of(command), questions=seat.questions))
        self._took(seat)

    def _took(self, seat: Seat) -> None:
        seat.unstored += 1
        if self._main.weight + self._gathered_weight > WINDOW_BYTES:
            self._hold(seat)

    def doubt(self, seat: Seat, what: Publish | Settlement, start: int, end: int) -> None:
        """It has gone to a log that we have lost: it is there between these positions, or nowhere."""
        if isinstance(what, Publish):
            item: Item | Words = Item(seat, what, weight=weight_of(what), questions=seat.questions)
        else:
            item = _settling(what)
        self._gathered_weight += item.weight
        seat.gathered += 1
        self._doubtful.append((item, start, end))
        if isinstance(item, Item):
            self._took(seat)

    def decided(self, stored: int, unstored: int) -> list[Seat]:
        """The log that we have lost is stored up to one position, and not stored from the other one on. What
        is between is not known; whose messages those are is answered, they go no further, and nothing
        is settled behind them. Other settlements are said, though they may have been before."""
        doubtful, self._doubtful = self._doubtful, []
        unknown = {
            item.seat: None
            for item, start, end in doubtful
            if isinstance(item, Item) and start < unstored and end > stored
        }
        left: list[Item | Words] = []
        for item, _, end in doubtful:
            seat = item.seat
            if isinstance(item, Words):
                assert item.settlement is not None
                if end > stored and seat not in unknown:
                    left.append(item)
                else:
                    self._leave_line(item)
                    self._seating.forget(item.settlement)
            elif end > stored and seat not in unknown:
                left.append(item)
            else:
                self._leave_line(item)
                seat.stored(item.questions)
                if item.publish.tickets is not None and end <= stored and not seat.gone:
                    seat.port.delivered(item.publish.tickets)
        self._gathered.extendleft(reversed(left))
        for seat in unknown:
            self._forget_gathered(seat)
        for item, *_ in doubtful:
            self._may_finish(item.seat)
        self._check_window()
        return list(unknown)

    def say(self, frame: bytes) -> None:
        """What waits for no message of its connection: behind those of this turn, before all that is said
        later."""
        self._said.append(frame)

    def say_behind(self, item: Words) -> None:
        """Something was said by a connection of which messages are gathered, or wait."""
        if item.seat.waiting:
            item.seat.waiting.append(item)
        else:
            self._line_up(item)

    def check_link(self, seat: Seat) -> None:
        """It has said something: where the link takes no more, it has said enough."""
        if self._link is not None and self._link.is_full:
            self._hold(seat)

    def _hold(self, seat: Seat) -> None:
        self._held[seat] = None
        seat.hold(Held.WINDOW, True)

    def _check_window(self) -> None:
        if (
            self._held
            and self._main.weight + self._gathered_weight <= WINDOW_BYTES // 2
            and not (self._link is not None and self._link.is_full)
        ):
            held, self._held = self._held, {}
            for seat in held:
                seat.hold(Held.WINDOW, False)

    def leave(self, seat: Seat) -> None:
        """Its connection is gone: messages that wait for room go no further, all else does."""
        self.forget_waiting(seat)
        waiting, seat.waiting = seat.waiting, deque()
        for item in waiting:
            if isinstance(item, Words):
                self._line_up(item)
            elif not self._is_on_way(item):
                _tell_lost(seat, item)
        self._refused.pop(seat, None)
        self._held.pop(seat, None)

    def forget_waiting(self, seat: Seat) -> list[Settlement]:
        """Its peer is gone: what it has settled behind messages that wait for room is not said."""
        kept: deque[Words | Publish] = deque()
        forgotten: list[Settlement] = []
        for item in seat.waiting:
            is_behind = kept and isinstance(item, Words) and item.settlement is not None
            (forgotten if is_behind else kept).append(item.settlement if is_behind else item)
        seat.waiting = kept
        for settlement in forgotten:
            self._seating.forget(settlement)
        return forgotten

    # --- out -------------------------------------------------------------------------------------

    def send(self) -> None:
        """The end of a turn: what has gathered, as far as the window allows."""
        link, main = self._link, self._main
        while link is not None and self._gathered:
            if len(main.sent) >= SHIPMENTS_MAX or main.weight >= WINDOW_BYTES or link.is_full:
                break
            items, said = self._next_items()
            if items:
                link.write(main.ship(items))
            for behind in said:
                self._say(behind, link)
        if link is not None:
            self._say_said(link)
        self._check_window()

    def _say_said(self, link: FollowerLink) -> None:
        said, self._said = self._said, []
        for frame in said:
            link.write(frame)

    def _say(self, item: Words, link: FollowerLink) -> None:
        self._say_said(link)
        settlement, flag = item.settlement, 0
        if settlement is None:
            link.write(item.frame)
            return
        settlement.behind = self._main.next_number if item.seat.unstored else 0
        if settlement.behind:
            flag = WORDS_BEHIND | self._main.epoch % WORDS_EPOCHS << WORDS_EPOCH
        link.write(renumbered(item.frame, self._seating.number(settlement), flag))

    def _next_items(self) -> tuple[list[Item], list[Words]]:
        """What goes into the next shipment, and what is said behind it."""
        items: list[Item] = []
        said: list[Words] = []
        size = 0
        gathered = self._gathered
        while gathered and size < SHIPMENT_BYTES:
            item = gathered[0]
            seat = item.seat
            if isinstance(item, Words):
                if seat.waiting:
                    seat.waiting.append(item)
                else:
                    said.append(item)
            else:
                publish = item.publish
                if (items and (item.alone or size + item.weight > SHIPMENT_BYTES)) or (
                    (items or said) and publish.wants_reply
                ):
                    break
                if seat.waiting:
                    seat.stored(item.questions)
                    seat.waiting.append(publish)
                elif publish.wants_reply:
                    seat.stored(item.questions)
                    if not seat.gone:
                        self._say_request(seat, publish)
                else:
                    items.append(item)
                    size += item.weight
            gathered.popleft()
            self._leave_line(item)
            if items and items[-1].alone:
                break
        return items, said

    # --- what the leader says ----------------------------------------------------------------------

    def stored(self, lane_flag: int, number: int) -> None:
        """Everything up to that number is durable."""
        self._disk_full = 0.0
        if lane_flag == AGAIN:
            for shipment in self._again.stored(number):
                self._waited(shipment)
            self.retry()
            return
        for shipment in self._main.stored(number):
            for part in shipment.parts:
                for seat, publish, *_, questions in part.items:
                    seat.stored(questions)
                    if seat.gone:
                        continue
                    if publish.tickets is not None:
                        seat.port.delivered(publish.tickets)
                    if seat.finishing or seat.syncing:
                        self._may_finish(seat)
        self.send()

    def _waited(self, shipment: Shipment) -> None:
        """There was room for the first that waits of a connection."""
        ((seat, publish, *_),) = shipment.items()
        if not _is_first(seat, publish):
            return
        self._leave_first(seat, publish)
        if publish.tickets is not None and not seat.gone:
            seat.port.delivered(publish.tickets)
        self._released(seat)

    def _leave_first(self, seat: Seat, publish: Publish) -> None:
        seat.waiting.popleft()
        if seat.gone:
            self._left_weight = max(self._left_weight - weight_of(publish), 0)

    def _released(self, seat: Seat) -> None:
        if not seat.waiting:
            self._refused.pop(seat, None)
            seat.hold(Held.REFUSED, False)
            self._may_finish(seat)

    def told_of_disk(self, full: bool) -> None:
        """What the leader says of its disk, with a refusal that comes next. One for the sake of a full queue
        says nothing of it."""
        self._for_disk = full
        if full and not self._disk_full:
            self._disk_full = time.monotonic()

    def refused(
        self, lane_flag: int, number: int, fault: set[int], full: bool, never: bool, text: str
    ) -> None:
        """A shipment was not stored for the sake of some of its parts (none: nobody knows which), and none
        behind it. `never`: one of these is larger than its queue may be."""
        if lane_flag == AGAIN:
            for shipment in self._again.refused(number):
                self._refused_again(shipment, full, never, text)
            self.retry()
            return
        back = self._main.refused(number)
        if not back:
            return
        said = self._seating.take_back(number)
        first = back[0]
        if not fault and len(first.parts) == 1:
            fault = {0}
        if full:
            # What goes to a queue stays together, so that nothing overtakes what is before it.
            queues = {part.queue for at, part in enumerate(first.parts) if at in fault}
            fault = {at for at, part in enumerate(first.parts) if part.queue in queues or not queues}
        at_fault = [item for at in sorted(fault) if at < len(first.parts) for item in first.parts[at].items]
        others = [item for at, part in enumerate(first.parts) if at not in fault for item in part.items]
        if full:
            for item in at_fault:
                self._wait(item)
        elif len(at_fault) == 1:
            at_fault[0].seat.stored(at_fault[0].questions)
            self._drop(at_fault[0].seat, at_fault[0].publish, text)
        else:
            # One of them spoils it for all: each by itself is judged alone.
            others = [item._replace(alone=True) for item in (at_fault or others)] + (
                others if at_fault else []
            )
        others += [item for shipment in back[1:] for item in shipment.items()]
        behind, self._gathered = self._gathered, deque()
        for item in others:
            self._line_up(item)
        for settlement in said:
            if settlement.seat.gone:
                self._seating.forget(settlement)  # What it held has gone back with it.
            else:
                self._line_up(_settling(settlement))
        self._gathered += behind
        self.send()
        self.retry()

    def _wait(self, item: Item) -> None:
        seat = item.seat
        seat.stored(item.questions)
        if seat.gone:
            # It is kept, unless that is too much, or others wait for what this connection says behind it.
            if seat.gathered or self._left_weight > WINDOW_BYTES:
                _tell_lost(seat, item.publish)
                self._forget_gathered(seat)
                return
            self._left_weight += item.weight
        seat.waiting.append(item.publish)
        self._refused[seat] = None
        seat.hold(Held.REFUSED, True)
        self._full.add(item.publish.queue)

    def _forget_gathered(self, seat: Seat) -> None:
        """Something that it has sent may not be stored, and goes no further: nothing is settled behind it."""
        gathered, self._gathered = self._gathered, deque()
        for item in gathered:
            if item.seat is seat and isinstance(item, Words) and item.settlement is not None:
                self._leave_line(item)
                self._seating.forget(item.settlement)
            else:
                self._gathered.append(item)

    def _drop(self, seat: Seat, publish: Publish, text: str) -> None:
        seat.port.log(f"refused: {text}", len(publish.batch))
        if seat.gone:
            return
        if publish.tickets is not None:
            seat.port.undelivered(publish.tickets)
        else:
            seat.port.refused(len(publish.batch))
        if seat.finishing or seat.syncing:
            self._may_finish(seat)

    def _refused_again(self, shipment: Shipment, full: bool, never: bool, text: str) -> None:
        ((seat, publish, *_),) = shipment.items()
        # Who can be told no does not wait for a disk for ever.
        is_over = self._for_disk and self._disk_full < time.monotonic() - DISK_SECONDS
        if not _is_first(seat, publish):
            _tell_lost(seat, publish)
        elif never and len(publish.batch) > 1:
            seat.waiting.popleft()
            seat.waiting.extendleft(reversed(publish.halves()))
        elif full and not never and not (is_over and publish.tickets is not None):
            self._full.add(publish.queue)
        else:  # for good; one message that is more than its queue may ever have, too
            self._leave_first(seat, publish)
            self._drop(seat, publish, text)
            self._released(seat)

    # --- what waits for room -----------------------------------------------------------------------

    def tick(self) -> None:
        """Some times a second: there may be room; and requests do not wait for a leader for ever."""
        self._full.clear()
        if not self._refused:
            self._disk_full = 0.0  # Nobody waits, so nobody knows.
        self.retry()
        if self._link is None and any(map(_is_late, self._gathered)):
            gathered, self._gathered = self._gathered, deque()
            for item in gathered:
                if isinstance(item, Item) and _is_late(item):
                    self._leave_line(item)
                    item.seat.stored(item.questions)
                    self._drop(item.seat, item.publish, "there was no leader in time")
                else:
                    self._gathered.append(item)
            self._check_window()

    def retry(self) -> None:
        """Send the next that waits, of the connection whose turn it is."""
        link = self._link
        if link is None or self._again.sent:
            return
        for seat in list(self._refused):
            while seat.waiting and (isinstance(seat.waiting[0], Words) or seat.waiting[0].wants_reply):
                first = seat.waiting.popleft()
                if isinstance(first, Words):
                    self._say(first, link)
                elif not seat.gone:
                    self._say_request(seat, first)
            if not seat.waiting:
                self._released(seat)
            elif seat.waiting[0].queue not in self._full:
                del self._refused[seat]
                self._refused[seat] = None  # behind the others
                item = Item(seat, seat.waiting[0], weight=weight_of(seat.waiting[0]))
                link.write(self._again.ship([item]))
                return

    def _is_on_way(self, publish: Publish) -> bool:
        """Whether it is the one that waits for room and is being tried."""
        return any(item.publish is publish for shipment in self._again.sent for item in shipment.items())

    # --- the end -----------------------------------------------------------------------------------

    def take_all(self) -> tuple[list[tuple[int, Shipment]], list[Item]]:
        """Everything that is not known to be stored, in order: with a number in a lane, or without one."""
        numbered = [(lane.flag, shipment) for lane in (self._main, self._again) for shipment in lane.sent]
        others = [
            Item(seat, publish)
            for seat in self._refused
            for publish in seat.waiting
            if isinstance(publish, Publish) and not self._is_on_way(publish)
        ]
        others += [item for item in self._gathered if isinstance(item, Item)]
        for seat in [*self._held, *self._refused]:
            seat.waiting.clear()
            seat.hold(Held.WINDOW | Held.REFUSED, False)
        for lane in (self._main, self._again):
            lane.clear()
        self._gathered.clear()
        self._gathered_weight = 0
        self._held.clear()
        self._refused.clear()
        return numbered, others


def _is_first(seat: Seat, publish: Publish) -> bool:
    """Whether it still waits; not where its connection has left meanwhile."""
    return bool(seat.waiting) and seat.waiting[0] is publish


def _tell_lost(seat: Seat, publish: Publish) -> None:
    seat.port.log("left before there was room for what it had sent: not stored", len(publish.batch))


def _settling(settlement: Settlement) -> Words:
    """What outlives its link: the settlements alone. Demands are told anew, as they are by then."""
    seat = settlement.seat
    frame = encode_frame(Kind.WORDS, *pack_words(NO_NUMBER, settlement.commands), port=seat.number)
    return Words(seat, frame, settlement)


def _is_late(item: Item | Words) -> bool:
    """A request for whose answer nobody waits any more."""
    return isinstance(item, Item) and 0 < item.late <= time.monotonic()
