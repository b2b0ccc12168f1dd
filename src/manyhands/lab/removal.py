"""Takes a lab down: its processes, control groups, namespaces and record."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from manyhands.facts.errors import ManyhandsError
from manyhands.lab import groups, record, spaces
from manyhands.lab.record import Process
from manyhands.lab.spaces import Spaces


def missing() -> str:
    """Return why there can be no lab here; empty where there can."""
    return spaces.missing() or groups.missing()


def labs() -> list[str]:
    """Return every lab of which anything exists."""
    names = set(record.names())
    if not missing():
        names |= groups.find().labs()  # made after the record and before namespaces, removed before both
    return sorted(names)


def take_down(name: str) -> None:
    """Remove whatever exists of a lab: processes, groups, namespaces, record. Nothing happens where nothing does."""
    if name not in labs():  # namespaces of that name, if any, are not ours
        return
    with contextlib.suppress(ManyhandsError, ProcessLookupError):
        supervisor = record.load(name).keeper
        if supervisor is not None and supervisor.is_alive and supervisor.pid != os.getpid():
            os.kill(supervisor.pid, signal.SIGTERM)
            _wait_for_end(supervisor)
    groups.find().remove(name)
    Spaces.down(name)
    record.forget(name)


def _wait_for_end(process: Process, limit_seconds: float = 2.0) -> None:
    end = time.monotonic() + limit_seconds
    while process.is_alive and time.monotonic() < end:
        time.sleep(0.005)
    if process.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
