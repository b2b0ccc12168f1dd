"""Workers on this machine: processes of their own with the command a person would type, forked from one that has
loaded PyTorch (`fork_server`) or started, and always ended.

Nothing is left behind: the coordinator ends them when it closes; if it dies first, the kernel kills them with it (where
it can), and they end by themselves once the control connection breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from weakref import WeakSet

from manyhands.facts.lab import slot_names
from manyhands.files.documents import make_folder, opener, write_failed
from manyhands.runtime.fork_server import LOAD_VARIABLE, Child, NoForkServer, fork_server_for
from manyhands.runtime.memory_kills import MemoryKills, killed_for_memory, memory_kills
from manyhands.transport.security import Security

TOKEN_VARIABLE = "MANYHANDS_TOKEN"
"""The token goes to children in the environment: a command line can be read by everybody."""
DIE_VARIABLE = "MANYHANDS_DIE_WITH_PARENT"
"""Set to 1 for a child that the kernel may kill with its parent: it takes the thread that started it for the parent."""
_LEAVE_SECONDS = 3.0
_ASKED_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_TAIL_BYTES = 2000
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_started: WeakSet[LocalWorkers] = WeakSet()
"""Those of this process."""


@dataclass(frozen=True)
class WorkerProcess:
    """A process that is to be started: the workers in it, and what they compute on ('cpu', 'cuda:0')."""

    names: tuple[str, ...]
    compute: str = "cpu"
    before: tuple[str, ...] = ()
    """Words before the command, such as those that bring it into a lab."""
    device: str = ""
    """Its name where it has several workers."""
    slowdown: float = 1.0
    """How many times longer than it must whatever they compute takes: it stands for a slower device."""
    silo: str = ""
    """A file of samples that only they have."""


@dataclass(eq=False)
class LocalWorkers:
    """Processes of workers on this machine."""

    processes: dict[str, Child | subprocess.Popen[bytes]] = field(default_factory=dict)
    """By the workers' names; several may be in one process."""
    started_as: dict[str, WorkerProcess] = field(default_factory=dict)
    """The same, as they were asked for."""
    logs: Path | None = None
    _logged: dict[str, str] = field(default_factory=dict)
    """Worker -> whose log has its words."""
    _memory: dict[str, MemoryKills] = field(default_factory=dict)
    """Worker -> how many had been killed for memory when it joined."""

    def start(
        self, wanted: Sequence[WorkerProcess], address: tuple[str, int], security: Security, *, threads: int,
        joins_later: bool = False, apart: bool = False,
    ) -> None:  # fmt: skip
        """`joins_later`: a job is under way, which is not to wait while they load what they need. `apart`: each loads
        PyTorch by itself, and shares no memory of it."""
        _started.add(self)
        for one in wanted:
            name = one.device or one.names[0]
            words = [
                "worker", "--join", f"{address[0]}:{address[1]}", "--name", name, "--slots", str(len(one.names)),
                "--compute", one.compute, "--threads", str(threads),
                "--encrypted" if security.encrypted else "--plain", "--patience", f"{security.patience:g}",
                "--slowdown", repr(one.slowdown),
            ]  # fmt: skip
            if one.silo:
                words += ["--silo", one.silo]
            environment = {
                **os.environ, TOKEN_VARIABLE: security.token, "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads), LOAD_VARIABLE: str(int(joins_later)),
            }  # fmt: skip
            with self._output(name) as output:
                try:
                    if apart or one.before or one.compute != "cpu":
                        raise NoForkServer("a process of its own")
                    fork_server = fork_server_for(threads, len(wanted))
                    process: Child | subprocess.Popen[bytes] = fork_server.fork(
                        [*words, "--parent", str(fork_server.process.pid)], {**environment, DIE_VARIABLE: "1"},
                        output.fileno(),
                    )  # fmt: skip
                except NoForkServer:
                    is_main_thread = threading.current_thread() is threading.main_thread()
                    process = subprocess.Popen(
                        [*one.before, sys.executable, "-P", "-m", "manyhands", *words, "--parent", str(os.getpid())],
                        env={**environment, DIE_VARIABLE: str(int(is_main_thread))}, stdin=subprocess.DEVNULL,
                        stdout=output, stderr=output, start_new_session=True,
                    )  # fmt: skip
            self.processes |= dict.fromkeys(one.names, process)
            self.started_as |= dict.fromkeys(one.names, one)
            self._logged |= dict.fromkeys(one.names, name)

    def pin(self, cores: Mapping[str, int]) -> None:
        """Have every thread of each worker named run on one core; threads it starts from now on do too."""
        for name, core in cores.items():
            pin_process(self.processes[name].pid, core)

    def running(self) -> dict[str, int]:
        """Worker -> its process id, of those that were started here and have not ended."""
        return {name: one.pid for name, one in dict(self.processes).items() if one.poll() is None}

    def joined(self, name: str, process: int) -> None:
        """A worker has come to its place: from now on the kernel's kills for memory there are counted."""
        if name in self.processes:
            self._memory[name] = memory_kills(process)

    def _output(self, name: str) -> IO[bytes]:
        """Where a worker's words go."""
        if self.logs is None:
            return open(os.devnull, "ab")
        path = self.logs / f"{name}.log"
        try:
            make_folder(self.logs, is_private=True)
            return open(path, "ab", opener=opener)
        except OSError as error:
            raise write_failed(path, error) from error

    def ending(self, name: str, limit_seconds: float = 0.0) -> str:
        """How a worker ended, in words; empty while it runs, or where it is not one of these."""
        process = self.processes.get(name)
        if process is None:
            return ""
        try:
            code = process.wait(limit_seconds) if limit_seconds else process.poll()
        except subprocess.TimeoutExpired:
            return ""
        if code is None:
            return ""
        if code in _KILLED and name in self._memory and (words := killed_for_memory(self._memory[name])):
            return words
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def last_words(self, name: str) -> str:
        """The end of what a worker printed."""
        if self.logs is None:
            return ""
        with contextlib.suppress(OSError):
            output = (self.logs / f"{self._logged.get(name, name)}.log").read_bytes()
            return output[-_TAIL_BYTES:].decode(errors="replace").strip()
        return ""

    def stop(self) -> None:
        """All end: those that were told to leave by themselves, then those that are asked, then those that are made."""
        try:
            self._wait(_LEAVE_SECONDS)
            self._signal(signal.SIGTERM)
            self._wait(_ASKED_SECONDS)
        finally:  # whatever interrupts this
            self._signal(signal.SIGKILL)
            self._wait(_ASKED_SECONDS)
            self.processes.clear()
            self.started_as.clear()

    def end(self, name: str) -> None:
        """Have one worker's process end at once, where it was started here and no other worker is in it."""
        process = self.processes.get(name)
        if process is not None and sum(one is process for one in self.processes.values()) == 1:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """All end, and nobody waits for it."""
        self._signal(signal.SIGKILL)

    def _wait(self, limit_seconds: float) -> None:
        end = time.monotonic() + limit_seconds
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)


