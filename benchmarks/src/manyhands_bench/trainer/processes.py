"""Trainings in processes of their own, one or several at once, each with a cache that is empty at first.

Each runs a module of this package with a setting as JSON, and prints its figures as the last line of its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from manyhands.facts.errors import ManyhandsError, TimedOut
from manyhands.runtime.processes import end_with

LIMIT_SECONDS = 900.0
_SHOWN = 4000
"""Characters of what a process that failed has logged."""


@dataclass(frozen=True)
class ProcessTask:
    """A process to start."""

    module: str
    """Run as `python -m`, with the setting and the folder as its arguments."""
    setting: Any
    """A dataclass."""
    folder: Path
    """Where it keeps what it makes."""
    home: Path
    """Its cache."""

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", self.module, json.dumps(asdict(self.setting)), str(self.folder)]


def printed_by(task: ProcessTask) -> dict[str, Any]:
    """Run one process and return what it printed."""
    return printed_by_all([task])[0]


def printed_by_all(tasks: Sequence[ProcessTask], limit_seconds: float = LIMIT_SECONDS) -> list[dict[str, Any]]:
    """Start all at once, wait for the last and return what each printed; all are ended where one fails or takes too
    long."""
    with contextlib.ExitStack() as started:
        processes = []
        for task in tasks:
            output = started.enter_context(tempfile.TemporaryFile("w+"))
            errors = started.enter_context(tempfile.TemporaryFile("w+"))
            processes.append((task, started.enter_context(_running(task, output, errors)), output, errors))
        end = time.monotonic() + limit_seconds
        return [_printed(task, process, output, errors, end) for task, process, output, errors in processes]


@contextlib.contextmanager
def _running(task: ProcessTask, output: IO[str], errors: IO[str]) -> Any:
    parent = os.getpid()
    process = subprocess.Popen(
        task.command(), env={**os.environ, "MANYHANDS_HOME": str(task.home)}, stdout=output, stderr=errors,
        preexec_fn=lambda: end_with(parent),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()  # its workers end with it
        process.wait()


def _printed(
    task: ProcessTask, process: subprocess.Popen[bytes], output: IO[str], errors: IO[str], end: float
) -> dict[str, Any]:
    text = f"{task.module} with {task.setting}"
    try:
        code = process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimedOut(f"{text}: had not ended within its limit.") from None
    output.seek(0)
    errors.seek(0)
    if code:
        raise ManyhandsError(f"{text}: ended with code {code}.", hint=errors.read()[-_SHOWN:])
    result: dict[str, Any] = json.loads(output.read().splitlines()[-1])
    return result
