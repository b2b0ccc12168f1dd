"""Clients of a dashboard that are no browsers."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from manyhands.dashboard.server import Dashboard


def connect(served: Dashboard) -> http.client.HTTPConnection:
    if not served.is_encrypted:
        return http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", served.port, timeout=20, context=context)


def get(
    served: Dashboard, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, on a connection of its own."""
    with contextlib.closing(connect(served)) as connection:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def view(served: Dashboard, since: str = "") -> Any:
    status, _, body = get(served, f"/api/view?since={since}")
    assert status == 200, body
    return json.loads(body)


def raw(served: Dashboard) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=20)


class Streamed:
    """The messages of a stream, one after another."""

    def __init__(self, served: Dashboard, since: str = "") -> None:
        self.connection = connect(served)
        self.connection.request("GET", f"/api/stream?since={since}")
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200
        assert self.answer.getheader("Content-Type") == "text/event-stream"

    def close(self) -> None:
        self.connection.close()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Kind and content."""
        kind, content = "message", None
        for line in self.answer:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                content = json.loads(value)
            elif not name and content is not None:
                yield kind, content
                kind, content = "message", None
