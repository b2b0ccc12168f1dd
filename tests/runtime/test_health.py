"""/healthz and /readyz: what they answer while a worker starts, waits, works and leaves."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection

import pytest

from manyhands.facts.errors import AddressTaken
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.health import JOINED, LEAVING, STARTING, WAITING, Readiness, answering_health
from manyhands.runtime.joining import Joining
from manyhands.runtime.service import serve
from manyhands.transport.security import new_secret


def asked(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read() or b"{}")


def test_what_is_answered_in_each_state() -> None:
    readiness = Readiness()
    with answering_health(("127.0.0.1", 0), readiness) as port:
        for state, status in ((STARTING, 503), (WAITING, 503), (JOINED, 200), (LEAVING, 503)):
            readiness.state = state
            assert asked(port, "/healthz") == (200, {"state": state})
            assert asked(port, "/readyz?verbose") == (status, {"state": state})
        assert asked(port, "/metrics")[0] == 404
        assert asked(port, "/healthz", "POST")[0] == 405
    with pytest.raises(ConnectionRefusedError):
        asked(port, "/healthz")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(AddressTaken, match=f"127.0.0.1:{port} cannot be listened on"),
            answering_health(("127.0.0.1", port), Readiness()),
        ):
            pass


def until(condition: Callable[[], bool], limit_seconds: float = 20.0) -> None:
    end = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_worker_is_ready_while_it_has_a_coordinator() -> None:
    """Waiting for one, joined, waiting again when that is lost, joined again."""
    readiness, token = Readiness(), new_secret()
    with Coordinator(token=token) as coordinator:
        host, port = coordinator.address
        joining = Joining(host, port, token, "pi", threads=1, limit_seconds=20)
        worker = threading.Thread(target=serve, args=(joining,), kwargs={"readiness": readiness}, daemon=True)
        worker.start()
        coordinator.wait_for(["pi"], 20)
        until(lambda: readiness.state == JOINED)
        coordinator._disconnect()  # without a word
        until(lambda: readiness.state == WAITING)
    with Coordinator(host, port, token) as coordinator:
        coordinator.wait_for(["pi"], 20)
        until(lambda: readiness.state == JOINED)
    worker.join(20)
    assert not worker.is_alive(), "it ends with its coordinator"
