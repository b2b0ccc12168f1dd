"""One connection of the HTTP endpoint: requests are checked before their bodies are read, and refused in JSON."""

from __future__ import annotations

import contextlib
import hmac
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from manyhands.api.answering_lines import MOST_CLASSES, TOP, Answer, json_line
from manyhands.api.answering_requests import Body, announced, plain_name, samples_in
from manyhands.engine.http_handler import PatientHandler, Refusal

if TYPE_CHECKING:
    from manyhands.api.answering import Answering


class Handler(PatientHandler):
    """One connection, one request after another."""

    def __init__(self, answering: Answering, *connected: Any) -> None:
        self.answering, self.limits = answering, answering.limits
        super().__init__(*connected)

    # Requests

    def get(self) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            self.send(200, json_line(self.answering.health()), "application/json")
        elif path == "/":
            self.send(200, self.answering.help().encode(), "text/plain; charset=utf-8")
        else:
            raise Refusal(404, f"There is nothing at {path:.100}.", "POST /infer, GET /health or GET /")

    def handle_expect_100(self) -> bool:
        """The body is asked for only if it will be taken."""
        try:
            self.check()
            announced(self.headers, self.limits)
        except Refusal as refusal:
            self.refuse(refusal)
            self.close_connection = True
            return False
        return super().handle_expect_100()

    def check(self) -> None:
        """Whether this client may ask, and now."""
        super().check()
        if self.answering.bearer:
            given = self.headers.get("Authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, f"Bearer {self.answering.bearer}".encode()):
                raise Refusal(401, "The token is missing, or another.", "Send: Authorization: Bearer TOKEN")
        elif not self.is_from_here():
            raise Refusal(403, "Only this machine may ask, and no web page of elsewhere.", f"Ask {self.answering.url}")

    def post(self) -> None:
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
        self.finish_headers()

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

    def refuse(self, refusal: Refusal) -> None:
        asked = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        self.send(refusal.status, json_line(refusal.told()), "application/json", asked)


def _number(query: dict[str, str], key: str, usual: int) -> int:
    text = query.get(key, str(usual))
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_CLASSES:
        raise Refusal(400, f"{key} is '{text:.40}'; it must be 1 to {MOST_CLASSES}.")
    return int(text)
