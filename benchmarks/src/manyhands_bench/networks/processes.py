"""One process for each task, several at a time, each with a limit of time and of memory.

The processes are forks of a server that has loaded PyTorch. A task reports as it goes; whatever becomes of its process,
what it reported last is kept.

    start ──▶ report, report, ... ──▶ end        it has returned
                                 ╰──▶ "timeout"   it took too long, and was killed
                                 ├──▶ "memory"    it and its children hold too much, and were killed
                                 ╰──▶ "crash"     it ended by itself
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import psutil

from manyhands.runtime.processes import end_with

PRELOADED = [
    "torch",
    "torchvision",
    "timm",
    "manyhands.graph.capture",
    "manyhands.plans.planning",
    "manyhands.training.train",
]
LOOK_SECONDS = 0.2
"""The time between two looks at the processes' time and memory."""
END_SECONDS = 10.0
_LAST_LINES = 3
Ending = Literal["", "timeout", "memory", "crash"]
Work = Callable[[Any, Callable[[Any], None]], None]
"""Called in a process of its own with a task and a function that reports; it must be a function of a module."""


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of each process, and the number of them at a time."""

    processes: int
    seconds: float
    memory_bytes: int
    memory_factor: Callable[[Any], float] = lambda task: 1.0
    """Task -> how many times `memory_bytes` it and its children may hold."""


@dataclass(frozen=True)
class TaskEnd:
    """The end of a task: the last that it reported, if anything, and how its process ended."""

    task: Any
    reported: Any
    ending: Ending = ""
    text: str = ""


@dataclass
class _Running:
    task: Any
    process: ForkServerProcess
    connection: Connection
    log: Path
    begin: float = field(default_factory=time.monotonic)
    reported: Any = None
    has_returned: bool = False


def run_tasks(tasks: Sequence[Any], work: Work, limits: ProcessLimits, logs: Path) -> Iterator[TaskEnd]:
    """Yield the end of every task, as they end. What a process prints goes to a file in `logs`, which is removed if the
    task returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running = list(enumerate(tasks)), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < limits.processes:
                number, task = waiting.pop(0)
                near, far = context.Pipe(duplex=False)
                log = logs / f"{number}.log"
                process = context.Process(target=_run, args=(work, task, far, str(log)))
                process.start()
                far.close()
                running.append(_Running(task, process, near, log))
            wait([task.connection for task in running], timeout=LOOK_SECONDS)
            for task in list(running):
                if (end := _look(task, limits)) is not None:
                    running.remove(task)
                    yield end
    finally:
        for task in running:
            _kill(task.process)


def _run(work: Work, task: Any, connection: Connection, log: str) -> None:
    """Work on one task, in the task's own process."""
    end_with(os.getppid())
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for output in (1, 2):
        os.dup2(file, output)
    work(task, lambda report: connection.send((False, report)))
    connection.send((True, None))
    sys.stdout.flush()


def _look(task: _Running, limits: ProcessLimits) -> TaskEnd | None:
    """Take what a task has reported, and return its end if it has come; end it if it exceeds a limit."""
    has_ended = not task.process.is_alive()
    with contextlib.suppress(EOFError, OSError):
        while task.connection.poll():
            task.has_returned, report = task.connection.recv()
            task.reported = report if report is not None else task.reported
    if task.has_returned:
        task.process.join(END_SECONDS)
        return _ended(task, "", "")
    if has_ended:
        return _ended(task, "crash", f"{_code(task.process.exitcode)} {_last_words(task.log)}".strip())
    seconds = time.monotonic() - task.begin
    if seconds > limits.seconds:
        return _ended(task, "timeout", f"It had not ended after {limits.seconds:g} s.")
    held = _memory(task.process.pid)
    most_bytes = limits.memory_bytes * limits.memory_factor(task.task)
    if held > most_bytes:
        limit = most_bytes / 2**30
        return _ended(task, "memory", f"It held {held / 2**30:.1f} GiB; the limit is {limit:.1f} GiB.")
    return None


def _ended(task: _Running, ending: Ending, text: str) -> TaskEnd:
    _kill(task.process)
    task.connection.close()
    if not ending:
        task.log.unlink(missing_ok=True)
    return TaskEnd(task.task, task.reported, ending, text)


def _memory(process: int | None) -> int:
    """Return the resident bytes of a process and its children."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process)
        for each in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def _kill(process: ForkServerProcess) -> None:
    """Kill a process, and those that it has started."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.kill()
    process.join(END_SECONDS)


def _code(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"Killed by {signal.Signals(-code).name}."
    return f"Ended with exit code {code}."


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return " ".join(lines[-_LAST_LINES:])
    return ""
