"""The receiving side of one connection: the stream cut into frames, payloads read to where the mailbox wants them.

A small frame costs one system call: header and payload are read together and copied from there. For a large one this
holds of its first bytes only; the rest goes straight to its destination, and the next header comes with the same call.
A payload in shared memory is copied straight to its destination too.
"""

from __future__ import annotations

from collections.abc import Callable

from manyhands.transport.frames import PRELUDE, BadFrame, Header, decode, header_bytes, is_control
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.shared_memory import EmptyingRing
from manyhands.transport.timing import SMALLEST_TIMED_BYTES
from manyhands.transport.wire import MOST_BUFFERS, Wire

_BUFFER_BYTES = 32 * 1024


class Inbox:
    """The reading side of one connection; used only by the thread that runs the event loop."""

    def __init__(
        self,
        peer: str,
        wire: Wire,
        mailbox: Mailbox,
        on_control: Callable[[str, bytes], None] = lambda topic, content: None,
    ) -> None:
        self._peer, self._wire, self._mailbox, self._on_control = peer, wire, mailbox, on_control
        self.ring: EmptyingRing | None = None
        self._is_encrypted = wire.encrypted
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._header: Header | None = None
        """The header of the frame whose payload is coming; None where it is discarded."""
        self._views: list[memoryview] = []
        self._left = 0
        self._came = 0
        """Bytes of this connection so far: from the times at which they came, its rate is computed."""

    @property
    def is_inside(self) -> bool:
        """Whether a payload has come in part."""
        return self._left > 0

    def read(self, most_bytes: int) -> int:
        """Read what has come, up to about `most_bytes`, and return how much it was. Broken and BadFrame end the
        connection."""
        total = 0
        while total < most_bytes:
            room_bytes, count = self._read_payload() if self._left else self._read_ahead()
            total += count
            if self._start < self._end:
                self._parse()
            if count < room_bytes and not (self._is_encrypted and self._wire.has_unread):
                break
        header = self._header
        if header is not None and self._left and header.bytes >= SMALLEST_TIMED_BYTES:
            self._mailbox.progressed(header, self._came)
        return total

    def _read_ahead(self) -> tuple[int, int]:
        """Read headers and small frames into the buffer, which holds less than a header, or less than a control
        frame."""
        if self._start:
            kept_bytes = self._end - self._start
            self._buffer[:kept_bytes] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, kept_bytes
        room = self._buffer[self._end :]
        count = self._wire.read([room])
        self._end += count
        self._came += count
        return len(room), count

    def _read_payload(self) -> tuple[int, int]:
        """Read the rest of a payload; the buffer is empty, and receives whatever follows."""
        self._start = self._end = 0
        with self._mailbox.writing:
            if self._header is None or not self._mailbox.wants(self._header):
                self._header = None
                room_bytes = min(self._left, _BUFFER_BYTES)
                count = self._wire.read([self._buffer[:room_bytes]])
                self._left -= count
                self._came += count
                return room_bytes, count
            views = self._views
            if len(views) < MOST_BUFFERS:
                targets = [*views, self._buffer]
                room_bytes = self._left + _BUFFER_BYTES
            else:
                targets = views[:MOST_BUFFERS]
                room_bytes = sum(map(len, targets))
            count = self._wire.read(targets)
        self._came += count
        fallen = min(count, self._left)
        self._advance(fallen)
        self._end = count - fallen
        self._left -= fallen
        if not self._left:
            self._finish()
        return room_bytes, count

    def _advance(self, count: int) -> None:
        views, place = self._views, 0
        while place < len(views) and count >= len(views[place]):
            count -= len(views[place])
            place += 1
        del views[:place]
        if count:
            views[0] = views[0][count:]

    def _parse(self) -> None:
        """Handle everything in the buffer that is complete, and the beginning of a payload."""
        buffer = self._buffer
        while True:
            at_hand = self._end - self._start
            if self._left:
                if not at_hand:
                    return
                self._copy(min(at_hand, self._left))
                continue
            if at_hand < PRELUDE.size:
                return
            body = self._start + PRELUDE.size
            end = body + header_bytes(buffer[self._start : body])
            if end > self._end:
                return
            header = decode(buffer[body:end])
            if header.place >= 0:
                self._start = end
                self._take(header)
                continue
            whole = end + header.length
            if is_control(header):
                if whole > self._end:
                    return
                self._start = whole
                self._on_control(header.topic, bytes(buffer[end:whole]))
                continue
            if whole > self._end:
                self._start = end
                self._begin(header)
                continue
            self._start = whole
            self._mailbox.deliver(self._peer, header, buffer[end:whole], self._came)

    def _take(self, header: Header) -> None:
        """Take a payload that lies in the ring, all of it."""
        ring, size = self.ring, self.ring.size if self.ring is not None else 0
        if ring is None or header.length > size or header.place >= size:
            place = f"{header.length} bytes at {header.place}"
            raise BadFrame(f"{place} of shared memory, of which there are {size}")
        views = self._mailbox.accept(self._peer, header)
        with self._mailbox.writing:
            is_wanted = views is not None and self._mailbox.wants(header)
            if views is not None and is_wanted:
                ring.read(header.place, header.length, views)
        if is_wanted:
            self._mailbox.wrote(header)
        ring.free(header.length)

    def _begin(self, header: Header) -> None:
        self._left = header.length
        views = self._mailbox.accept(self._peer, header)
        if views is None:
            self._header = None
            return
        self._header, self._views = header, views

    def _copy(self, count: int) -> None:
        """Copy payload bytes from the buffer to their destination."""
        source = self._buffer[self._start : self._start + count]
        with self._mailbox.writing:
            if self._header is None or not self._mailbox.wants(self._header):
                self._header = None
            elif len(self._views) == 1 and len(self._views[0]) == count:
                self._views[0][:] = source
            else:
                place = 0
                for view in self._views:
                    length = min(len(view), count - place)
                    view[:length] = source[place : place + length]
                    place += length
                    if place == count:
                        break
                self._advance(count)
        self._start += count
        self._left -= count
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        if self._header is not None:
            self._mailbox.wrote(self._header, self._came)
        self._header, self._views = None, []
