"""What callers can make the second process hold: slow bodies, bodies of all together, connections."""

import contextlib
import http.client
import socket

from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import WAIT_SECONDS, Wire, rq, until

KIB = 1 << 10


def begun(port: int, announced: int, said: int) -> Wire:
    """A request whose body is on its way: so many bytes of it."""
    wire = Wire(("127.0.0.1", port))
    head = f"POST /v1/queues/q/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: {announced}\r\n\r\n"
    wire.say(head.encode(), bytes(said))
    return wire


def answer(wire: Wire) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(wire.socket)
    response.begin()
    return response.status, response.read()


def held_bytes(api: Api) -> int:
    return int(api.get("/v1/engine")["memory"]["held_bytes"])


def test_the_rest_of_a_body_has_to_come(start_broker: StartBroker) -> None:
    broker = start_broker("--limits-frame-seconds", "1")
    wire = begun(broker.ports["http"], 100, 50)
    status, body = answer(wire)
    assert status == 408
    assert b"urn:penstock:request-timeout" in body
    assert b"the limit of [limits] frame-seconds" in body
    assert wire.is_closed()
    wire.close()
    with Api(broker.ports["http"]) as api:
        assert api.ask("POST", "/v1/queues/q/messages", b"whole").status == 200
        assert api.get("/v1/queues/q")["offset_end"] == 1


def test_bodies_of_all_requests_together_are_bounded(start_broker: StartBroker) -> None:
    broker = start_broker("--http-bodies-bytes-max", str(400 * KIB), "--http-body-bytes-max", str(300 * KIB))
    port = broker.ports["http"]
    crowd = [begun(port, 200 * KIB, 150 * KIB) for _ in range(2)]

    def is_refused() -> bool:
        with Api(port) as api:
            reply = api.ask("POST", "/v1/queues/q/messages", bytes(200 * KIB))
            assert reply.status in (200, 503), reply
            return reply.status == 503

    until(is_refused, "the bodies that are on their way to count")
    with Api(port) as api:
        assert api.ask("POST", "/v1/queues/small/messages", bytes(KIB)).status == 200  # It fits beside them.
        reply = api.ask("POST", "/v1/queues/q/messages", bytes(200 * KIB))
        assert reply.problem == "unavailable"
        assert reply.headers["retry-after"] == "1"
    for wire in crowd:
        wire.say(bytes(50 * KIB))
        assert answer(wire)[0] == 200
        wire.close()
    until(lambda: not is_refused(), "their room to be given back")


def test_who_is_refused_for_another_hears_it_however_much_it_sends(start_broker: StartBroker) -> None:
    """More than sockets take: who is still sending does not listen."""
    broker = start_broker("--http-bodies-bytes-max", str(16 << 20), "--http-body-bytes-max", str(16 << 20))
    port = broker.ports["http"]

    def one_is_refused() -> bool:
        slow = begun(port, 16 << 20, 12 << 20)
        with Api(port) as api:
            statuses = [api.ask("POST", "/v1/queues/q/messages", bytes(15 << 20)).status]
        slow.say(bytes(4 << 20))
        statuses.append(answer(slow)[0])
        slow.close()
        assert sorted(statuses) in ([200, 200], [200, 503])
        return 503 in statuses

    for _ in range(3):
        until(one_is_refused, "the two bodies to meet")


def test_bodies_are_in_the_one_account_of_memory(start_broker: StartBroker) -> None:
    broker = start_broker("--limits-memory-bytes-max", str(1 << 20))
    port = broker.ports["http"]
    with Api(port) as api:
        first = begun(port, 900 * KIB, 800 * KIB)
        until(lambda: held_bytes(api) == 800 * KIB, "the first body to be in the account")
        assert "penstock_memory_held_bytes 819200.0" in api.ask("GET", "/metrics").body.decode()
        second = begun(port, 600 * KIB, 500 * KIB)
        # Neither says more, and nobody has to wait for frame-seconds.
        until(lambda: held_bytes(api) == 0, "both to be let go")
        for wire in (first, second):
            response = http.client.HTTPResponse(wire.socket)
            wire.say(bytes(100 * KIB))  # Who is refused hears it when it has said all.
            response.begin()
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert b"at the limit of [limits] memory-bytes-max" in response.read()
            wire.close()
        assert api.ask("POST", "/v1/queues/q/messages", bytes(700 * KIB)).status == 200


