"""Runs a task that may take long on a thread of its own, while its owner watches for events."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Attempt:
    """A task on a thread, which begins at once. An owner that no longer needs it drops it: it ends at its own limit."""

    def __init__(self, task: Callable[[], None], name: str) -> None:
        self._error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(task,), name=name, daemon=True).start()

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def is_over(self, limit_seconds: float = 0.0) -> bool:
        """Return whether the task has ended, after waiting for at most the limit; raise the error that it raised."""
        if not self._over.wait(limit_seconds):
            return False
        if self._error is not None:
            raise self._error
        return True
