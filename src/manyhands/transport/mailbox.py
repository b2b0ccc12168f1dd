"""The receiving end: which messages may come, where their bytes go, and which threads wait for them.

A message is expected (`open` takes it from the plan), posted (its destination is known) and received (waited for), in
any order with its arrival. A message that is not expected is refused and noted; it does no harm. Every wait ends: the
message arrives, its sender is lost, it is interrupted, or the limit passes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from manyhands.facts.errors import BadValue, ManyhandsError
from manyhands.transport.frames import Header
from manyhands.transport.memory import Memory, as_bytes, copy_into, window
from manyhands.transport.pending_message import PendingMessage
from manyhands.transport.timing import SMALLEST_TIMED_BYTES, TimedTransfer, TransferTiming
from manyhands.transport.waiting import ANOTHER_THREAD, Helper, Key, WaitingThreads, title

WAIT_LIMIT_SECONDS = 600.0
STEPS_AHEAD = 8
"""The rounds before its time at which a message is accepted: senders run ahead no further than their input is fed."""
_MOST_REFUSALS = 100
Messages = Mapping[tuple[str, str], int]
"""(source, topic) -> bytes of each message of a round."""
ExpectedMessages = Messages | Callable[[int], Messages]
"""The messages of every round; where rounds differ, a function of a round's first step."""


def _never() -> bool:
    return False


