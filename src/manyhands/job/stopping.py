"""Stops a job from outside: by Ctrl-C, SIGTERM, or a callback that raises KeyboardInterrupt.

before the first step, and after the last      KeyboardInterrupt at once: no progress is missing from a checkpoint
while it trains                                the round under way ends, then a checkpoint of the last step is written
the second time                                at once, whatever is under way
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SECONDS = 0.25
"""A signal this soon after another is the same one: the program that runs the command may forward a signal that the
terminal also sent."""
STOPPED = 130
"""The exit code of a command that was stopped."""

_present: Stopping | None = None
"""The main thread's handler, while there is one."""


class Stopping:
    """Handles SIGINT and SIGTERM within its context, unless another handler is installed."""

    def __init__(self, at_once: Callable[[], None] | None = None) -> None:
        """Create a handler. `at_once` is called at the second signal, before KeyboardInterrupt is raised."""
        self.is_asked = False
        self.is_patient = False
        """Whether steps are under way or done that no checkpoint has: the first signal then only requests a stop."""
        self._at_once = at_once
        self._is_told = False
        self._heard_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        global _present
        if threading.current_thread() is threading.main_thread() and _present is None:
            _present = self
            for number in SIGNALS:
                if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _present
        for number, before in self._before.items():
            signal.signal(number, before)
        if _present is self:
            _present = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_second = self.is_asked
        if is_second and now - self._heard_at < SAME_SECONDS:
            return
        self.is_asked, self._heard_at = True, now
        if is_second and self._at_once is not None:
            self._at_once()
        if is_second or not self.is_patient:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def asked_by(self) -> Iterator[None]:
        """Treat a KeyboardInterrupt in this context as a request to stop, like the first Ctrl-C during steps."""
        try:
            yield
        except KeyboardInterrupt:
            if self.is_asked:
                raise
            self.is_asked = True

    def is_wanted(self, say: Callable[[str], None] | None) -> bool:
        """Return whether a stop was requested. Polled by the job; the first time, the user gets a confirmation."""
        if self.is_asked and not self._is_told:
            self._is_told = True
            if say is not None:
                say("Stopping: what is under way ends first, and a checkpoint is written. Ctrl-C again ends at once.")
        return self.is_asked


@contextlib.contextmanager
def stopping() -> Iterator[Stopping]:
    """Yield the command's own handler, or one for the duration of this context."""
    if _present is not None and threading.current_thread() is threading.main_thread():
        yield _present
        return
    with Stopping() as handler:
        yield handler


def leave_at_once() -> NoReturn:
    """End a command's process and the workers that it started, without waiting for anything."""
    processes = sys.modules.get("manyhands.runtime.processes")  # absent if it has started none
    with contextlib.suppress(OSError, ValueError):
        if processes is not None:
            processes.kill_started()
        if sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\r\n")  # the live display had hidden the cursor
        os.write(2, b"Stopped at once.\n")
    os._exit(STOPPED)
