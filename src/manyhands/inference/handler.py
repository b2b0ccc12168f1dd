"""Handles a connection of the HTTP endpoint: checks requests before it reads their bodies, and refuses them in JSON."""

from __future__ import annotations

import contextlib
import hmac
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from manyhands.inference.lines import MOST_CLASSES, TOP, Answer, Document, Lines, json_line
from manyhands.inference.requests import JSON, Body, announced, kind_of, plain_name, samples_in
from manyhands.transport.http_handler import DeadlineHandler, HttpRefusal

if TYPE_CHECKING:
    from manyhands.inference.server import Answering

PARAMETERS = ("top", "raw", "resize", "name")
"""Query parameters of /infer."""
_YES, _NO = ("1", "true", "yes", ""), ("0", "false", "no")


class Handler(DeadlineHandler):
    """Handles the requests of one connection, one after another."""

    def __init__(self, answering: Answering, *connected: Any) -> None:
        self.answering, self.limits = answering, answering.limits
        super().__init__(*connected)

    # Requests

    def get(self) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            self.send(200, json_line(self.answering.health()), JSON)
        elif path in ("/", "/infer"):
            if JSON in self.headers.get("Accept", "").lower():
                self.send(200, json_line(self.answering.help_document()), JSON)
            else:
                self.send(200, self.answering.help().encode(), "text/plain; charset=utf-8")
        else:
            raise HttpRefusal(404, f"There is nothing at {path:.100}.", "POST /infer, GET /infer (help) or GET /health")

    def handle_expect_100(self) -> bool:
        """Request the body only if it will be accepted."""
        try:
            self.authorize()
            announced(self.headers, self.limits)
        except HttpRefusal as refusal:
            self.refuse(refusal)
            self.close_connection = True
            return False
        return super().handle_expect_100()

    def check(self) -> None:
        """Refuse a client that may not send requests."""
        if self.answering.bearer:
            authorization = self.headers.get("Authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(authorization, f"Bearer {self.answering.bearer}".encode()):
                raise HttpRefusal(401, "The token is missing, or another.", "Send: Authorization: Bearer TOKEN")
        elif not self.is_from_here():
            raise HttpRefusal(
                403, "Only this machine may ask, and no web page of elsewhere.", f"Ask {self.answering.url}"
            )

    def post(self) -> None:
        where = urlsplit(self.path)
        if where.path != "/infer":
            raise HttpRefusal(404, f"There is nothing at {where.path:.100}.", "POST /infer")
        query = _query(where.query)
        top, raw = _number(query, "top", TOP), _flag(query, "raw", False)
        sample_form = self.answering.wanted_by(resize=_flag(query, "resize", self.answering.wanted.resize))
        self.deadline.allow(self.limits.body_seconds)
        with Body(self.rfile, self.headers, self.limits, self.answering.room) as body:
            try:
                content = body.read()
            except TimeoutError:
                raise HttpRefusal(408, f"The body did not come within {self.limits.body_seconds:g} s.") from None
            self.is_unread = False
            name = plain_name(query.get("name", "")) or "sample"
            content_type = self.headers.get("Content-Type", "")
            with self.answering.decoding:
                samples = samples_in(content, content_type, name, sample_form, self.limits)
            writer = Document() if kind_of(content_type) == JSON else Lines()
            with contextlib.closing(self.answering.answers(samples)) as answers:
                self._stream(answers, writer, top, raw)

    def _stream(self, answers: Iterator[Answer], writer: Lines | Document, top: int, raw: bool) -> None:
        """Send the answers as they come. The status waits for the first answer, so that it is true."""
        first = next(answers)
        is_chunked = self.request_version != "HTTP/1.0"
        self.send_response(200)
        self.send_header("Content-Type", writer.content_type)
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.finish_headers()

        def write(part: bytes) -> None:
            if part:  # an empty chunk is the last one
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part)

        try:
            for answer in itertools.chain([first], answers):
                write(writer.one(self.answering.labels.described(answer, top=top, raw=raw)))
            write(writer.end())
        except HttpRefusal as refusal:  # too late for another status
            write(writer.end(refusal.document()))
            self.close_connection = True
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    # Words

    def refuse(self, refusal: HttpRefusal) -> None:
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        self.send(refusal.status, json_line(refusal.document()), JSON, headers)


def _query(text: str) -> dict[str, str]:
    """Return the parameters after the question mark. A misspelt one is refused, not ignored."""
    query = {key: values[-1] for key, values in parse_qs(text, keep_blank_values=True).items()}
    for key in query:
        if key not in PARAMETERS:
            raise HttpRefusal(
                400, f"There is no parameter '{plain_name(key):.40}'.", f"There are: {', '.join(PARAMETERS)}."
            )
    return query


def _flag(query: dict[str, str], key: str, usual: bool) -> bool:
    """Return the value of a flag, given as ?raw=1 or ?raw alone."""
    if key not in query:
        return usual
    text = query[key].lower()
    if text not in (*_YES, *_NO):
        raise HttpRefusal(400, f"{key} is '{plain_name(text):.40}'; it must be 0 or 1.")
    return text in _YES


def _number(query: dict[str, str], key: str, usual: int) -> int:
    text = query.get(key, str(usual))
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_CLASSES:
        raise HttpRefusal(400, f"{key} is '{text:.40}'; it must be 1 to {MOST_CLASSES}.")
    return int(text)
