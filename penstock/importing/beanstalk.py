"""A tube of beanstalkd: jobs are reserved, and deleted when they are stored.

Its protocol is a few lines of text, so that nothing has to be installed. A job is known by its number. A
server without a binlog counts from 1 again when it is restarted, and then the server's own id, which is new
then, is part of the identity.

Ready jobs come first, as the server orders them. Then delayed ones, with what is left of their delay; one
that was in hand when an import was killed is ready there. Buried ones are left, unless `?buried=take`. While
Penstock has no room, jobs are touched, so that their time to run does not end and nobody else gets them.
"""

import re
import socket
from collections.abc import Sequence
from typing import Final

from penstock.errors import Misuse
from penstock.importing.source import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    Message,
    Place,
    Refuses,
    Source,
    choice,
    log,
    told,
)

PORT: Final = 11300
STATES: Final = ("ready", "reserved", "delayed", "buried")


class Beanstalk(Source):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if len(place.path) != 1 or place.tls:
            raise Misuse("beanstalk://…: use beanstalk://HOST:PORT/TUBE")
        self._tube = place.path[0]
        self._rooms = ["delayed"] + ["buried"] * (choice(place, "buried", "leave", "take") == "take")
        self._socket: socket.socket | None = None
        self._was_open = False

    def open(self) -> None:
        with told(self.name, (OSError,)):
            self._socket = socket.create_connection(
                (self.place.host, self.place.port or PORT), CONNECT_SECONDS
            )
            self._file = self._socket.makefile("rb")
        about = self._facts("stats")
        if "id" not in about:
            raise Refuses(f"{self.name}: this is no answer of a beanstalkd; is this the right port?")
        self._socket.settimeout(ANSWER_SECONDS)
        self._era = about["id"] if about.get("binlog-current-index", "0") == "0" else ""
        if not self._was_open and not self.left():
            raise Refuses(f"{self.name}: there is no tube of this name, and so no job in it")
        self._was_open = True  # an empty tube is none to the server
        self._ask(f"watch {self._tube}")
        if self._tube != "default":
            self._ask("ignore default")

    def take(self, count: int) -> list[Message]:
        self._say("reserve-with-timeout 0\r\n" * count)
        jobs = [self._hear() for _ in range(count)]
        messages = [self._message(words[1], body) for words, body in jobs if words[0] == "RESERVED"]
        while len(messages) < count and (message := self._out_of_turn()):
            messages.append(message)
        return messages

    def _out_of_turn(self) -> Message | None:
        """The next delayed or buried job, reserved by its number."""
        self._ask(f"use {self._tube}")
        for room in self._rooms:
            words, body = self._ask(f"peek-{room}")
            if words[0] == "FOUND":
                seconds = int(self._facts(f"stats-job {words[1]}").get("time-left", 0))
                if self._ask(f"reserve-job {words[1]}")[0][0] == "RESERVED":
                    return self._message(words[1], body, seconds if room == "delayed" else None)
        return None

    def _message(self, number: str, body: bytes, delay: int | None = None) -> Message:
        return Message(number, body, f"{self._era}:{number}", delay=delay)

    def settle(self, messages: Sequence[Message]) -> None:
        self._say("".join(f"delete {message.handle}\r\n" for message in messages))
        gone = [self._hear()[0][0] for _ in messages].count("NOT_FOUND")
        if gone:
            log.warning("%s: %d jobs are stored here, and somebody else has them there, too", self.name, gone)

    def keep(self, messages: Sequence[Message]) -> None:
        self._say("".join(f"touch {message.handle}\r\n" for message in messages))
        for _ in messages:
            self._hear()

    def left(self) -> dict[str, int]:
        facts = self._facts(f"stats-tube {self._tube}")
        return {state: int(facts[f"current-jobs-{state}"]) for state in STATES} if facts else {}

    def close(self) -> None:
        if self._socket is not None:
            self._file.close()
            self._socket.close()
            self._socket = None

    # --- the protocol ------------------------------------------------------------------------------

    def _facts(self, question: str) -> dict[str, str]:
        text = self._ask(question)[1].decode()
        return dict(re.findall(r'^([\w-]+): "?(.*?)"?$', text, re.MULTILINE))

    def _ask(self, command: str) -> tuple[list[str], bytes]:
        self._say(f"{command}\r\n")
        return self._hear()

    def _say(self, commands: str) -> None:
        with told(self.name, (OSError,)):
            assert self._socket is not None
            self._socket.sendall(commands.encode())

    def _hear(self) -> tuple[list[str], bytes]:
        """An answer: its words, and the body that follows where the last of them is its length."""
        with told(self.name, (OSError,)):
            line = self._file.readline()
            if not line:
                raise ConnectionError("it has closed the connection")
            words = line.decode("ascii", "replace").split() or [""]
            body = b""
            if words[0] in ("RESERVED", "FOUND", "OK") and words[-1].isdigit():
                length = int(words[-1])
                body = self._file.read(length + 2)[:length]
                if len(body) < length:
                    raise ConnectionError("it has closed the connection")
        if words[0] in ("BAD_FORMAT", "UNKNOWN_COMMAND", "INTERNAL_ERROR", "OUT_OF_MEMORY"):
            raise Refuses(f"{self.name}: the server says {words[0]}; is this beanstalkd 1.12 or newer?")
        return words, body
