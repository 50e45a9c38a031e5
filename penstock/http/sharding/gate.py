"""Gate: what comes to the API of a front-end in a cluster with several logs, and who answers it.

Each log that is led here has an application of its own, as a broker has that has one log (`site.py`,
`app.py`).

    about a queue     goes to the application of its log, here or at the front-end that leads it (`others.py`)
    backups           likewise: of a log that is asked for by number
    about all         is asked of all logs, wherever they are, and put together (`merging.py`)
    about readers     is asked of the logs that have their queues
    transactions      are of all logs that their queues are in (`transactions.py`)
    about this one    the engine, metrics: what this front-end leads and does
    about each        the audit, and metrics if wanted: what each does, with its name

Rules that always hold:
  * Who asks is known where the log is: a token goes with the request, and a visitor of a page by name, which
    is believed between front-ends alone.
  * Where a front-end does not answer, an answer about all is put together from the others, and names it
    (`missing`); so it is with a log that nobody leads, or not whoever was asked for it.

How it fails: `no-leader` (503), where nobody leads, or whoever does cannot be reached. Who is asked elsewhere
and leads that log no more is not waited for longer than `MOVED_SECONDS`: it may stand still.

The file is long because each way of answering begins with the same question: which logs, and where they are.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.control.frames import Fields
from penstock.http.api.broker import copies_of
from penstock.http.api.offsets import RANGES_MAX
from penstock.http.app import REFUSALS, App, Door, Reading, json_text, moved, segments_of, whence
from penstock.http.auth import USER, forbidden
from penstock.http.connection import CONNECTION
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.sharding import merging, streams
from penstock.http.sharding.logs import PATH as LOGS_PATH
from penstock.http.sharding.logs import ClusterLogs, no_leader
from penstock.http.sharding.others import (
    Answered,
    Asked,
    CutOff,
    Headers,
    Others,
    passed_headers,
    target_of,
    unanswered,
    unreachable,
)
from penstock.http.sharding.transactions import ShardedStages
from penstock.http.site import Site
from penstock.model.rights import Right, User
from penstock.model.shards import shard_of

HERE: Final = b"penstock-here"
"""A request of another front-end, which asks the others itself: about all that is led here, or about the
shard of that number."""

ALL: Final = b"all"
"""Numbers behind it say which shards are looked for there."""

THEIRS: Final = "penstock.theirs"
"""Whether another front-end has sent it on: then it goes no further."""

NAMED: Final = b"penstock-user"
"""Whom a front-end has recognised; nobody else is believed."""

LIST_SECONDS: Final = 2.0
"""How long another front-end may take for its part of an answer that changes nothing."""

MOVED_SECONDS: Final = 1.0
"""How long who has led a log, and does not any more, may take to answer what it was asked before."""

OWN: Final = frozenset({"/", "/healthz", "/openapi.json"})
UNSHARDED: Final = frozenset({"/v1/folder"})
"""What a cluster with several logs does not have (yet)."""

_NUMBER: Final = re.compile(r"[0-9]{1,18}", re.ASCII)

Source = Callable[[Asked], Awaitable[Answered]]

log = logging.getLogger("penstock.http")


class Gate:
    """An ASGI application."""

    def __init__(self, base: Site, own: App, others: Others) -> None:
        """`base` and `own` answer what is about no log."""
        self._base = base
        self._own = own
        self._others = others
        self.door: Door | None = None
        self._apps: dict[int, App] = {}  # by shard: those that are led here
        self._leaders: list[str] = []
        self._member = ""
        self.logs = ClusterLogs(base, others, self._asking)
        base.transactions = ShardedStages(self.logs)
        self._away: dict[asyncio.Timeout, tuple[int | None, str]] = {}  # shard and leader, see `_asking`

    def set_shards(self, sharding: Fields, apps: dict[int, App], sites: dict[int, Site]) -> None:
        """Who leads what, from now on."""
        self._leaders = sharding["leaders"]
        self._member = sharding["own"]
        self._apps = apps
        self.logs.set_shards(self._leaders, self._member, sites)
        late = asyncio.get_running_loop().time() + MOVED_SECONDS
        for patience, (shard, leader) in self._away.items():
            leads = leader in self._leaders if shard is None else self._leaders[shard] == leader
            if leads is not (patience.when() is None) and not patience.expired():
                patience.reschedule(None if leads else late)

    async def stop(self) -> None:
        await self.logs.doubts.stop()

    @contextlib.asynccontextmanager
    async def _asking(self, leader: str, method: str, shard: int | None = None) -> AsyncIterator[None]:
        """While another front-end is asked about a log that it leads, or about all that it leads."""
        patience = asyncio.timeout(None)
        try:
            async with patience:
                self._away[patience] = shard, leader
                yield
        except TimeoutError:
            if not patience.expired():
                raise
            raise unanswered(leader, method, "it leads no more") from None
        finally:
            self._away.pop(patience, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.door is not None and self.door.takes(scope):
            await self.door(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        scope = self._believed(scope)
        try:
            await self._route(scope, receive, send)
        except ClientDisconnect:
            return
        except Problem as problem:
            await problem.response()(scope, receive, send)
        except CutOff as cut:
            log.debug("an answer was cut off: %s", cut)
            if (connection := scope.get(CONNECTION)) is not None:
                connection.transport.abort()  # An answer without an end: the caller can tell.
                await asyncio.wait([connection.lost], timeout=1)

    def _believed(self, scope: Scope) -> Scope:
        """With what another front-end says of a request; the same words of anybody else go."""
        connection = scope.get(CONNECTION)
        is_theirs = connection is not None and connection.is_handed_over
        said = next((value for name, value in scope["headers"] if name == NAMED), None)
        wanted = {HERE} if is_theirs else set()
        headers = [it for it in scope["headers"] if it[0] not in (HERE, NAMED) or it[0] in wanted]
        scope = {**scope, "headers": headers, THEIRS: is_theirs}
        if is_theirs and said is not None:
            scope[USER] = partial(self._base.guard.named, unquote_to_bytes(said).decode())
        return scope

    # --- who answers -----------------------------------------------------------------------------

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # As the applications read it: what they find at an address must be what was looked for here.
        parts = segments_of(scope["raw_path"])
        path = "/" + "/".join(parts)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        here = next((value for name, value in scope["headers"] if name == HERE), ALL)
        if here.isdigit():
            await self._to_shard(int(here), scope, receive, send)
        elif len(parts) > 2 and parts[:2] == ["v1", "queues"]:
            await self._to_shard(self._shard(parts[2]), scope, receive, send)
        elif parts[:2] == ["v1", "backup"] and (shard := self._named_shard(scope)) is not None:
            await self._to_shard(shard, scope, receive, send)
        elif path in OWN:
            await self._own(scope, receive, send)
        elif path in UNSHARDED:
            raise Problem(
                "not-found",  # as of who does not have it: Spark asks for rows over HTTP then
                f"{path} is about one log, and this cluster has {len(self._leaders)} (cluster.shards); "
                f"ask for one queue after the other",
            )
        elif (method, path) in merging.MERGED:
            await self._everywhere(merging.MERGED[method, path], self._sources(scope), scope, receive, send)
        elif path == "/v1/events" and method == scope["method"]:
            await self._identify(scope)
            await streams.events(self._all(scope), scope, receive, send)
        elif path == "/v1/search" and method == scope["method"]:
            await self._identify(scope)
            await streams.search(self._all(scope), scope, receive, send)
        elif path == "/metrics" and not scope[THEIRS] and _wants_all(scope):
            await self._metrics_of_all(scope, receive, send)
        elif path in ("/metrics", "/readyz", "/v1/engine"):
            await self._about_here(path, scope, receive, send)
        elif path == "/v1/audit" and not scope[THEIRS] and method == "GET":
            await self._audit(scope, receive, send)
        elif parts[:2] == ["v1", "connections"]:
            await self._connections(parts, scope, receive, send)
        elif parts[:2] == ["v1", "readers"]:
            await self._reader(scope, receive, send)
        elif path == "/v1/marks":  # A new one: what is about no queue is with the first log.
            await self._to_shard(0, scope, receive, send)
        elif path == "/v1/cuts":
            await self._cuts(scope, receive, send)
        elif path == "/v1/stages":
            await self._stage(scope, receive, send)
        elif path == LOGS_PATH and scope[THEIRS]:
            await self.logs.answer(scope, receive, send)
        else:
            await self._own(scope, receive, send)

    def _shard(self, name: str) -> int:
        try:
            return shard_of(name, len(self._leaders))
        except UnicodeEncodeError:
            return 0  # No queue is called so, as whoever leads it says.

    def _named_shard(self, scope: Scope) -> int | None:
        """The one that a query names, or else the first; None where there is none, as is said then."""
        said = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("shard", "0")
        shard = int(said) if _NUMBER.fullmatch(said) else len(self._leaders)
        return shard if shard < len(self._leaders) else None

    async def _to_shard(self, shard: int, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._apps.get(shard)
        if app is not None:
            await app(scope, receive, send)
            return
        await self._pass_on(self._leader(shard, scope), shard, scope, receive, send)

    async def _pass_on(
        self, leader: str, shard: int | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = self._with_user(scope, passed_headers(scope["headers"]))
        begun = False

        async def passed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            async with self._asking(leader, scope["method"], shard):
                await self._others.pass_on(leader, _caller(scope), headers, scope, receive, passed)
        except Problem as problem:
            if begun:
                raise CutOff(problem.detail) from None
            raise

    def _leader(self, shard: int, scope: Scope) -> str:
        """Who is to be asked about a shard that is led elsewhere."""
        if scope[THEIRS]:
            raise moved()
        leader = self._leaders[shard]
        if not leader or leader == self._member:
            raise no_leader(shard)
        return leader

    def _with_user(self, scope: Scope, headers: Headers) -> Headers:
        within = scope.get(USER)
        user = within() if within is not None else None
        if user is None:
            return headers
        return [
            *((name, value) for name, value in headers if name != b"authorization"),
            (NAMED, _quoted(user.name)),
        ]

    def _all(self, scope: Scope) -> list[ASGIApp]:
        """Who answers about each shard."""
        return [partial(self._one, shard) for shard in range(len(self._leaders))]

    async def _one(self, shard: int, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*scope["headers"], (HERE, b"%d" % shard)]
        try:
            await self._to_shard(shard, {**scope, "headers": headers}, receive, send)
        except Problem as problem:
            await problem.response()(scope, receive, send)

    def _sources(self, scope: Scope) -> dict[str, Source]:
        """All who have a part of the answer, by what they are called: logs, and other front-ends."""
        sources: dict[str, Source] = {}
        theirs: dict[str, list[int]] = {}
        for shard in self._looked_for(scope):
            app = self._apps.get(shard)
            if app is not None:
                sources[f"shard {shard}"] = _local(app, scope)
            elif scope[THEIRS] or (leader := self._leaders[shard]) in ("", self._member):
                sources[f"shard {shard}"] = _not_led
            else:
                theirs.setdefault(leader, []).append(shard)
        for leader, shards in theirs.items():
            sources[leader] = self._remote(leader, scope, b"%b %b" % (ALL, json.dumps(shards).encode()))
        return sources

    def _looked_for(self, scope: Scope) -> Iterable[int]:
        here = next((value for name, value in scope["headers"] if name == HERE), ALL)
        shards: list[int] = json.loads(here.partition(b" ")[2] or b"[]")
        return shards or range(len(self._leaders))

    def _remote(self, leader: str, scope: Scope, here: bytes = ALL) -> Source:
        async def ask(asked: Asked) -> Answered:
            headers = self._with_user(scope, passed_headers(asked.headers))
            try:
                async with (
                    self._asking(leader, asked.method),
                    asyncio.timeout(LIST_SECONDS if asked.method == "GET" else None),
                ):
                    return await self._others.ask(
                        leader, _caller(scope), asked._replace(headers=[*headers, (HERE, here)])
                    )
            except TimeoutError:
                raise unreachable(leader, f"it has not answered for {LIST_SECONDS:.0f} s") from None

        return ask

    @contextlib.asynccontextmanager
    async def _asked(self, scope: Scope, receive: Receive) -> AsyncIterator[Asked]:
        """A request that is answered from here, by somebody who is known; its body counts as long."""
        await self._identify(scope)
        reading = Reading(self._base, Request(scope, receive))
        try:
            body = await reading.body()
            headers = [it for it in passed_headers(scope["headers"]) if it[0] != b"content-length"]
            # The server leaves out the body of an answer to HEAD.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            yield Asked(method, target_of(scope), headers, body)
        finally:
            reading.let_go()

    async def _identify(self, scope: Scope) -> User:
        try:
            return await self._own.identify(Request(scope))
        except Problem as problem:
            if problem.name in REFUSALS:
                act = f"{scope['method'][:10]} /{'/'.join(segments_of(scope['raw_path'])[:2])[:50]}"
                self._base.auditing.refused(**whence(scope, ""), act=act, queue="", result=problem.name)
            raise

    # --- about all -------------------------------------------------------------------------------

    async def _everywhere(
        self,
        merge: merging.Merge,
        sources: dict[str, Source],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        async with self._asked(scope, receive) as asked:
            found, missing, refused = await _ask_all(sources, asked)
        if refused is not None:
            await _as_it_is(refused)(scope, receive, send)
            return
        if not found:
            raise _nobody()
        told: list[Fields] = [json.loads(it.body) for it in found.values()]
        for it in told:
            missing += it.pop("missing", [])
        fields = merge(told, dict(parse_qsl(scope["query_string"].decode("latin-1"))))
        if missing:
            fields["missing"] = missing
        await _json(fields)(scope, receive, send)

    async def _about_here(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """What this front-end says of itself."""
        if path == "/readyz":
            orphans = [shard for shard, leader in enumerate(self._leaders) if not leader]
            if orphans or not self._leaders:
                raise Problem("no-leader", f"nobody leads shards {', '.join(map(str, orphans))}")
        apps = [self._apps[shard] for shard in sorted(self._apps)]
        if not apps:
            await self._leading_nothing(path, scope, receive, send)
            return
        asked = Asked("GET", target_of(scope), passed_headers(scope["headers"]))
        if scope["method"] not in ("GET", "HEAD"):  # It says that this is not offered.
            await apps[0](scope, receive, send)
            return
        answers = [await _local(app, scope)(asked) for app in apps]
        worst = max(answers, key=lambda it: it.status)
        if worst.status >= 400 or path == "/readyz":
            await _as_it_is(worst)(scope, receive, send)
        elif path == "/metrics":
            await _as_it_is(answers[0]._replace(body=_metrics([it.body for it in answers])))(
                scope, receive, send
            )
        else:
            await _json(merging.engine([json.loads(it.body) for it in answers], {}))(scope, receive, send)

    async def _leading_nothing(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path == "/readyz":
            cluster = await self._cluster()
            copies = copies_of(cluster) if cluster is not None else []
            await _json({"ready": True, "role": "follower", "copies": copies})(scope, receive, send)
            return
        if path == "/v1/engine":  # What is said of the cluster is the same everywhere.
            leader = next((it for it in self._leaders if it not in ("", self._member)), None)
            if leader is None or scope[THEIRS]:
                raise Problem("no-leader", "no front-end leads anything; try again in a second")
            await self._pass_on(leader, None, scope, receive, send)
            return
        user = await self._identify(scope)
        if not user.may_some(Right.READ):
            raise forbidden(user, Right.READ, None)
        # Nothing is counted here: what is led elsewhere is told there, and once.
        await Response(b"", media_type="text/plain")(scope, receive, send)

    # --- about each front-end --------------------------------------------------------------------

    async def _cluster(self) -> Fields | None:
        """What is known here of all front-ends; None: the first process does not say."""
        try:
            told = await self._base.link.call("cluster", seconds=LIST_SECONDS)
        except CallRefused:
            return None
        cluster: Fields | None = told.fields["cluster"]
        return cluster

    async def _of_each(
        self, here: Source, members: Iterable[str], scope: Scope, asked: Asked
    ) -> tuple[dict[str, Answered], list[str], Answered | None]:
        """What each front-end answers, who does not, and the first that says no."""
        sources = {it: here if it == self._member else self._remote(it, scope) for it in sorted(members)}
        return await _ask_all(sources, asked)

    async def _audit(self, scope: Scope, receive: Receive, send: Send) -> None:
        cluster = await self._cluster()
        members = {it["id"] for it in cluster["members"]} if cluster is not None else {self._member}
        async with self._asked(scope, receive) as asked:
            found, missing, refused = await self._of_each(_local(self._own, scope), members, scope, asked)
        if refused is not None or not found:
            await _as_it_is(refused or await _local(self._own, scope)(asked))(scope, receive, send)
            return
        lines = {name: json.loads(answer.body) for name, answer in found.items()}
        fields = merging.audit(lines, dict(parse_qsl(scope["query_string"].decode("latin-1"))))
        if missing:
            fields["missing"] = missing
        await _json(fields)(scope, receive, send)

    async def _metrics_of_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Each sample with the name of its front-end. Who leads nothing has none."""

        async def here(asked: Asked) -> Answered:
            answers = [await _local(self._apps[it], scope)(asked) for it in sorted(self._apps)]
            worst = max(answers, key=lambda it: it.status, default=Answered(503, [], b""))
            if worst.status < 300:
                worst = worst._replace(body=_metrics([it.body for it in answers]))
            return worst

        async with self._asked(scope, receive) as asked:
            its = asked._replace(target=b"/metrics")
            found, missing, refused = await self._of_each(here, {*self._leaders} - {""}, scope, its)
        if refused is not None:
            await _as_it_is(refused)(scope, receive, send)
            return
        if not found:
            raise _nobody()
        up = [b"# HELP penstock_front_end_up Whether a front-end that leads something has answered.\n"]
        up.append(b"# TYPE penstock_front_end_up gauge\n")
        for name in sorted([*found, *missing]):
            up.append(merging.labelled(b"penstock_front_end_up %d.0" % (name in found), name) + b"\n")
        texts = [merging.labelled(answer.body, name) for name, answer in found.items()]
        body = b"".join(up) + _metrics(texts)
        await _as_it_is(next(iter(found.values()))._replace(body=body))(scope, receive, send)

    # --- connections: numbered by their brokers, which are those of shards -------------------------

    async def _connections(self, parts: list[str], scope: Scope, receive: Receive, send: Send) -> None:
        count = len(self._leaders)
        if len(parts) > 2:
            if len(parts) > 3 or not _NUMBER.fullmatch(parts[2]):
                await self._own(scope, receive, send)  # It says why not.
                return
            number, shard = divmod(int(parts[2]), count)
            app = self._apps.get(shard)
            if app is None:  # Another front-end has numbered it.
                await self._to_shard(shard, scope, receive, send)
                return
            raw = b"/v1/connections/%d" % number
            scope = {**scope, "raw_path": raw, "path": raw.decode()}
            async with self._asked(scope, receive) as asked:
                answer = await _local(app, scope)(asked)
            if answer.status == 200:
                fields = json.loads(answer.body)
                fields["number"] = fields["number"] * count + shard
                await _json(fields)(scope, receive, send)
            else:
                await _as_it_is(answer)(scope, receive, send)
            return
        sources = self._sources(scope)

        def numbered(name: str, ask: Source) -> Source:
            async def of_all(asked: Asked) -> Answered:
                answer = await ask(asked)
                if answer.status != 200 or not name.startswith("shard "):
                    return answer  # Another front-end has numbered them.
                shard = int(name.removeprefix("shard "))
                its = json.loads(answer.body)
                for row in its["connections"]:
                    row["number"] = row["number"] * count + shard
                return answer._replace(body=json.dumps(its).encode())

            return of_all

        await self._everywhere(
            merging.put_together("connections"),
            {name: numbered(name, ask) for name, ask in sources.items()},
            scope,
            receive,
            send,
        )

    # --- readers, cuts: of several queues ----------------------------------------------------------

    async def _reader(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._asked(scope, receive) as asked:
            given = _fields(asked) if asked.method == "PUT" else {}
            positions = given.get("positions")
            if isinstance(positions, dict) and positions:
                by_shard: dict[int, dict[str, Any]] = {}
                for queue, position in positions.items():
                    by_shard.setdefault(self._shard(queue), {})[queue] = position
                parts = {shard: {**given, "positions": its} for shard, its in by_shard.items()}
                answers = await self._ask_parts(parts, asked, scope)
            else:
                positions = None
                answers = await asyncio.gather(*(it(asked) for it in self._sources(scope).values()))
        if not answers:
            raise _nobody()
        good = [it for it in answers if it.status < 300]
        # A log that has none of its queues does not know the reader.
        bad = [it for it in answers if it.status >= 300 and (it.status != 404 or positions is not None)]
        if bad or not good:
            await _as_it_is((bad or answers)[0])(scope, receive, send)
        elif good[0].status == 204:
            await Response(status_code=204)(scope, receive, send)
        else:
            await _json(merging.reader_of([json.loads(it.body) for it in good]))(scope, receive, send)

    def _source(self, shard: int, scope: Scope) -> Source:
        """Who answers about that log."""
        app = self._apps.get(shard)
        if app is not None:
            return _local(app, scope)
        return self._remote(self._leader(shard, scope), scope, b"%d" % shard)

    async def _ask_parts(self, parts: Mapping[int, Fields], asked: Asked, scope: Scope) -> list[Answered]:
        """What each log says to its part of a request, all at once. Where one is led by nobody, the others
        are asked all the same: a reader holds there what it held."""

        async def ask(shard: int, part: Fields) -> Answered:
            return await self._source(shard, scope)(asked._replace(body=json.dumps(part).encode()))

        answers = await asyncio.gather(*map(ask, parts, parts.values()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, Answered)]

    async def _cuts(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._asked(scope, receive) as asked:
            given = _fields(asked)
            ranges = given.get("ranges")
            is_list = isinstance(ranges, list) and 0 < len(ranges) <= RANGES_MAX
            if ranges is None or not is_list or not all(map(_names_a_queue, ranges)):
                await _as_it_is(await _local(self._own, scope)(asked))(scope, receive, send)  # why not
                return
            found: list[Any] = [None] * len(ranges)
            by_shard: dict[int, list[int]] = {}
            for at, wanted in enumerate(ranges):
                by_shard.setdefault(self._shard(wanted["queue"]), []).append(at)
            parts = {
                shard: {**given, "ranges": [ranges[at] for at in places]}
                for shard, places in by_shard.items()
            }
            answers = await self._ask_parts(parts, asked, scope)
            for answer, places in zip(answers, by_shard.values(), strict=True):
                if answer.status != 200:
                    await _as_it_is(answer)(scope, receive, send)
                    return
                for at, row in zip(places, json.loads(answer.body)["ranges"], strict=True):
                    found[at] = row
        await _json({"ranges": found})(scope, receive, send)

    async def _stage(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One for a queue goes where that is; of others, each message says where it goes."""
        queue = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("queue")
        if queue is None:
            await self._own(scope, receive, send)
        else:
            await self._to_shard(self._shard(queue), scope, receive, send)


# --- asking ------------------------------------------------------------------------------------------


def _nobody() -> Problem:
    return Problem(
        "no-leader",
        "no front-end that leads anything can be reached; try again in a second",
        headers={"Retry-After": "1"},
    )


def _wants_all(scope: Scope) -> bool:
    said = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("all")
    return said in ("true", "1") and scope["method"] in ("GET", "HEAD")


def _fields(asked: Asked) -> Fields:
    """What a body says; nothing where it is none, which the routes know how to refuse."""
    try:
        given = json.loads(asked.body)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _names_a_queue(wanted: object) -> bool:
    return isinstance(wanted, dict) and isinstance(wanted.get("queue"), str)


def _local(app: App, scope: Scope) -> Source:
    """An application of this process."""

    async def ask(asked: Asked) -> Answered:
        raw, _, query = asked.target.partition(b"?")
        its = {
            **scope,
            "method": asked.method,
            "raw_path": raw,
            "path": raw.decode("latin-1"),
            "query_string": query,
            "headers": [*asked.headers, (b"content-length", str(len(asked.body)).encode())]
            if asked.body
            else asked.headers,
        }
        its.pop(CONNECTION, None)
        body: bytes | None = asked.body
        status, headers, parts = 500, [], []
        never = asyncio.get_running_loop().create_future()

        async def receive() -> Message:
            nonlocal body
            if body is None:
                await never
            said, body = body, None
            return {"type": "http.request", "body": said, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message["headers"])
            else:
                parts.append(message.get("body", b""))

        await app(its, receive, send)
        return Answered(status, headers, b"".join(parts))

    return ask


async def _not_led(_: Asked) -> Answered:
    raise moved()


async def _ask_all(
    sources: dict[str, Source], asked: Asked
) -> tuple[dict[str, Answered], list[str], Answered | None]:
    """What they say, who does not answer, and the first who says no."""
    answers = await asyncio.gather(*(it(asked) for it in sources.values()), return_exceptions=True)
    found: dict[str, Answered] = {}
    missing: list[str] = []
    for name, answer in zip(sources, answers, strict=True):
        if isinstance(answer, Problem) or (isinstance(answer, Answered) and answer.status == 503):
            missing.append(name)
        elif isinstance(answer, BaseException):
            raise answer
        elif answer.status >= 300:
            return {}, [], answer
        else:
            found[name] = answer
    return found, missing, None


def _metrics(texts: Sequence[bytes]) -> bytes:
    """Of several logs of one front-end: samples of a name side by side; of one that is there twice, counters
    and histograms add up, and of anything else the largest is told."""
    heads: dict[str, list[str]] = {}
    values: dict[str, dict[str, float]] = {}
    name = ""
    adds_up: dict[str, bool] = {}
    for line in b"\n".join(texts).decode().splitlines():
        if line.startswith("# "):
            _, what, name, said = line.split(" ", 3)
            if what == "TYPE":
                adds_up[name] = said in ("counter", "histogram")
            head = heads.setdefault(name, [])
            if line not in head:
                head.append(line)
        elif line:
            sample, _, value = line.rpartition(" ")
            its = values.setdefault(name, {})
            before, more = its.get(sample, 0.0), float(value)
            its[sample] = before + more if adds_up.get(name) else max(before, more)
    lines = []
    for name, head in heads.items():
        lines += head
        lines += [f"{sample} {value!r}" for sample, value in values.get(name, {}).items()]
    return ("\n".join(lines) + "\n").encode()


def _json(fields: Fields) -> Response:
    return JSONResponse(fields) if not fields else Response(json_text(fields), media_type="application/json")


def _as_it_is(answer: Answered) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = [
        it for it in answer.headers if it[0] not in (b"content-length", b"date", b"server")
    ]
    response.raw_headers.append((b"content-length", str(len(answer.body)).encode()))
    return response


def _caller(scope: Scope) -> str:
    client = scope["client"]
    return f"{client[0]}:{client[1]}" if client else ""


def _quoted(text: str) -> bytes:
    return quote(text, safe="", errors="replace").encode()
