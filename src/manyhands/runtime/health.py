"""Tells whoever keeps a worker running how it is: GET /healthz and /readyz over HTTP, as Kubernetes and others ask.

    /healthz   200 as long as the process answers
    /readyz    200 while it has joined a coordinator; 503 before, between two coordinators, and while it leaves

The answer is the state in a word or two, and nothing about the coordinator or the job: anybody who reaches the port can
ask.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, cast

from manyhands.transport.http_handler import DeadlineHandler, HttpRefusal
from manyhands.transport.http_server import ConnectionLimits, HttpServer

STARTING, WAITING, JOINED, LEAVING = "starting", "waiting for a coordinator", "joined", "leaving"
_LIMITS = ConnectionLimits(connections=16, pending=16, idle_seconds=5.0, drain_seconds=1.0)


class Readiness:
    """The state of a worker as others ask for it; set by the thread that joins, read by those that answer."""

    def __init__(self) -> None:
        self.state = STARTING

    @property
    def is_ready(self) -> bool:
        return self.state == JOINED


class _Handler(DeadlineHandler):
    def get(self) -> None:
        path = self.path.partition("?")[0]
        readiness = cast(_HealthServer, self.server).readiness
        if path == "/healthz":
            self._answer(200, readiness)
        elif path == "/readyz":
            self._answer(200 if readiness.is_ready else 503, readiness)
        else:
            raise HttpRefusal(404, "There is nothing here.", "GET /healthz or /readyz.")

    def _answer(self, status: int, readiness: Readiness) -> None:
        self.send(status, json.dumps({"state": readiness.state}).encode() + b"\n", "application/json")


class _HealthServer(HttpServer):
    def __init__(self, address: tuple[str, int], readiness: Readiness) -> None:
        handler: Any = _Handler
        super().__init__(address, handler, _LIMITS, None)
        self.readiness = readiness


@contextlib.contextmanager
def answering_health(address: tuple[str, int] | None, readiness: Readiness) -> Iterator[int]:
    """Answer at this address until the block ends, and yield the port; None: answer nowhere. AddressTaken where it
    cannot be listened on."""
    if address is None:
        yield 0
        return
    server = _HealthServer(address, readiness)
    server.start()
    try:
        yield server.server_port
    finally:
        server.close()
