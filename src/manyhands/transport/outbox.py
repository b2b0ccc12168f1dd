"""The messages to send over one connection: cut into frames, urgent ones first, large ones taking turns.

Bulk (gradients of weights, weights) also waits while urgent messages wait at the device's other connections: the
urgent ones go first over the port that they share (`Precedence`).

The thread that adds a message writes it itself if no other is writing: a small message then leaves without waking a
thread. What the link does not take at once is left to the event loop's thread; all of it where the link is shaped (see
`shaping`).
Payloads go through shared memory where there is some, with room for them, and the link is not shaped.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from manyhands.transport.frames import HEARTBEAT, Header, encode, is_control
from manyhands.transport.memory import window
from manyhands.transport.shaping import Shaper
from manyhands.transport.shared_memory import FillingRing
from manyhands.transport.wire import MOST_BUFFERS, Wire

_MESSAGES_TAKING_TURNS = 4


@dataclass(eq=False, slots=True)
class Outgoing:
    """A message on its way: `start` is the header of its first frame, which is the longest; `views` are the senders'
    own memory."""

    start: Header
    views: list[memoryview]
    offset: int = 0
    copied_at: int = 0
    """The offset of the first view."""
    is_detached: bool = False
    handed_at: float = -math.inf

    def next_part(self) -> tuple[Header, list[memoryview]]:
        """Return the next chunk: its header and its payload, without copying a byte."""
        start = self.start
        if start.length == start.bytes:
            return start, self.views
        length = min(start.length, start.bytes - self.offset)
        header = Header(start.origin, start.generation, start.step, start.topic, start.bytes, self.offset, length)
        views = window(self.views, self.offset - self.copied_at, length)
        self.offset += length
        return header, views

    def detach(self) -> None:
        """Continue from a copy of what is left."""
        if not self.is_detached:
            self.views = [memoryview(b"".join(window(self.views, self.offset, self.start.bytes - self.offset)))]
            self.copied_at, self.is_detached = self.offset, True


class Precedence:
    """The outboxes of a device that have urgent messages.

    `on_gone` is called, by the thread that removed the last one, where bulk may have waited for it.
    """

    def __init__(self, on_gone: Callable[[], None] = lambda: None) -> None:
        self._waiting: set[Outbox] = set()
        self._lock = threading.Lock()
        self._on_gone = on_gone
        self._has_stood_back = False

    def must_stand_back(self, outbox: Outbox) -> bool:
        """Return whether the bulk of an outbox waits for the urgent messages of others."""
        if not self._waiting:
            return False
        with self._lock:
            others = bool(self._waiting - {outbox})
            self._has_stood_back |= others
            return others

    def begin(self, outbox: Outbox) -> None:
        with self._lock:
            self._waiting.add(outbox)

    def end(self, outbox: Outbox) -> None:
        """Note that an outbox's last urgent message is leaving, or its connection is lost."""
        with self._lock:
            if outbox not in self._waiting:
                return
            self._waiting.remove(outbox)
            must_call = self._has_stood_back
            self._has_stood_back = False
        if must_call:
            self._on_gone()