def kill_started() -> None:
    """Every worker that this process has started ends at once, and nobody waits for it."""
    for workers in list(_started):
        workers.kill()


def pin_process(process: int, core: int) -> None:
    """Keep the threads that a process has now, and those they start later, on one core."""
    pinned: set[str] = set()
    while new := set(os.listdir(f"/proc/{process}/task")) - pinned:  # one not yet pinned may start one meanwhile
        for thread in new:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), {core})
        pinned |= new


def keep_memory() -> None:
    """Have glibc keep what is freed for the next step: asking the kernel for it again costs a page fault per 4 KB."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in (
            (_M_MMAP_THRESHOLD, 32 * 2**20),
            (_M_TRIM_THRESHOLD, 2**31 - 1),
            (_M_TOP_PAD, 16 * 2**20),
        ):
            library.mallopt(option, value)


def is_to_load_everything() -> bool:
    return os.environ.get(LOAD_VARIABLE) == "1"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, if asked for; else the control connection tells."""
    if os.environ.get(DIE_VARIABLE) == "1":
        end_with(parent)
    elif os.getppid() != parent:
        os._exit(0)


def end_with(parent: int) -> None:
    """Have the kernel, where it can, kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that took effect
        os._exit(0)


def divide_into(name: str, slots: int) -> tuple[str, int]:
    """Become several workers: the name and the parent of each, in as many processes, which share torch's memory.

    To be called after torch was imported and before it has started a thread. The calling process stays as the parent
    of all and ends when they have, with the first exit code that was not 0; if it is killed, they are too.
    """
    own = os.getpid()
    children: dict[int, str] = {}
    for slot in slot_names(name, slots):
        child = os.fork()
        if child == 0:
            end_with(own)
            return slot, own
        children[child] = slot
    code = 0
    signal.signal(signal.SIGTERM, lambda number, _: _pass_on(children, number))
    signal.signal(signal.SIGINT, lambda number, _: _pass_on(children, number))
    while children:
        child, status = os.wait()
        children.pop(child, None)
        code = code or os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _pass_on(children: Mapping[int, str], number: int) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
