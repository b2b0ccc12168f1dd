"""Something that may take long, on a thread of its own, while its owner watches for news."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Attempt:
    """Begins at once. Whoever loses interest leaves it: it ends at its own limit."""

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
        """Whether it has ended, after waiting for so long at most; raises what it raised."""
        if not self._over.wait(limit_seconds):
            return False
        if self._error is not None:
            raise self._error
        return True
