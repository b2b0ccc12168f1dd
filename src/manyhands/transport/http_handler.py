"""One connection of an HTTP server: the checks that every request passes before it is answered, and refusals in
JSON."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from manyhands.transport.http_server import DeadlineReader, HttpServer
from manyhands.transport.security import is_loopback

LINGER_BYTES, LINGER_SECONDS = 4 * 10**6, 2.0
"""The most that is still read of a refused body, so that the client reads the reason rather than that it was
cut off."""
_RETRY_SECONDS = 2


class HttpRefusal(Exception):
    """A request that is refused: the status, and why."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.hint = status, message, hint

    def document(self) -> dict[str, str]:
        return {"error": self.message, **({"hint": self.hint} if self.hint else {})}


class DeadlineHandler(BaseHTTPRequestHandler):
    """Answers one request after another, each within the server's limits."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "manyhands", ""
    disable_nagle_algorithm = True
    server: HttpServer
    is_unread = False
    """Whether a body was announced that was not read to its end."""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.limits.idle_seconds)
        self.deadline = DeadlineReader(self.connection, self.server.limits.idle_seconds)
        self.rfile = io.BufferedReader(self.deadline)

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a client that went away gets no answer
            super().handle()

    def handle_one_request(self) -> None:
        self.deadline.allow(self.server.limits.idle_seconds)
        if not self.server.waits(self.connection):
            self.close_connection = True
            return
        super().handle_one_request()
        if self.is_unread:
            self.close_connection = True
            self._linger()

    def parse_request(self) -> bool:
        self.server.begins(self.connection)
        self.deadline.allow(self.server.limits.idle_seconds)
        return super().parse_request()

    def _linger(self) -> None:
        self.deadline.allow(LINGER_SECONDS)
        bytes_left = LINGER_BYTES
        with contextlib.suppress(OSError):
            while bytes_left > 0 and (piece := self.rfile.read1(bytes_left)):
                bytes_left -= len(piece)

    # Requests

    def do_GET(self) -> None:
        self.is_unread = self.has_body()
        self._guarded(self.get)

    def do_POST(self) -> None:
        self.is_unread = True
        self._guarded(self.post)

    def get(self) -> None:
        raise HttpRefusal(405, "Nothing is got here.")

    def post(self) -> None:
        raise HttpRefusal(405, "Nothing is taken here.", "GET only.")

    def _guarded(self, answer: Callable[[], None]) -> None:
        """Answer a request; a refusal is an answer too."""
        try:
            self.authorize()
            answer()
        except HttpRefusal as refusal:
            self.refuse(refusal)

    # Permissions

    def authorize(self) -> None:
        """Refuse a client without permission; give one that has it a place, if there is one."""
        self.check()
        if not self.server.serves(self.connection):
            most = self.server.limits.connections
            raise HttpRefusal(503, f"There are {most} connections already.", "Try again in a moment.")

    def check(self) -> None:
        """Refuse a client without permission."""

    def has_body(self) -> bool:
        """Return whether a body was announced, of whatever length."""
        return bool(self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"))

    def is_from_here(self) -> bool:
        """Return whether the request comes from a page of this machine: a foreign page in this machine's browser can
        reach loopback, but not hide its origin."""
        origin = self.headers.get("Origin")
        names = [self.headers.get("Host", "localhost")] + ([origin.partition("://")[2]] if origin is not None else [])
        return all(is_loopback(_host_in(name)) for name in names)

    # Answers

    def send(self, status: int, content: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status == 503:
            self.send_header("Retry-After", str(_RETRY_SECONDS))
        self.finish_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def finish_headers(self) -> None:
        if self.server.is_closing or self.is_unread:
            self.close_connection = True
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def refuse(self, refusal: HttpRefusal) -> None:
        self.send(refusal.status, _json(refusal.document()), "application/json")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the base class rejects, as JSON too."""
        self.close_connection = True
        if not hasattr(self, "command") or self.command is None:
            self.command = ""
        self.request_version = getattr(self, "request_version", "HTTP/1.1")
        self.send(code, _json({"error": message or self.responses.get(code, ("?",))[0]}), "application/json")

    def log_message(self, format: str, *values: Any) -> None:
        """Log nothing: a line for every request would be of no use."""


def _host_in(name: str) -> str:
    """Return the host of a name, '[::1]:7070' -> '::1'; empty where there is none."""
    try:
        return urlsplit(f"//{name}").hostname or ""
    except ValueError:
        return ""


def _json(document: Mapping[str, str]) -> bytes:
    return json.dumps(document).encode() + b"\n"
