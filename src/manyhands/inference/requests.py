"""Reads the body of a request, up to a limit, and the samples in it. Data, never code.

A body is a picture, JSON, the bytes of a .npy file with one sample or many, or a form with several such files. The type
of a file is detected from its first bytes, since clients name the type of a body as they like.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Protocol

from manyhands.data.sample_arrays import MAGIC, read_array
from manyhands.data.sample_json import LARGER, decoded_bytes, looks_like_json, read_json
from manyhands.data.samples import read_picture
from manyhands.data.wanted import Sample, SampleForm, SampleSource
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.units import format_bytes
from manyhands.transport.http_handler import HttpRefusal
from manyhands.transport.http_server import ConnectionLimits

FORM, JSON = "multipart/form-data", "application/json"
SINGLE = ("image/", "application/octet-stream", "application/x-npy", "application/x-www-form-urlencoded")
"""Types of a body that is one file; the last is curl's default."""
ACCEPTED = (JSON, "application/x-npy", "application/octet-stream", "image/png", "image/jpeg", "image/*", FORM)
"""Types of a body, as listed to clients."""
_PIECE_BYTES = 1 << 16
_LONGEST_HEADERS = 8192
_LONGEST_NAME = 200
_LONGEST_LINE = 1024


@dataclass(frozen=True)
class Limits(ConnectionLimits):
    """The limits of one client's requests, so that others are answered too."""

    body_bytes: int = 64 * 10**6
    held_bytes: int = 256 * 10**6
    """Most bytes of the bodies of all requests together, and of the pictures decoded from one body."""
    pixel_count: int = 25_000_000
    samples: int = 10_000
    """Most samples of one request."""
    body_seconds: float = 60.0
    """Limit for receiving a whole body."""
    request_seconds: float = 300.0
    """Limit from then until all samples are answered."""
    under_way: int = 8
    """Samples of one request that are submitted before the first of them is answered."""