class Mailbox:
    """The messages that may arrive at one device."""

    def __init__(self, name: str, *, limit_seconds: float = WAIT_LIMIT_SECONDS) -> None:
        self.name, self.limit_seconds = name, limit_seconds
        self.generation = -1
        self.step, self.stride = 0, 1
        self._expected: Callable[[int], Messages] = lambda step: {}
        self._standing: dict[tuple[str, str], int] = {}
        """Messages that may come at any step; their bytes are not counted with those of the plan."""
        self.received_bytes: Counter[str] = Counter()
        self.refusals: deque[str] = deque(maxlen=_MOST_REFUSALS)
        self.refused = 0
        self.refused_by: Counter[str] = Counter()
        """Peer -> the messages of this generation that it sent and that were refused: it does not follow the plan."""
        self.moved = 0
        """Rises whenever a part of an expected message arrives; see `runtime.stalls`."""
        self.writing = threading.Lock()
        """Held by a transport while it writes into a destination, and while destinations are taken away from it."""
        self._timing = TransferTiming()
        self._messages: dict[Key, PendingMessage] = {}
        self._received: set[Key] = set()
        self._lost: dict[str, ManyhandsError] = {}
        self.interruption: ManyhandsError | None = None
        """The error with which every wait fails; see `interrupt`."""
        self._news = 0
        self._lock = threading.RLock()
        self._threads = WaitingThreads(self._lock)

    def let_help(self, helper: Helper) -> None:
        """Make waiting threads do a transport's reading from now on."""
        self._threads.helper = helper

    # Messages that may come

    def open(self, generation: int, expected: ExpectedMessages, first_step: int = 0, stride: int = 1) -> None:
        """Start a generation, with the messages of its rounds. Everything of an older one is forgotten.

        `stride`: the steps from a round's first step, by which its messages are known, to the next one's.

        Lost peers are not forgotten, though: a peer that died between two generations is dead in the next one. See
        `join`.
        """
        with self.writing, self._lock:
            self.generation, self.step, self.stride = generation, first_step, stride
            every_round = dict(expected) if not callable(expected) else {}
            self._expected = expected if callable(expected) else lambda step: every_round
            self._standing.clear()
            self._messages.clear()
            self._received.clear()
            self.refused_by.clear()
            self.interruption = None
            self._tell()

    def expect(self, source: str, topic: str, size: int) -> None:
        """Expect one more message, at any step of this generation."""
        with self._lock:
            self._standing[(source, topic)] = size

    def _planned(self, source: str, step: int, topic: str) -> int | None:
        """Return the bytes of a message; None where it is not in the plan."""
        size = self._standing.get((source, topic))
        return size if size is not None else self._expected(step).get((source, topic))

    def join(self, peer: str) -> None:
        """Note that the peer is connected (again): it is no longer lost."""
        with self._lock:
            self._lost.pop(peer, None)
            self._timing.forget(peer)

    def begin_step(self, step: int) -> None:
        """Stop accepting messages of earlier steps, except for those that may come at any step."""
        with self.writing, self._lock:
            self.step = step
            for key in [key for key in self._messages if key[1] < step and (key[0], key[2]) not in self._standing]:
                del self._messages[key]
            self._received = {key for key in self._received if key[1] >= step or (key[0], key[2]) in self._standing}

    # The engine's side

    def accept(self, peer: str, header: Header) -> list[memoryview] | None:
        """Return where the payload of a frame goes; None where it is refused and must be discarded."""
        with self._lock:
            key = (header.origin, header.step, header.topic)
            message = self._messages.get(key)
            reason = self._refusal(peer, header, message)
            if reason:
                self.refused += 1
                self.refusals.append(f"from {peer}: {reason}")
                if header.generation == self.generation:  # a late message of an earlier one is nobody's fault
                    self.refused_by[peer] += 1
                return None
            if message is None:
                message = self._messages[key] = PendingMessage(header.bytes, [])
            if not message.views and header.bytes:
                memory: Any = numpy.empty(header.bytes, dtype=numpy.uint8)
                message.early = memoryview(memory)
                message.views = [message.early]
            message.begun = True
            if header.length == message.size:
                return list(message.views)
            return window(message.views, header.offset, header.length)

    def _refusal(self, peer: str, header: Header, message: PendingMessage | None) -> str:
        size = self._planned(peer, header.step, header.topic)
        at_hand = message.at_hand if message is not None else 0
        if header.origin != peer:
            problem = f"says it comes from {header.origin:.64}"
        elif header.generation != self.generation:
            problem = f"is of generation {header.generation}; this is {self.generation}"
        elif size is None:
            problem = "is not in the plan"
        elif size != header.bytes:
            problem = f"has {header.bytes} bytes; the plan says {size}"
        elif not self._is_due(header.step) and (peer, header.topic) not in self._standing:
            problem = f"comes at step {self.step}"
        elif (message is not None and message.complete) or (peer, header.step, header.topic) in self._received:
            problem = "has come already"
        elif header.offset != at_hand:
            problem = f"goes on at byte {header.offset}; {at_hand} are at hand"
        else:
            return ""
        return f"'{header.topic:.200}' of step {header.step} {problem}"

    def _is_due(self, step: int) -> bool:
        return self.step <= step < self.step + STEPS_AHEAD * self.stride

    def wants(self, header: Header) -> bool:
        """Return whether the views of an accepted frame may still be written to. Call it with `writing` held."""
        return header.generation == self.generation and (header.origin, header.step, header.topic) in self._messages

    def progressed(self, header: Header, came: int) -> None:
        """Note that a part of an accepted frame was read. `came`: bytes of its connection so far."""
        with self._lock:
            message = self._messages.get((header.origin, header.step, header.topic))
            if message is None or header.generation != self.generation:
                return
            if message.seen is None:
                message.seen = (time.monotonic(), came)
            message.came = came
            self.moved += 1

    def wrote(self, header: Header, came: int = 0) -> None:
        """Note that an accepted frame's payload is in place. `came`: bytes of its connection so far; 0: not counted."""
        with self._lock:
            message = self._messages.get((header.origin, header.step, header.topic))
            if message is None or header.generation != self.generation:
                return  # the generation ended meanwhile
            message.at_hand += header.length
            self.moved += 1
            if (header.origin, header.topic) not in self._standing:
                self.received_bytes[header.origin] += header.length
            if message.at_hand == message.size:
                message.complete = True
                if came and message.seen is not None:
                    self._time((header.origin, header.topic), message, came)
                self._news += 1
                self._threads.wake()

    def _time(self, kind: tuple[str, str], message: PendingMessage, came: int) -> None:
        if message.seen is not None and message.size >= SMALLEST_TIMED_BYTES and kind not in self._standing:
            self._timing.add(kind[0], message.seen, came)

    def take_timed(self) -> list[TimedTransfer]:
        """Return how fast messages came since the last call; for a message that takes long, what has come of it
        so far."""
        with self._lock:
            for (source, _, topic), message in self._messages.items():
                if message.seen and not message.complete and self._timing.is_due(source, message.seen):
                    self._time((source, topic), message, message.came)
            return self._timing.take()

    def lose(self, peer: str, error: ManyhandsError) -> None:
        """Make every wait for this peer fail at once with `error`."""
        with self._lock:
            self._lost.setdefault(peer, error)
            self._tell()

    def interrupt(self, error: ManyhandsError) -> None:
        """Make every wait, now and later, fail with `error`, until the next generation opens."""
        with self._lock:
            self.interruption = self.interruption or error
            self._tell()

    def deliver(self, peer: str, header: Header, payload: memoryview, came: int = 0) -> None:
        """Accept a frame that has arrived as a whole: most are small, and this way they pass quickly."""
        with self._lock:
            views = self.accept(peer, header)
            if views is not None:
                copy_into(payload, views)
                self.wrote(header, came)

    def _tell(self) -> None:
        self._news += 1
        self._threads.wake()
        if self._threads.helper is not None:
            self._threads.helper.wake()

    # The receiver's side

    def post(self, source: str, step: int, topic: str, into: Sequence[Memory]) -> None:
        """Set where a message will go, before it comes if possible: then its bytes are written there directly."""
        self._post((source, step, topic), [as_bytes(tensor) for tensor in into])

    def _post(self, key: Key, views: list[memoryview]) -> PendingMessage:
        source, step, topic = key
        size = sum(map(len, views))
        with self._lock:
            planned = self._planned(source, step, topic)
            if planned != size:
                expectation = "it is not in the plan" if planned is None else f"the plan says {planned}"
                raise BadValue(f"{self.name} has {size} bytes for '{topic:.200}' from {source}; {expectation}.")
            message = self._messages.get(key)
            if message is None:
                message = self._messages[key] = PendingMessage(size, [])
            if not message.begun:
                message.views = [view for view in views if len(view)]
            return message

    def receive(
        self, source: str, step: int, topic: str, into: Sequence[Memory], has_come: Callable[[], bool] = _never
    ) -> bool:
        """Wait for a message and write it to `into`, whose parts are filled one after another. Return False where it
        may come another way too, and `has_come` says that it did. Whoever makes it so calls `look_again`."""
        views, key = [as_bytes(tensor) for tensor in into], (source, step, topic)
        message = self._post(key, views)
        self._finish(key, message, has_come)
        if message.early is not None and message.complete:
            copy_into(message.early, views)
        return message.complete

    def take(self, source: str, step: int, topic: str) -> memoryview:
        """Wait for a message without a posted destination, and return the memory that it came into."""
        return self.take_unless(source, step, topic, _never) or memoryview(b"")

    def take_unless(self, source: str, step: int, topic: str, has_come: Callable[[], bool]) -> memoryview | None:
        """Do the same for a message that may come another way; None where `has_come` says that it did."""
        with self._lock:
            size = self._planned(source, step, topic)
            if size is None:
                raise BadValue(f"{self.name} waits for '{topic:.200}' from {source}; it is not in the plan.")
            message = self._messages.setdefault((source, step, topic), PendingMessage(size, []))
        self._finish((source, step, topic), message, has_come)
        if not message.complete:
            return None
        return message.early if message.early is not None else memoryview(b"")

    def count_read(self, source: str, size: int) -> None:
        """Count bytes of the plan that came another way."""
        with self._lock:
            self.received_bytes[source] += size
            self.moved += 1

    def look_again(self) -> None:
        """Make waiting threads look whether what they wait for has come another way."""
        with self._lock:
            self._threads.wake()

    def _finish(self, key: Key, message: PendingMessage, has_come: Callable[[], bool] = _never) -> None:
        with self._lock:
            self._wait(lambda: message.complete or has_come(), key, lambda: message.at_hand)
            self._messages.pop(key, None)
            self._received.add(key)

    def has_arrived(self, source: str, step: int, topic: str) -> bool:
        with self._lock:
            self.check()
            message = self._messages.get((source, step, topic))
            if message is not None and message.complete:
                return True
            self._check(source)
            return False

    def collect(self, source: str, step: int, topic: str) -> bool:
        """Return whether a message has come to the place that was posted for it; then it is forgotten. Never waits."""
        with self._lock:
            key = (source, step, topic)
            message = self._messages.get(key)
            if message is None or not message.complete or message.early is not None:
                return False
            del self._messages[key]
            self._received.add(key)
            return True

    @property
    def news(self) -> int:
        """The number of events so far, to hand to `wait_for_news`."""
        return self._news

    def wait_for_news(self, known_news: int) -> int:
        """Wait until something has happened since `known_news`; return the new count. Start with 0."""
        with self._lock:
            self._wait(lambda: self._news > known_news, None, lambda: sum(self.received_bytes.values()))
            return self._news

    def nudge(self) -> None:
        """Wake the threads that wait for news."""
        with self._lock:
            self._tell()

    def waiting(self, sources: Sequence[str] = ()) -> contextlib.AbstractContextManager[None]:
        """Announce that this thread waits for another one of this device, which waits for messages, or for what these
        devices do together with it."""
        return self._threads.announced(sources)

    def is_waiting(self, thread: int) -> bool:
        """Return whether the thread of this identifier waits for a message, or for another thread that does."""
        return self._threads.has(thread)

    def waited_for(self) -> set[str]:
        """Return the devices whose messages are waited for now. Where any news will do, these are all devices whose
        messages of this step are still to come."""
        with self._lock:
            keys = self._threads.keys()
            sources = {key[0] for key in keys if key is not None and key is not ANOTHER_THREAD}
            sources |= self._threads.sources()
            if None in keys:
                planned = self._expected(self.step)
                sources |= {source for source, topic in planned if self._is_missing(source, topic)}
            return sources

    def _is_missing(self, source: str, topic: str) -> bool:
        key = (source, self.step, topic)
        message = self._messages.get(key)
        is_here = key in self._received or (message is not None and message.complete)
        return not is_here and (source, topic) not in self._standing

    def check(self, sources: Sequence[str] = ()) -> None:
        """Raise if this device was interrupted, or one of these is lost: called between actions, so that computing
        stops too."""
        if self.interruption is not None:
            raise self.interruption
        for source in sources:
            self._check(source)

    def _check(self, source: str) -> None:
        if self.interruption is not None:
            raise self.interruption
        if source in self._lost:
            raise self._lost[source]

    def _wait(self, is_done: Callable[[], bool], key: Key | None, progress: Callable[[], int] = lambda: 0) -> None:
        """Wait, with the lock held, until `is_done`; fail where the sender is lost or the generation ends."""
        if is_done():
            self.check()
            return
        source = key[0] if key is not None else ""
        generation = self.generation

        def is_over() -> bool:
            return is_done() or self.interruption is not None or source in self._lost or self.generation != generation

        self._threads.wait(self.name, is_over, key, progress, self.limit_seconds)
        if not is_done():
            self._check(source)
            raise ManyhandsError(
                f"{self.name} waited for {title(key)} in generation {generation}; now it is {self.generation}.",
                hint="A thread of the last generation was still waiting when the next one opened.",
            )
        self.check()
