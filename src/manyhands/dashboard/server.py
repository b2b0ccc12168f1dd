"""The dashboard's server: a page about one run's folder, for several browsers at a time.

    GET /             the page, and its files
    GET /api/view     the data that are new since ?since=CURSOR, as JSON
    GET /api/stream   the same as server-sent events, as they happen

It has threads of its own that end with the process, and reads the folder only while a page is open. On loopback,
connections are plain and any user of this machine may look. Elsewhere they are encrypted with a certificate made for
this process alone, and the address has a token.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from manyhands.dashboard.handler import PageHandler
from manyhands.dashboard.page import page_files
from manyhands.dashboard.reader import Reader
from manyhands.facts.errors import AddressTaken
from manyhands.transport.http_server import ConnectionLimits, HttpServer
from manyhands.transport.rate_limiter import AddressRateLimiter
from manyhands.transport.security import is_loopback, new_token, server_context

HOST, PORTS = "127.0.0.1", range(7070, 7080)
"""The default address: the first of these ports that is free, else any other."""
LIMITS = ConnectionLimits(connections=32, idle_seconds=10.0, drain_seconds=2.0)
PER_SECOND, AT_ONCE = 60, 150
"""Connections and requests of one client address; all addresses together have four times as many."""


class Dashboard:
    """The server of a run's page, from the moment it is made until it is closed."""

    def __init__(
        self,
        address: tuple[str, int],
        folder: Path | None = None,
        *,
        shown_host: str = "",
        limits: ConnectionLimits = LIMITS,
    ) -> None:
        """Start serving. `folder`: None until it is known, see `show`. `shown_host`: the host in the address for
        people, where it listens on all of the machine's addresses."""
        host, port = address
        self.is_encrypted = not is_loopback(host)
        self.token = new_token() if self.is_encrypted else ""
        self.rate_limiter = AddressRateLimiter(PER_SECOND, AT_ONCE)
        page_files()
        context = server_context()[0] if self.is_encrypted else None
        self._server = HttpServer((host, port), self._handler, limits, context, self.rate_limiter)
        self.host, self.port = shown_host or host, int(self._server.server_address[1])
        self.cookie = f"manyhands-{self.port}"
        """Browsers do not separate cookies by port; two dashboards of one machine must not use each other's."""
        self.reader = Reader(folder)
        self._closing = threading.Lock()
        self._is_closed = False
        self._server.start()

    def _handler(self, *connected: Any) -> PageHandler:
        return PageHandler(self, *connected)

    @property
    def url(self) -> str:
        """The address, ready to be opened, with the token if there is one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = f"?{urlencode({'token': self.token})}" if self.token else ""
        return f"http{'s' if self.is_encrypted else ''}://{host}:{self.port}/{query}"

    def show(self, folder: Path) -> None:
        """Show the run in this folder from now on."""
        self.reader.show(folder)

    def close(self) -> None:
        """Send viewers the end of the run, and stop."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self.reader.close()
                self._server.close()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def near_usual_port(folder: Path | None) -> Dashboard:
    """Start serving a run's page on this machine alone, at the first usual port that is free, or any other."""
    for port in PORTS:
        with contextlib.suppress(AddressTaken):
            return Dashboard((HOST, port), folder)
    return Dashboard((HOST, 0), folder)
