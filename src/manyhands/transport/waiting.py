"""The threads that wait for a mailbox's messages.

Where the transport lets them, waiting threads do its reading meanwhile (`event_loop`); else they sleep.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from manyhands.facts.errors import TimedOut

Key = tuple[str, int, str]
"""Source, step, topic."""
ANOTHER_THREAD: Key = ("", 0, "")
_NAP_SECONDS = 0.01
"""The time that a thread sleeps while another does the transport's work: that one may have left just before."""


class Helper(Protocol):
    """A transport that lets waiting threads do its reading. See `event_loop.EventLoop`."""

    def begin_waiting(self) -> None: ...

    def end_waiting(self) -> None: ...

    def help(self, is_over: Callable[[], bool], limit_seconds: float) -> bool: ...

    def wake(self) -> None: ...


class WaitingThreads:
    """Threads that wait, and the message each of them waits for. Everything but `announced` needs the lock held."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._change = threading.Condition(lock)
        self._sleepers = 0
        self._keys: dict[int, Key | None] = {}
        """Thread -> the message it waits for; None: any news."""
        self._sources: dict[int, Sequence[str]] = {}
        """Thread -> the devices that it waits for, without a message."""
        self.helper: Helper | None = None

    def wait(
        self, name: str, is_over: Callable[[], bool], key: Key | None, progress: Callable[[], int], limit_seconds: float
    ) -> None:
        """Wait until `is_over`; TimedOut where the limit passes first.

        The limit is one of inactivity: it starts anew whenever `progress` has moved. The lock is released while the
        thread helps or sleeps. `name`: the device whose mailbox this is, for the error.
        """
        helper = self.helper
        thread = threading.get_ident()
        self._keys[thread] = key
        if helper is not None:
            helper.begin_waiting()
        until, last_progress = time.monotonic() + limit_seconds, progress()
        seconds_left, may_help = limit_seconds, helper is not None
        try:
            while not is_over():
                if seconds_left <= 0 and progress() != last_progress:
                    until, last_progress = time.monotonic() + limit_seconds, progress()
                    seconds_left = limit_seconds
                if seconds_left <= 0:
                    raise TimedOut(
                        f"{name} has waited {limit_seconds:g} s for {title(key)}.",
                        hint="The sender is connected but does not get there: see its events in the run folder.",
                    )
                if may_help and helper is not None:
                    self._lock.release()
                    try:
                        may_help = helper.help(is_over, seconds_left)
                    finally:
                        self._lock.acquire()
                else:
                    self._sleepers += 1
                    self._change.wait(seconds_left if helper is None else min(seconds_left, _NAP_SECONDS))
                    self._sleepers -= 1
                    may_help = helper is not None
                seconds_left = until - time.monotonic()
        finally:
            self._keys.pop(thread, None)
            if helper is not None:
                helper.end_waiting()
                self.wake()  # another waiting thread may help now

    def wake(self) -> None:
        """Wake the threads that sleep."""
        if self._sleepers:
            self._change.notify_all()

    @contextlib.contextmanager
    def announced(self, sources: Sequence[str] = ()) -> Iterator[None]:
        """Announce that this thread waits for another one of this device, which waits for messages, or for what these
        devices do together with it."""
        thread = threading.get_ident()
        self._keys[thread], self._sources[thread] = ANOTHER_THREAD, sources
        try:
            yield
        finally:
            self._keys.pop(thread, None)
            self._sources.pop(thread, None)

    def has(self, thread: int) -> bool:
        """Return whether the thread of this identifier waits."""
        return thread in self._keys

    def sources(self) -> set[str]:
        """Return the devices that are waited for without a message."""
        return {name for names in list(self._sources.values()) for name in names}

    def keys(self) -> list[Key | None]:
        """Return what is waited for now; None stands for any news."""
        return list(self._keys.values())


def title(key: Key | None) -> str:
    """Return a message's name in words."""
    return "anything" if key is None else f"'{key[2]:.200}' of step {key[1]} from {key[0]}"
