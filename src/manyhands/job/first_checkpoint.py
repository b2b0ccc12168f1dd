"""Writes a job's first checkpoint while its devices get ready: a hundred megabytes take longer than they do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class FirstCheckpoint:
    """A checkpoint that is written by a thread of its own; leaving the context waits until it is there.

    No step begins before: a run that fails later goes on from it.
    """

    def __init__(self, write: Callable[[], None] | None, *, is_awaited: bool) -> None:
        """`write`: None where there is one already. `is_awaited`: it is there when this returns, since others will use
        the module or ask for checkpoints."""
        self._pool = ThreadPoolExecutor(1, "first checkpoint")
        self._written = self._pool.submit(write) if write is not None else None
        if is_awaited:
            self.wait()

    def wait(self) -> None:
        """Wait until it is written, and raise the error that kept it from that; return at once where none is due."""
        if self._written is not None:
            self._written.result()

    def __enter__(self) -> FirstCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
