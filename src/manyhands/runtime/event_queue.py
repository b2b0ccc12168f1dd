"""One queue for the messages of all workers, with a limit for each: a worker that floods it harms only itself."""

from __future__ import annotations

import queue
import threading
from collections import Counter

from manyhands.facts.errors import Refused
from manyhands.runtime.member import Event

MOST_WAITING = 20_000
"""How many messages of one worker may wait in the queue: hours of its heartbeats, or a thousand rounds."""
MOST_WAITING_BYTES = 256 * 2**20
"""How much memory the waiting messages of one worker may take once decoded."""


class EventQueue:
    """A queue of events in the order they came. Any thread may put; one thread gets."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Event, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def put(self, event: Event, size: int = 0) -> None:
        """Append an event. Refused where too many events of its worker wait.

        `size`: bytes of memory that a worker's message takes; 0: the event arose here and is not limited.
        """
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
        """Return the next event; queue.Empty where none came in time."""
        event, size = self._queue.get(timeout=timeout)
        if size:
            with self._lock:
                self._counts[event[0]] -= 1
                self._bytes[event[0]] -= size
        return event
