"""Commands in processes of their own, marked so that whatever they leave behind is found."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import psutil

PROGRAM = str(Path(sys.executable).with_name("manyhands"))
MARK = "MANYHANDS_TEST_MARK"


@dataclass
class Command:
    """A running command, and its words as they come: both streams in one."""

    folder: Path
    words: tuple[str, ...]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    text: str = ""
    in_group: bool = False
    """In a process group of its own, all of which hears its signals: as the foreground of a terminal does."""

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [PROGRAM, *self.words], cwd=self.folder, env={**os.environ, MARK: self.mark}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=_interruptible, start_new_session=self.in_group,
        )  # fmt: skip
        self._lines: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait_for(self, part: str, limit_seconds: float = 60.0) -> str:
        """The line that has `part` in it."""
        end = time.monotonic() + limit_seconds
        while time.monotonic() < end:
            try:
                line = self._lines.get(timeout=0.1)
            except Empty:
                assert self.process.poll() is None, f"{self.words} ended before '{part}':\n{self.text}"
                continue
            self.text += line
            if part in line:
                return line
        raise AssertionError(f"{self.words} did not say '{part}' within {limit_seconds} s:\n{self.text}")

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def signal(self, number: signal.Signals) -> None:
        if self.in_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()

    def ended(self, limit_seconds: float = 60.0) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(limit_seconds)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            with contextlib.suppress(Empty):
                self.text += self._lines.get(timeout=0.1)
                continue
            break
        return code


def _interruptible() -> None:
    """A shell's background jobs ignore Ctrl-C, and those of nohup a terminal that is closed; these do not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def leftovers(mark: str, limit_seconds: float = 20.0) -> list[str]:
    """Processes that still carry the mark, once they had a moment to go."""
    end = time.monotonic() + limit_seconds
    while (found := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that carry the mark: the command, and whatever it or its children have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _marked(mark: str) -> list[str]:
    found = []
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found