def test_where_connections_fill_memory_large_bodies_are_not_read(start_broker: StartBroker) -> None:
    broker = start_broker("--limits-memory-bytes-max", str(1 << 20), "--limits-frame-seconds", "60")
    port = broker.ports["http"]
    slow = begun(port, 200 * KIB, 100 * KIB)
    with Wire(("127.0.0.1", broker.ports["rq"])) as wire, Api(port) as api:
        until(lambda: held_bytes(api) == 100 * KIB, "the body to count")
        wire.say(rq(1, (160, b"q"), (224, bytes(2 << 20)))[: 1100 * KIB])

        def is_refused() -> bool:
            reply = api.ask("POST", "/v1/queues/q/messages", bytes(100 * KIB))
            assert reply.status in (200, 503), reply
            return reply.status == 503

        # Who is told that memory is full is told after everybody who was being read.
        until(is_refused, "what the frame fills to be seen by the other process")
        slow.say(bytes(100 * KIB))
        assert answer(slow)[0] == 503
        # Who says little goes on, as over the wires.
        assert api.ask("POST", "/v1/queues/q/messages", bytes(10 * KIB)).status == 200
    slow.close()


def test_a_body_whose_last_part_is_too_much_is_refused_as_others(start_broker: StartBroker) -> None:
    """All of it has come by then, and nothing is left to be read."""
    broker = start_broker("--http-bodies-bytes-max", str(1 << 20), "--http-body-bytes-max", str(1 << 20))
    port = broker.ports["http"]
    slow = begun(port, 1 << 20, 1000 * KIB)
    with Api(port) as api, socket.create_connection(("127.0.0.1", port)) as caller:
        until(lambda: held_bytes(api) == 1000 * KIB, "the body to count")
        caller.sendall(
            b"POST /v1/queues/q/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % (30 * KIB)
        )
        caller.sendall(bytes(15 * KIB))
        until(lambda: held_bytes(api) == 1015 * KIB, "its beginning to count")
        caller.sendall(bytes(15 * KIB))
        response = http.client.HTTPResponse(caller)
        response.begin()
        assert (response.status, response.headers["retry-after"]) == (503, "1")
    slow.close()


def test_large_answers_that_nobody_reads_are_counted_and_end(start_broker: StartBroker) -> None:
    broker = start_broker("--http-bodies-bytes-max", str(16 << 20), "--limits-frame-seconds", "2")
    port = broker.ports["http"]
    with Api(port) as api, socket.socket() as deaf:
        for _ in range(8):
            api.send("q", bytes(1 << 20))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /v1/queues/q/messages HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: held_bytes(api) > 10 << 20, "its answer to be in the account")
        reply = api.ask("GET", "/v1/queues/q/messages")
        assert (reply.problem, reply.headers["retry-after"]) == ("unavailable", "1")
        until(lambda: held_bytes(api) == 0, "it to be closed")
        assert len(api.ask("GET", "/v1/queues/q/messages").json["messages"]) == 8


def test_a_body_that_is_allowed_has_room_when_it_is_alone(start_broker: StartBroker) -> None:
    broker = start_broker("--http-bodies-bytes-max", str(100 * KIB))
    with Api(broker.ports["http"]) as api:
        assert api.ask("POST", "/v1/queues/q/messages", bytes(200 * KIB)).status == 200


def test_connections_are_bounded(start_broker: StartBroker) -> None:
    broker = start_broker("--http-connections-max", "3")
    port = broker.ports["http"]
    with contextlib.ExitStack() as crowd:
        for _ in range(3):
            peer = crowd.enter_context(Api(port))
            assert peer.ask("GET", "/healthz").status == 200
        late = socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)
        response = http.client.HTTPResponse(late)
        response.begin()
        assert response.status == 503
        assert b"the limit of [http] connections-max" in response.read()
        late.close()

    def admitted() -> bool:
        with Api(port) as api:
            return api.ask("GET", "/healthz").status == 200

    until(admitted, "places to be free again")


def test_who_makes_queues_too_fast_is_told_to_come_again(start_broker: StartBroker) -> None:
    broker = start_broker("--limits-queues-new-per-second", "1")
    with Api(broker.ports["http"]) as api:
        for number in range(100):
            reply = api.ask("POST", f"/v1/queues/made-{number}/messages", b"x")
            if reply.status != 200:
                break
        assert (reply.status, reply.problem, reply.headers["retry-after"]) == (503, "unavailable", "1")
        assert f"made-{number}" in reply.json["detail"]
        assert "queues-new-per-second" in reply.json["detail"]
        # Who sends to queues that are there does not notice.
        assert api.ask("POST", "/v1/queues/made-0/messages", b"x").status == 200
        again = f"/v1/queues/made-{number}/messages"
        until(lambda: api.ask("POST", again, b"x").status == 200, "a second to pass")