class Outbox:
    """The queues of one connection. `put` and `pump` may be called from any thread."""

    def __init__(self, wire: Wire, precedence: Precedence | None = None) -> None:
        self._wire, self._is_encrypted = wire, wire.encrypted
        self._precedence = precedence or Precedence()
        self._urgent: deque[Outgoing] = deque()
        self._bulk: deque[Outgoing] = deque()
        self._turns: deque[Outgoing] = deque()
        self._frame: list[memoryview] = []
        """The rest of the frame that has begun to leave: nothing may come between."""
        self.writing = threading.Lock()
        """Held while the wire is written to; hold it to close the wire."""
        self.is_blocked = False
        """The link is full: the event loop's thread continues when it no longer is."""
        self.frames = 0
        self.is_shaped = False
        """Only the thread that runs the event loop writes then, with `pump_shaped`."""
        self.shaper: Shaper | None = None
        self._awaits_shape = False
        self._must_queue = wire.encrypted
        self.ring: FillingRing | None = None
        self.smallest_shared_bytes = 0

    def put(self, message: Outgoing, *, urgent: bool) -> None:
        message.handed_at = time.monotonic()
        if urgent:  # noted before it can leave: the thread that takes it out notes that too
            self._precedence.begin(self)
        (self._urgent if urgent else self._bulk).append(message)

    def put_heartbeat(self) -> None:
        """Make the next frame a heartbeat, unless a thread is writing. No shaper delays it, so that a slow link does
        not look dead."""
        if not self.writing.acquire(blocking=False):
            return
        try:
            if not self.is_inside_a_frame:
                self._frame = [memoryview(encode(HEARTBEAT))]
                self.frames += 1
                if self.shaper is not None:
                    self.shaper.let_pass(len(self._frame[0]))
        finally:
            self.writing.release()

    def release(self) -> None:
        """Copy what has not left, so that the senders' memory may change."""
        with self.writing:
            self._frame = [memoryview(bytes(view)) for view in self._frame]
            for message in (*self._urgent, *self._bulk, *self._turns):
                message.detach()

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or is just being written."""
        return self.has_work or self.writing.locked() or self.has_work

    @property
    def has_work(self) -> bool:
        if self._frame or self._urgent or self._bulk or self._turns:
            return True
        return self._is_encrypted and self._wire.has_unsent

    @property
    def is_inside_a_frame(self) -> bool:
        return bool(self._frame) or (self._is_encrypted and self._wire.has_unsent)

    def send_now(self, start: Header, views: list[memoryview]) -> bool:
        """Write a message of one frame straight to an idle link. Return False where it must queue; nothing was done
        then.

        Most messages are small and meet an idle link: they pass without any of the bookkeeping below.
        """
        if self._must_queue or start.length != start.bytes or self.is_blocked:
            return False
        if not self.writing.acquire(blocking=False):
            return False
        try:
            if self.has_work:
                return False
            frame = self._framed(start, views, self.ring)
            written = self._wire.write(frame)
            if written < sum(map(len, frame)):
                self._frame = frame
                self._cut(written)
                self.is_blocked = True
            return True
        finally:
            self.writing.release()

    def _framed(self, header: Header, views: list[memoryview], ring: FillingRing | None) -> list[memoryview]:
        """Return a frame as it leaves: the header alone where its payload has gone into the ring."""
        self.frames += 1
        is_large = header.length >= self.smallest_shared_bytes and not is_control(header)
        if ring is not None and is_large and (place := ring.put(views, header.length)) >= 0:
            return [memoryview(encode(msgspec.structs.replace(header, place=place)))]
        return [memoryview(encode(header)), *views]

    def _cut(self, count: int) -> int:
        """Drop what has left from the frame under way; return how many of its pieces that were."""
        frame, place = self._frame, 0
        while place < len(frame) and count >= len(frame[place]):
            count -= len(frame[place])
            place += 1
        del frame[:place]
        if frame and count:
            frame[0] = frame[0][count:]
        return place

    def pump(self, most_bytes: int) -> bool:
        """Write what the link takes, up to about `most_bytes`, and return whether anything is left for the event loop's
        thread.

        Where another thread is writing, that one also writes what was just added: it looks again after releasing the
        lock.
        """
        written = 0
        while self.has_work and not self.is_blocked:
            if written >= most_bytes:
                return True
            if not self.writing.acquire(blocking=False):
                return False
            try:
                if self.is_shaped:
                    return True
                count = self._write()
                if count < 0:
                    return False
                written += count
            finally:
                self.writing.release()
        return self.is_blocked

    def _write(self) -> int:
        """Write once, and return the bytes written; -1 where the waiting messages stand back for others."""
        frame, shared = self._frame, 0
        if not frame and not (self._is_encrypted and self._wire.has_unsent):
            message = self._choose()
            if message is None:
                return -1
            header, views = message.next_part()
            frame = self._frame = self._framed(header, views, self.ring)
            shared = header.length if len(frame) == 1 else 0
        written = self._wire.write(frame)
        if not self._is_encrypted and written == sum(map(len, frame)):
            frame.clear()
            return written + shared
        place = self._cut(written)
        # A plain link that took a part is full; an encrypted one takes parts while it has room.
        self.is_blocked = self._wire.has_unsent or (bool(frame) and not self._is_encrypted and place < MOST_BUFFERS)
        return written + shared

    def _choose(self, latest: float = math.inf) -> Outgoing | None:
        """Return the message to continue with, among those handed over by `latest`."""
        if self._urgent and self._urgent[0].handed_at <= latest:
            message = self._urgent[0]
            if message.offset + message.start.length >= message.start.bytes:
                self._urgent.popleft()
                if not self._urgent:
                    self._precedence.end(self)
            return message
        if self._precedence.must_stand_back(self):
            return None
        while self._bulk and len(self._turns) < _MESSAGES_TAKING_TURNS and self._bulk[0].handed_at <= latest:
            self._turns.append(self._bulk.popleft())
        if not self._turns:
            return None
        message = self._turns.popleft()
        if message.offset + message.start.length < message.start.bytes:
            self._turns.append(message)
        return message

    # Where the link is shaped: called by the thread that runs the event loop

    def expect_shaping(self) -> None:
        """Hold back messages that are put from now on until `shape` is called. May be called from any thread."""
        with self.writing:
            self._must_queue = self.is_shaped = self._awaits_shape = True

    def shape(self, shaper: Shaper | None) -> None:
        self.shaper, self.is_shaped, self._awaits_shape = shaper, shaper is not None, False
        self._must_queue = self._is_encrypted or self.is_shaped

    def pump_shaped(self, now: float) -> float:
        """Write what is due, a segment at most. Return when to call again; inf where another event will trigger it."""
        shaper = self.shaper
        if shaper is None or self.is_blocked or not self.writing.acquire(blocking=False):
            return math.inf  # the thread that has the lock asks for more afterwards
        try:
            if self._awaits_shape:
                return math.inf
            if self._next_due(shaper, now) <= now:
                self._write_due(shaper)
            return math.inf if self.is_blocked else self._next_due(shaper, now)
        finally:
            self.writing.release()

    def _next_due(self, shaper: Shaper, now: float) -> float:
        delay_seconds = shaper.link.delay_seconds
        if self._is_encrypted and self._wire.has_unsent:
            return now
        if not self._frame:
            message = self._choose(now - delay_seconds)
            if message is None:
                queues = (self._urgent,) if self._precedence.must_stand_back(self) else (self._urgent, self._bulk)
                return min((queue[0].handed_at for queue in queues if queue), default=math.inf) + delay_seconds
            self._frame = self._framed(*message.next_part(), None)
            shaper.begin(message.handed_at + delay_seconds)
        return shaper.due(sum(map(len, self._frame)), now)

    def _write_due(self, shaper: Shaper) -> None:
        views = window(self._frame, 0, shaper.room)[:MOST_BUFFERS] if self._frame else []
        written = self._wire.write(views)
        shaper.spend(written)
        self._cut(written)
        self.is_blocked = self._wire.has_unsent or (not self._is_encrypted and written < sum(map(len, views)))
