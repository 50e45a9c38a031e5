"""Rights: what a user of NATS must be allowed to do, and nothing else.

    rights_of_front_end(names)      subjects, each with what it is for
    rights_of_reader(names)         of who only reads the log
    user_block(…)                   the same as NATS reads it, for the `users` of a node's configuration
    lacking(rights, permissions)    those that a user does not have, by what the server says of it

Front-ends are answered under subjects of their own. Under `_INBOX`, where clients of NATS listen as a rule,
any other user of the account could hear what they are answered: the cluster's key too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.log.jetstream.names import LogNames

USER_INFO: Final = "$SYS.REQ.USER.INFO"


@dataclass(frozen=True, slots=True)
class Rights:
    publish: Mapping[str, str]  # subject, and what for
    subscribe: Mapping[str, str]

    def __or__(self, other: "Rights") -> "Rights":
        """What either of them has."""
        return Rights({**self.publish, **other.publish}, {**self.subscribe, **other.subscribe})


def rights_of_front_end(names: LogNames, shards: int = 1) -> Rights:
    state, key = names.state_stream, names.key_stream
    logs = names.of_shards(shards)
    publish = {
        USER_INFO: "what this user may do, so that a right left out is told at the start",
        "$JS.API.INFO": "what the account may store, at the start",
    }
    for stream in (*(log.stream for log in logs), state, key):
        publish[f"$JS.API.STREAM.INFO.{stream}"] = "whether it is there, its nodes, what it holds"
        publish[f"$JS.API.STREAM.CREATE.{stream}"] = "the first front-end makes it"
        publish[f"$JS.API.STREAM.MSG.GET.{stream}"] = "a record, as the stream's leader has it"
    publish.setdefault(f"$JS.API.STREAM.INFO.{names.stream}", "whether this cluster has one log")
    publish |= {
        **{
            f"$JS.API.DIRECT.GET.{log.stream}": "many records at once: the local copy of the log"
            for log in logs
        },
        f"$JS.API.DIRECT.GET.{state}": "who takes part",
        **{
            f"$JS.API.STREAM.PURGE.{log.stream}": "what retention and compaction have done with"
            for log in logs
        },
        f"$JS.API.STREAM.PURGE.{state}": "a front-end that has left",
        **{log.files: "every write of the log" for log in logs},
        names.state(">"): "the lease, and that this front-end is there",
        names.key: "the cluster's key, once",
    }
    return Rights(publish, {f"{names.answers}.>": "answers; nobody else may listen there"})


def rights_of_reader(names: LogNames, shards: int = 1) -> Rights:
    """Who reads messages straight from NATS, as Spark's executors do."""
    publish = {}
    for log in names.of_shards(shards):
        publish[f"$JS.API.DIRECT.GET.{log.stream}"] = "many records at once"
        publish[f"$JS.API.STREAM.MSG.GET.{log.stream}"] = "a record, as the stream's leader has it"
    return Rights(publish, {"_INBOX.>": "answers"})


def user_block(user: str, password: str, rights: Rights) -> str:
    """One of `users`."""
    lines = [f"{{ user: {user}, password: {password}, permissions: {{"]
    for way, subjects in (("publish", rights.publish), ("subscribe", rights.subscribe)):
        lines += [f"  {way}: [", *(f'    "{subject}"' for subject in subjects), "  ]"]
    return "".join(f"    {line}\n" for line in (*lines, "} }"))


def lacking(rights: Rights, permissions: Mapping[str, Any]) -> list[str]:
    """What of it a user may not do; `permissions` are the server's JSON: `Any`. None are all."""
    found = []
    for way, subjects in (("publish", rights.publish), ("subscribe", rights.subscribe)):
        said = permissions.get(way) or {}
        allow, deny = said.get("allow") or [">"], said.get("deny") or []
        found += [
            f"{way} {subject}"
            for subject in subjects
            if not any(_covers(it, subject) for it in allow) or any(_covers(it, subject) for it in deny)
        ]
    return found


def _covers(pattern: str, subject: str) -> bool:
    """Whether all that `subject` stands for is of `pattern`."""
    wanted = subject.split(".")
    for place, token in enumerate(pattern.split()[0].split(".")):  # behind a blank is a queue group
        if token == ">":
            return place < len(wanted)
        if place >= len(wanted) or (token != wanted[place] and (token != "*" or wanted[place] == ">")):
            return False
    return len(pattern.split()[0].split(".")) == len(wanted)