class Room:
    """A budget of bytes that all requests share."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            if count > self._left:
                raise HttpRefusal(503, "Too much is being received from others just now.", "Try again in a moment.")
            self._left -= count

    def give(self, count: int) -> None:
        with self._lock:
            self._left += count


class Source(Protocol):
    """The source of a body: a binary file."""

    def read(self, count: int, /) -> bytes: ...

    def readline(self, most: int, /) -> bytes: ...


class Body:
    """A request's body while it is held in memory; leaving the context returns its room."""

    def __init__(self, file: Source, headers: Message, limits: Limits, room: Room) -> None:
        self.file, self.headers, self.limits, self.room = file, headers, limits, room
        self.length = announced(headers, limits)
        self._held = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self.room.give(self._held)
        self._held = 0

    def read(self) -> bytes:
        """Return the whole body, or raise a refusal."""
        if self.length is not None:
            self._hold(self.length)
            content = bytearray()
            self._read_into(content, self.length)
            return bytes(content)
        content = bytearray()
        while size := self._chunk_size():
            if len(content) + size > self.limits.body_bytes:
                raise too_long(self.limits)
            self._hold(size)
            self._read_into(content, size)
            if self.file.read(2) != b"\r\n":
                raise HttpRefusal(400, "A chunk of the body is longer than it said.")
        while self.file.readline(_LONGEST_LINE).strip():  # trailers
            pass
        return bytes(content)

    def _hold(self, count: int) -> None:
        self.room.take(count)
        self._held += count

    def _read_into(self, content: bytearray, count: int) -> None:
        end = len(content) + count
        while len(content) < end:
            piece = self.file.read(min(_PIECE_BYTES, end - len(content)))
            if not piece:
                raise HttpRefusal(400, f"The body ended after {len(content):,} of {end:,} bytes.")
            content += piece

    def _chunk_size(self) -> int:
        line = self.file.readline(_LONGEST_LINE)
        match = re.fullmatch(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n", line)
        if match is None:
            raise HttpRefusal(400, "The body is not chunked as it says.")
        return int(match.group(1), 16)


def announced(headers: Message, limits: Limits) -> int | None:
    """Return the length of a body before it is read; None: it comes in chunks."""
    lengths, coding = set(headers.get_all("Content-Length", [])), headers.get("Transfer-Encoding", "")
    if coding and (lengths or coding.strip().lower() != "chunked"):
        raise HttpRefusal(400, "The body has a length and a transfer coding, or one other than chunked.")
    if coding:
        return None
    if not lengths:
        raise HttpRefusal(411, "The request does not say how long its body is.", "Send Content-Length, or chunks.")
    length = lengths.pop()
    if lengths or not re.fullmatch(r"\d{1,18}", length):
        raise HttpRefusal(400, "The length of the body is no number.")
    if int(length) > limits.body_bytes:
        raise too_long(limits, int(length))
    return int(length)


def too_long(limits: Limits, length: int = 0) -> HttpRefusal:
    reason = f"The body is {format_bytes(length)} long" if length else "The body is too long"
    return HttpRefusal(
        413, f"{reason}; at most {format_bytes(limits.body_bytes)} are read.", "Send fewer samples at a time."
    )


# Samples


def samples_in(content: bytes, content_type: str, name: str, sample_form: SampleForm, limits: Limits) -> SampleSource:
    """Return the samples of a body, in its order. If one cannot be read, all are refused, and the error names it."""
    kind = kind_of(content_type)
    if kind == FORM:
        files = _files(content, content_type, limits)
    elif not kind or kind == JSON or kind.startswith(SINGLE):
        files = [(name, content)]
    else:
        raise HttpRefusal(
            415, f"Nothing is made of a body of {plain_name(kind):.80}.",
            f"Content-Type is one of: {', '.join(ACCEPTED)}.",
        )  # fmt: skip
    sample_bytes = sample_form.dtype.itemsize
    for extent in sample_form.shape:
        sample_bytes *= extent
    try:
        if kind == JSON:
            return _joined([_read_json(content, name, sample_form, limits)], limits)
        return _joined(
            [_read(file, file_name, sample_form, limits, sample_bytes * len(files)) for file_name, file in files],
            limits,
        )
    except ManyhandsError as error:
        raise HttpRefusal(400, error.message, error.hint) from error


def kind_of(content_type: str) -> str:
    """Return the media type of a header, without parameters such as character set or boundary."""
    return content_type.partition(";")[0].strip().lower()


def _read(content: bytes, name: str, sample_form: SampleForm, limits: Limits, decoded_bytes: int) -> SampleSource:
    if not content:
        raise HttpRefusal(400, f"{name}: is empty.", "Send a picture, JSON, or the bytes of a .npy file.")
    if content.startswith(MAGIC):
        return read_array(content, name, sample_form)
    if looks_like_json(content):
        return _read_json(content, name, sample_form, limits)
    if decoded_bytes > limits.held_bytes:
        raise HttpRefusal(413, f"The pictures take {format_bytes(decoded_bytes)} decoded.", "Send fewer at a time.")
    value = read_picture(content, name, sample_form, largest_pixel_count=limits.pixel_count)
    return SampleSource(1, lambda index: value, lambda index: name)


def _read_json(content: bytes, name: str, sample_form: SampleForm, limits: Limits) -> SampleSource:
    if (needed := decoded_bytes(content)) > limits.held_bytes:
        most = format_bytes(limits.held_bytes)
        raise HttpRefusal(413, f"{name}: takes {format_bytes(needed)} decoded; at most {most} are.", LARGER)
    return read_json(content, name, sample_form)


def _joined(parts: list[SampleSource], limits: Limits) -> SampleSource:
    """Return one source with the samples of all parts in order."""
    places = [(part, index) for part in parts for index in range(min(len(part), limits.samples + 1))]
    if len(places) > limits.samples:
        raise HttpRefusal(413, f"More than {limits.samples:,} samples in one request.", "Send fewer at a time.")

    def make(index: int) -> Sample:
        part, place = places[index]
        return part[place]

    def name(index: int) -> str:
        part, place = places[index]
        return part.name(place)

    return SampleSource(len(places), make, name)


def _files(content: bytes, content_type: str, limits: Limits) -> list[tuple[str, bytes]]:
    """Return the files of a form, each with its name."""
    boundary = _said(_header("Content-Type", content_type).get_boundary)
    if not 1 <= len(boundary) <= 70:  # RFC 2046
        raise HttpRefusal(400, "The form does not say what lies between its parts.", "Let the client set Content-Type.")
    pieces = (b"\r\n" + content).split(b"\r\n--" + boundary.encode("latin-1", "replace"), limits.samples + 2)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        problem = (
            "has too many parts" if len(pieces) > limits.samples + 2 else "is cut off, or its parts are not marked"
        )
        raise HttpRefusal(400, f"The form {problem}.")
    files: list[tuple[str, bytes]] = []
    for piece in pieces[1:-1]:
        head, gap, body = piece.partition(b"\r\n\r\n")
        if not gap or len(head) > _LONGEST_HEADERS:
            raise HttpRefusal(400, "A part of the form has no end of its headers.")
        fields = _fields(head)
        disposition = _header("Content-Disposition", fields.get("content-disposition", ""))
        name = _said(disposition.get_filename)
        if name or "content-type" in fields:  # else a plain field
            files.append((plain_name(name) or f"file {len(files)}", body))
    if not files:
        raise HttpRefusal(400, "There is no file in the form.", "curl -F file=@picture.png URL")
    return files


def _fields(head: bytes) -> Mapping[str, str]:
    lines = head.decode("utf-8", "replace").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return {key.strip().lower(): value.strip() for key, colon, value in pairs if colon}


def _said(read: Callable[[str], str | None]) -> str:
    """Return the value that `read` gets from a header; empty if its encoding is unknown."""
    try:
        return read("") or ""
    except (ValueError, LookupError):
        return ""


def _header(name: str, value: str) -> Message:
    message = Message()
    message[name] = value.replace("\r", " ").replace("\n", " ")
    return message


def plain_name(name: str) -> str:
    """Return the name without unprintable characters, so that it can be printed anywhere."""
    return "".join(letter for letter in name if letter.isprintable())[:_LONGEST_NAME]
