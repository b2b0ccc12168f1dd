"""A lock among all processes of this user on this machine, so that two of them do not measure at the same moment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator

from manyhands.facts.errors import BadFile
from manyhands.files.documents import cache_folder, make_folder

_LOOK_SECONDS = 0.05


@contextlib.contextmanager
def machine_lock(name: str, wait_seconds: float, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock of this name, and yield whether it is held: not where another process still holds it after
    `wait_seconds`, or where the file cannot be written.

    The kernel lets go of it when the process ends, however it ends. The file stays, empty. `on_wait` is called once
    where another holds it.
    """
    try:
        make_folder(cache_folder())
        file = os.open(cache_folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, BadFile):
        yield False
        return
    try:
        yield _taken(file, time.monotonic() + wait_seconds, on_wait)
    finally:
        os.close(file)


def _taken(file: int, end: float, on_wait: Callable[[], None]) -> bool:
    has_waited = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not has_waited:
                has_waited = True
                on_wait()
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_SECONDS)
        except OSError:  # a file system without locks
            return False
