"""A key of Redis: a list or a stream.

    list      messages move, with `LMOVE` in one transaction, to a list beside it, KEY:penstock, with a new
              name for the batch in KEY:penstock:batch. What is there is on its way, for the next run too.
    stream    read as a consumer of a group, `penstock` unless the URL names one; what that consumer has
              pending is the batch on its way. Entries stay in the stream, acknowledged.

Both have identities: the name of the batch and the place in it, and the id of the entry. What the next run
has to know is kept in KEY:penstock:journal. One import from a key at a time.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from penstock.common.text import printable
from penstock.errors import Misuse
from penstock.importing.source import (
    ANSWER_SECONDS,
    BATCH_MAX,
    CONNECT_SECONDS,
    PASSWORD_VARIABLE,
    TLS,
    Away,
    Message,
    Place,
    Refuses,
    Source,
    choice,
    tls_of,
)

GROUP: Final = "penstock"
CONSUMER: Final = "penstock-import"


class Key(Source):
    keeps_records = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if len(place.path) < 2 or not place.path[0].isdigit():
            raise Misuse("redis://…: use redis://HOST:PORT/DB/KEY, as in redis://127.0.0.1:6379/0/jobs")
        self.key = self.queue = "/".join(place.path[1:])
        self.beside = f"{self.key}:penstock"
        group = place.options.get("group", GROUP)
        self._journal = f"{self.beside}:journal" + (f":{group}" if group != GROUP else "")
        self.pops = choice(place, "pop", "right", "left").upper()
        import redis  # here: an extra
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._errors: Any = redis.exceptions
        tls_of(place)  # for its errors: a file that cannot be used is a server that is away to the client
        options: dict[str, Any] = {"ssl": True, "ssl_check_hostname": True}
        for ours, theirs in zip(TLS, ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"), strict=True):
            options[theirs] = place.options.get(ours)
        self.redis: Any = redis.Redis(
            host=place.host,
            port=place.port or 6379,
            db=int(place.path[0]),
            username=place.user,
            password=place.password,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),  # done twice, a command would leave messages where nobody looks
            **(options if place.tls else {}),
        )
        self._shape: _List | _Stream | None = None

    @property
    def shape(self) -> "_List | _Stream":
        assert self._shape is not None, "it was not opened"
        return self._shape

    def open(self) -> None:
        with self._told():
            # An empty list is no key to Redis, and this one may have been emptied by us.
            kind = self.redis.type(self.key).decode()
            if kind == "none" and (self._shape or self.redis.exists(self.beside)):
                kind = "list"
            if kind == "none":
                raise Refuses(f"{self.name}: there is no such key, so nothing to import; look at DB and KEY")
            if kind not in ("list", "stream"):
                raise Refuses(f"{self.name}: this key is a {kind}; only a list or a stream can be imported")
            self._shape = _List(self) if kind == "list" else _Stream(self)

    def take(self, count: int) -> list[Message]:
        with self._told():
            return self.shape.take(count)

    def settle(self, messages: Sequence[Message]) -> None:
        with self._told():
            self.shape.settle(messages)

    def left(self) -> dict[str, int]:
        with self._told():
            return self.shape.left()

    def recall(self) -> bytes:
        with self._told():
            return self.redis.get(self._journal) or b""

    def remember(self, record: bytes) -> None:
        with self._told():
            if record:
                self.redis.set(self._journal, record)
            else:
                self.redis.delete(self._journal, f"{self.beside}:batch")

    def close(self) -> None:
        self.redis.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        errors = self._errors
        try:
            yield
        except (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError) as error:
            raise Refuses(
                f"{self.name}: Redis says {printable(str(error))}; give the password in {PASSWORD_VARIABLE}"
            ) from None
        except (errors.ConnectionError, errors.TimeoutError) as error:
            raise Away(f"{self.name}: {printable(str(error)).rstrip('.')}") from None
        except errors.RedisError as error:
            raise Refuses(f"{self.name}: Redis says {printable(str(error))}") from None


class _List:
    def __init__(self, key: Key) -> None:
        self._key = key
        self._is_resumed = False
        self._name = ""  # of the batch on its way

    def take(self, count: int) -> list[Message]:
        key, redis, kept = self._key, self._key.redis, f"{self._key.beside}:batch"
        if not self._is_resumed:  # what the last run, or connection, had on its way
            bodies = redis.lrange(key.beside, 0, -1)
            redis.setnx(kept, uuid.uuid4().hex)
            self._name = redis.get(kept).decode()
        if self._is_resumed or not bodies:
            self._name = uuid.uuid4().hex
            at_once = redis.pipeline(transaction=True)
            at_once.set(kept, self._name)
            for _ in range(count):
                at_once.lmove(key.key, key.beside, key.pops, "RIGHT")
            _, *moved = at_once.execute()
            bodies = [body for body in moved if body is not None]
        self._is_resumed = True
        return [Message(at, body, f"{self._name}/{at}") for at, body in enumerate(bodies)]

    def settle(self, messages: Sequence[Message]) -> None:
        """Take the batch away, if it is alone there."""
        kept = f"{self._key.beside}:batch"

        def delete(at_once: Any) -> None:
            if (at_once.get(kept) or b"").decode() != self._name:
                raise Refuses(
                    f"{self._key.name}: another import takes from this key, too; stop all but one, and start "
                    "that one again: what was on its way may come twice, and nothing is lost"
                )
            at_once.multi()
            at_once.delete(self._key.beside)

        self._key.redis.transaction(delete, kept)

    def left(self) -> dict[str, int]:
        redis = self._key.redis
        return {"ready": redis.llen(self._key.key), "taken": redis.llen(self._key.beside)}


class _Stream:
    def __init__(self, key: Key) -> None:
        self._key = key
        self._is_resumed = False
        options = key.place.options
        self._group = options.get("group", GROUP)
        self._body = options.get("body")
        claim = options.get("claim", "")
        if claim and not (claim.isdecimal() and "group" in options):
            raise Misuse("redis://…?claim=: use whole seconds, beside group=")
        self._claim_ms = int(claim) * 1000 if claim else None
        if "group" not in options:
            with suppress(key._errors.ResponseError):  # it is there already
                key.redis.xgroup_create(key.key, GROUP, "0")
                key.remember(b"")  # what an earlier stream of this name has left
        elif not any(row["name"].decode() == self._group for row in key.redis.xinfo_groups(key.key)):
            raise Refuses(f"{key.name}: this stream has no group {self._group!r}; see XINFO GROUPS")

    def take(self, count: int) -> list[Message]:
        entries = [] if self._is_resumed else self._read("0", BATCH_MAX)
        if not entries:
            self._is_resumed = True
            entries = self._read(">", count) or self._claimed(count)
        messages = [self._message(name.decode(), fields) for name, fields in entries if fields]
        if len(messages) < len(entries):  # deleted while they were pending
            self._ack([name for name, fields in entries if not fields])
        return messages

    def _read(self, after: str, count: int) -> list[Any]:
        key = self._key
        found = key.redis.xreadgroup(self._group, CONSUMER, {key.key: after}, count=count)
        # A list or a dict, as the version of the protocol has it.
        rows = next(iter(found.values()), [[]])[0] if isinstance(found, dict) else found and found[0][1]
        return rows or []

    def _claimed(self, count: int) -> list[Any]:
        """What other consumers of the group have pending for as long as the URL says."""
        if self._claim_ms is None:
            return []
        key = self._key
        _, entries, *_ = key.redis.xautoclaim(
            key.key, self._group, CONSUMER, self._claim_ms, "0-0", count=count
        )
        return list(entries)

    def _message(self, name: str, fields: dict[bytes, bytes]) -> Message:
        texts = {field.decode("utf-8", "backslashreplace"): value for field, value in fields.items()}
        if self._body is not None:
            if self._body not in texts:
                raise Refuses(f"{self._key.name}: entry {name} has no field {self._body!r}, only {[*texts]}")
            body = texts.pop(self._body)
            headers = {field: value.decode("utf-8", "backslashreplace") for field, value in texts.items()}
            return Message(name, body, name, headers=headers)
        if len(texts) == 1:
            return Message(name, next(iter(texts.values())), name)
        try:
            whole = {field: value.decode() for field, value in texts.items()}
        except UnicodeDecodeError:
            raise Refuses(
                f"{self._key.name}: entry {name} has several fields, and not all are text; name the one with "
                "the payload: ?body=FIELD"
            ) from None
        return Message(name, json.dumps(whole, ensure_ascii=False).encode(), name)

    def settle(self, messages: Sequence[Message]) -> None:
        self._ack([message.handle for message in messages])

    def _ack(self, names: Sequence[Any]) -> None:
        self._key.redis.xack(self._key.key, self._group, *names)

    def left(self) -> dict[str, int]:
        rows = self._key.redis.xinfo_groups(self._key.key)
        (row,) = [row for row in rows if row["name"].decode() == self._group]
        return {"ready": row.get("lag") or 0, "pending": row["pending"]}
