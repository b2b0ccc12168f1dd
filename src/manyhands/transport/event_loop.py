"""The event loop of a transport, run by its own thread or by a thread that waits for a message.

A message that is read by the thread that waits for it arrives one thread switch earlier, which is much of the time that
a small message takes. So a waiting thread runs the loop. The transport's own thread stands back while another waits or
did so just now, and comes back by itself: nothing has to wake it.

Over a slow link a message trickles in, and reading each part as it comes would cost a slow device much of its
processor. So parts gather first: for a moment where a thread waits for them, longer where none does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LEND_SECONDS = 0.002
"""The time that the transport's thread stays away after a wait: the next wait is often near."""
_LONGEST_AWAY_SECONDS = 0.016
_MAKE_WAY_LIMIT_SECONDS = 0.05
_GATHER_SECONDS, _GATHER_SHORTLY_SECONDS = 0.008, 0.0005
"""The time for which parts of messages gather: those that no thread waits for, and those that one does."""


class EventLoop:
    """The loop of a transport; only the thread that runs it looks at the sockets.

    `turn(limit_seconds)` looks once, and returns whether it found parts only; `ring` ends a look from outside.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[float], bool],
        ring: Callable[[], None],
        has_work: Callable[[], bool],
        end: Callable[[], None],
        longest_look_seconds: float,
    ) -> None:
        self._turn, self._ring, self._has_work, self._end = turn, ring, has_work, end
        self._longest_look_seconds = longest_look_seconds
        self._held = threading.Lock()
        self._is_held_by_thread = False
        self._waiting = 0
        self._left_at = -1.0
        self._come_back = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # Waiting threads; the count is kept under the mailbox's lock

    def begin_waiting(self) -> None:
        self._waiting += 1

    def end_waiting(self) -> None:
        self._waiting -= 1
        self._left_at = time.monotonic()
        if self._has_work():
            self._come_back.set()

    def help(self, is_over: Callable[[], bool], limit_seconds: float) -> bool:
        """Look once at the sockets in the caller's thread. Return False where another waiting thread is doing so."""
        if self._is_closing:
            return False
        if not self._held.acquire(blocking=False):
            if not self._is_held_by_thread:
                return False
            self._ring()
            if not self._held.acquire(timeout=_MAKE_WAY_LIMIT_SECONDS):
                return not self._is_closing
        try:
            if not self._is_closing and not is_over():
                are_parts = self._turn(min(limit_seconds, self._longest_look_seconds))
                if are_parts and not is_over() and not self._has_work():
                    time.sleep(_GATHER_SHORTLY_SECONDS)
        finally:
            self._held.release()
        return True

    def wake(self) -> None:
        """Make the thread that runs the loop look for work."""
        self._ring()
        self._come_back.set()

    # The transport's own thread

    def _run(self) -> None:
        away_seconds = _LEND_SECONDS
        try:
            while not self._is_closing:
                if self._stands_back():
                    self._come_back.wait(away_seconds)
                    self._come_back.clear()
                    if not self._waiting and self._stands_back():
                        continue
                if not self._held.acquire(blocking=False):
                    away_seconds = min(2 * away_seconds, _LONGEST_AWAY_SECONDS)
                    self._come_back.wait(away_seconds)
                    self._come_back.clear()
                    continue
                away_seconds = _LEND_SECONDS
                self._is_held_by_thread = True
                try:
                    are_parts = self._turn(_LEND_SECONDS if self._waiting else self._longest_look_seconds)
                finally:
                    self._is_held_by_thread = False
                    self._held.release()
                if are_parts and not self._waiting and not self._has_work():
                    self._come_back.wait(_GATHER_SECONDS)
                    self._come_back.clear()
        finally:
            self._is_closing = True
            with self._held:
                self._end()

    def _stands_back(self) -> bool:
        if self._is_closing or (self._has_work() and not self._waiting):
            return False
        return self._waiting > 0 or time.monotonic() - self._left_at < _LEND_SECONDS

    def close(self) -> None:
        self._is_closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
