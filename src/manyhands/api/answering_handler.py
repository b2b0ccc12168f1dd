"""One connection of the HTTP endpoint: requests are checked before their bodies are read, and refused in JSON."""

from __future__ import annotations

import contextlib
import hmac
import io
import itertools
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from manyhands.api.answering_door import Door, PatientReader
from manyhands.api.answering_lines import MOST_CLASSES, TOP, Answer, json_line
from manyhands.api.answering_requests import Body, Refusal, announced, plain_name, samples_in
from manyhands.engine.security import is_loopback

if TYPE_CHECKING:
    from manyhands.api.answering import Answering

LINGER_BYTES, LINGER_SECONDS = 4 * 10**6, 2.0
"""What is still taken of a body that was refused, so that the client reads why rather than that it was cut off."""
_RETRY_SECONDS = 2


class Handler(BaseHTTPRequestHandler):
    """One connection, one request after another."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "manyhands", ""
    disable_nagle_algorithm = True
    server: Door

    def __init__(self, answering: Answering, *connected: Any) -> None:
        self.answering, self.limits = answering, answering.limits
        self.is_unread = False
        """A body was announced of which not everything was taken."""
        self.is_admitted = True
        super().__init__(*connected)

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.limits.idle_seconds)
        self.patience = PatientReader(self.connection, self.limits.idle_seconds)
        self.rfile = io.BufferedReader(self.patience)

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # whoever went away is not told
            super().handle()

    def handle_one_request(self) -> None:
        self.patience.allow(self.limits.idle_seconds)
        if not self.server.waits(self.connection):
            self.close_connection = True
            return
        super().handle_one_request()
        if self.is_unread:
            self.close_connection = True
            self._linger()

    def parse_request(self) -> bool:
        self.is_admitted = self.server.begins(self.connection)
        self.patience.allow(self.limits.idle_seconds)
        return super().parse_request()

    def _linger(self) -> None:
        self.patience.allow(LINGER_SECONDS)
        left = LINGER_BYTES
        with contextlib.suppress(OSError):
            while left > 0 and (piece := self.rfile.read1(left)):
                left -= len(piece)

    # Requests

    def do_GET(self) -> None:
        self.is_unread = bool(self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"))

        def answer() -> None:
            path = urlsplit(self.path).path
            if path == "/health":
                self._send(200, json_line(self.answering.health()), "application/json")
            elif path == "/":
                self._send(200, self.answering.help().encode(), "text/plain; charset=utf-8")
            else:
                raise Refusal(404, f"There is nothing at {path:.100}.", "POST /infer, GET /health or GET /")

        self._guarded(answer)

    def do_POST(self) -> None:
        self.is_unread = True
        self._guarded(self._infer)

    def handle_expect_100(self) -> bool:
        """The body is asked for only if it will be taken."""
        try:
            self._check()
            announced(self.headers, self.limits)
        except Refusal as refusal:
            self._refuse(refusal)
            self.close_connection = True
            return False
        return super().handle_expect_100()

    def _guarded(self, answer: Callable[[], None]) -> None:
        try:
            self._check()
            answer()
        except Refusal as refusal:
            self._refuse(refusal)

    def _check(self) -> None:
        """Whether this client may ask, and now."""
        if not self.is_admitted:
            raise Refusal(503, f"There are {self.limits.connections} connections already.", "Try again in a moment.")
        if self.answering.bearer:
            given = self.headers.get("Authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {self.answering.bearer}".encode()):
                raise Refusal(401, "The token is missing, or another.", "Send: Authorization: Bearer TOKEN")
        elif not self._is_from_here():
            raise Refusal(403, "Only this machine may ask, and no web page of elsewhere.", f"Ask {self.answering.url}")

    def _is_from_here(self) -> bool:
        """A page of elsewhere in this machine's browser can reach loopback, but not hide where it is from."""
        origin = self.headers.get("Origin")
        names = [self.headers.get("Host", "localhost")] + ([urlsplit(origin).netloc] if origin is not None else [])
        return all(is_loopback(urlsplit(f"//{name}").hostname or "") for name in names)

    def _infer(self) -> None:
        where = urlsplit(self.path)
        if where.path != "/infer":
            raise Refusal(404, f"There is nothing at {where.path:.100}.", "POST /infer")
        query = {key: values[-1] for key, values in parse_qs(where.query).items()}
        top, raw = _number(query, "top", TOP), query.get("raw", "0") not in ("0", "false", "no")
        self.patience.allow(self.limits.body_seconds)
        with Body(self.rfile, self.headers, self.limits, self.answering.room) as body:
            try:
                content = body.read()
            except TimeoutError:
                raise Refusal(408, f"The body did not come within {self.limits.body_seconds:g} s.") from None
            self.is_unread = False
            name = plain_name(query.get("name", "")) or "sample"
            with self.answering.decoding:
                samples = samples_in(
                    content, self.headers.get("Content-Type", ""), name, self.answering.wanted, self.limits
                )
            with contextlib.closing(self.answering.answers(samples)) as found:
                self._stream(found, top, raw)

    def _stream(self, found: Iterator[Answer], top: int, raw: bool) -> None:
        """The status waits for the first answer, so that it tells the truth."""
        first = next(found)
        is_chunked = self.request_version != "HTTP/1.0"
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self._end_headers()

        def write(line: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line) if is_chunked else line)

        try:
            for answer in itertools.chain([first], found):
                write(json_line(self.answering.labels.told(answer, top=top, raw=raw)))
        except Refusal as refusal:  # too late for another status
            write(json_line(refusal.told()))
            self.close_connection = True
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    # Words

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == 503:
            self.send_header("Retry-After", str(_RETRY_SECONDS))
        self._end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _end_headers(self) -> None:
        if self.server.is_closing or self.is_unread:
            self.close_connection = True
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _refuse(self, refusal: Refusal) -> None:
        self._send(refusal.status, json_line(refusal.told()), "application/json")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base finds wrong with a request, as JSON too."""
        self.close_connection = True
        if not hasattr(self, "command") or self.command is None:
            self.command = ""
        self.request_version = getattr(self, "request_version", "HTTP/1.1")
        self._send(code, json_line({"error": message or self.responses.get(code, ("?",))[0]}), "application/json")

    def log_message(self, format: str, *values: Any) -> None:
        """Nobody reads a line for every request."""


def _number(query: dict[str, str], key: str, usual: int) -> int:
    text = query.get(key, str(usual))
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_CLASSES:
        raise Refusal(400, f"{key} is '{text:.40}'; it must be 1 to {MOST_CLASSES}.")
    return int(text)
