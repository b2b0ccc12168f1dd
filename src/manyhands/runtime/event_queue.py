"""What workers send, in one queue: as much of each as is sensible, so that one that floods it harms only itself."""

from __future__ import annotations

import queue
import threading
from collections import Counter

from manyhands.facts.errors import Refused
from manyhands.runtime.member import Event

MOST_WAITING = 20_000
"""Messages of one worker that nobody has taken yet: hours of its heartbeats, or a thousand rounds."""
MOST_WAITING_BYTES = 256 * 2**20
"""Of memory, as they are once decoded."""


class EventQueue:
    """Events in the order they came; any thread puts, and one takes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Event, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def put(self, event: Event, size: int = 0) -> None:
        """`size`: of what a worker said, in bytes of memory; 0: it happened here. Refused where too much waits."""
        name = event[0]
        if size:
            with self._lock:
                if self._counts[name] >= MOST_WAITING or self._bytes[name] + size > MOST_WAITING_BYTES:
                    waiting = f"{self._counts[name]} messages of {self._bytes[name]} bytes wait"
                    raise Refused(f"It sends more than can be received: {waiting}.")
                self._counts[name] += 1
                self._bytes[name] += size
        self._queue.put((event, size))

    def get(self, timeout: float) -> Event:
        """The next one; queue.Empty where none came in time."""
        event, size = self._queue.get(timeout=timeout)
        if size:
            with self._lock:
                self._counts[event[0]] -= 1
                self._bytes[event[0]] -= size
        return event
