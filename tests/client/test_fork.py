"""A client that was made before a fork: the child has connections of its own, and cuts none of its parent."""

import subprocess
import sys

import pytest

from penstock.client import PhpmqClient
from tests.server.harness import WAIT_SECONDS, BrokerProcess

PROGRAM = """
import os, sys
from penstock import connect
from penstock.client import ClientError

protocol, port, queue, kind = sys.argv[1:]
mq = connect(f"{protocol}://127.0.0.1:{port}")
where = () if protocol == "sspq" else (queue,)
loop = mq.consume(queue, prefetch=5, timeout=20) if protocol in ("phpmq", "http") else None
mq.send(*where, b"before")
held = next(loop) if loop is not None else None
child = os.fork()
if not child:
    try:
        if kind == "uses":
            mq.send(*where, b"child")
            if held is not None:
                assert not held.ack(), "its connection is the parent's"
                try:
                    next(loop)
                except ClientError as error:
                    assert "fork" in str(error), error
                else:
                    raise AssertionError("the loop is the parent's")
        mq.close()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(child, 0)
mq.send(*where, b"after")
if held is not None:
    assert held.ack(), "the connection is gone"
mq.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run(broker: BrokerProcess, protocol: str, queue: str, kind: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, protocol, str(broker.ports[protocol]), queue, kind]
    return subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


@pytest.mark.parametrize("kind", ["uses", "closes"])
@pytest.mark.parametrize("protocol", ["phpmq", "sspq", "http"])
def test_parent_and_child(broker: BrokerProcess, protocol: str, queue: str, kind: str) -> None:
    queue = "default" if protocol == "sspq" else queue
    done = run(broker, protocol, queue, kind)
    assert (done.returncode, done.stdout) == (0, ""), done
    assert "connection lost" not in done.stderr
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        found = list(mq.consume(queue, timeout=0.5))
        mq.ack_many(found)
    sent = [b"before"] * (protocol == "sspq") + [b"child"] * (kind == "uses") + [b"after"]
    assert [message.body for message in found] == sent


def test_rq_has_no_thread_in_a_child(broker: BrokerProcess, queue: str) -> None:
    done = run(broker, "rq", queue, "uses")
    assert done.returncode == 1, done
    assert "made before a fork" in done.stdout
