"""Workers on this machine: separate processes with the command a person would type, forked from a process that has
loaded PyTorch (`fork_server`) or started anew, and always ended.

No process is left behind: the coordinator ends them when it closes; if it dies first, the kernel kills them with it
(where it can), and they end by themselves once the control connection breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
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

from manyhands.facts.allowed_optimizers import allowed_optimizers
from manyhands.facts.lab import slot_names
from manyhands.files.documents import make_folder, opener, write_failed
from manyhands.runtime.fork_server import LOAD_VARIABLE, Child, NoForkServer, fork_server_for
from manyhands.runtime.memory_kills import MemoryKills, killed_for_memory, memory_kills
from manyhands.runtime.worker_variables import environment_for_children
from manyhands.transport.security import Security

TOKEN_VARIABLE = "MANYHANDS_TOKEN"
"""Variable that passes the token to children: a command line could be read by every user."""
DIE_VARIABLE = "MANYHANDS_DIE_WITH_PARENT"
"""Set to 1 for a child that the kernel may kill with its parent: the kernel sees the thread that starts it as the
parent."""
_LEAVE_SECONDS = 3.0
_ASKED_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_TAIL_BYTES = 2000
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_started: WeakSet[LocalWorkers] = WeakSet()
"""All that this process has started."""


@dataclass(frozen=True)
class WorkerProcess:
    """A process that is to be started: the workers in it, and what they compute on ('cpu', 'cuda:0')."""

    names: tuple[str, ...]
    compute: str = "cpu"
    before: tuple[str, ...] = ()
    """Words before the command, such as those that run it in a lab."""
    device: str = ""
    """The process' name where it has several workers."""
    slowdown: float = 1.0
    """Factor by which everything they compute is slowed down, so that they stand for a slower device."""
    silo: str = ""
    """A file with samples that only these workers have."""


@dataclass(eq=False)
class LocalWorkers:
    """Processes of workers on this machine."""

    processes: dict[str, Child | subprocess.Popen[bytes]] = field(default_factory=dict)
    """Worker -> its process; several may be in one."""
    started_as: dict[str, WorkerProcess] = field(default_factory=dict)
    """Worker -> how its process was to be started."""
    logs: Path | None = None
    _logged: dict[str, str] = field(default_factory=dict)
    """Worker -> the name of the log that has its output."""
    _memory: dict[str, MemoryKills] = field(default_factory=dict)
    """Worker -> the kernel's kills for memory up to when it joined."""

    def start(
        self, specs: Sequence[WorkerProcess], address: tuple[str, int], security: Security, *, threads: int,
        joins_later: bool = False, apart: bool = False,
    ) -> None:  # fmt: skip
        """Start these processes; their workers join the coordinator at `address`.

        `joins_later`: a job is under way, which is not to wait while they load what they need. `apart`: each loads
        PyTorch by itself, and shares no memory of it.
        """
        _started.add(self)
        for spec in specs:
            name = spec.device or spec.names[0]
            words = [
                "worker", "--join", f"{address[0]}:{address[1]}", "--name", name, "--slots", str(len(spec.names)),
                "--compute", spec.compute, "--threads", str(threads),
                "--encrypted" if security.encrypted else "--plain", "--patience", f"{security.timeout_factor:g}",
                "--slowdown", repr(spec.slowdown),
            ]  # fmt: skip
            words += [word for kind in allowed_optimizers() for word in ("--allow-optimizer", kind)]
            if spec.silo:
                words += ["--silo", spec.silo]
            environment = {
                **environment_for_children(), TOKEN_VARIABLE: security.token, "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads), LOAD_VARIABLE: str(int(joins_later)),
            }  # fmt: skip
            with self._output(name) as output:
                try:
                    if apart or spec.before or spec.compute != "cpu":
                        raise NoForkServer("a process of its own")
                    fork_server = fork_server_for(threads, len(specs))
                    process: Child | subprocess.Popen[bytes] = fork_server.fork(
                        [*words, "--parent", str(fork_server.process.pid)], {**environment, DIE_VARIABLE: "1"},
                        output.fileno(),
                    )  # fmt: skip
                except NoForkServer:
                    is_main_thread = threading.current_thread() is threading.main_thread()
                    process = subprocess.Popen(
                        [*spec.before, sys.executable, "-P", "-m", "manyhands", *words, "--parent", str(os.getpid())],
                        env={**environment, DIE_VARIABLE: str(int(is_main_thread))}, stdin=subprocess.DEVNULL,
                        stdout=output, stderr=output, start_new_session=True,
                    )  # fmt: skip
            self.processes |= dict.fromkeys(spec.names, process)
            self.started_as |= dict.fromkeys(spec.names, spec)
            self._logged |= dict.fromkeys(spec.names, name)

    def pin(self, cores: Mapping[str, int]) -> None:
        """Pin every thread of each worker named to one core, including threads that it starts from now on."""
        for name, core in cores.items():
            pin_process(self.processes[name].pid, core)

    def running(self) -> dict[str, int]:
        """Return worker -> its process id, for those that were started here and have not ended."""
        return {name: process.pid for name, process in dict(self.processes).items() if process.poll() is None}

    def joined(self, name: str, process: int) -> None:
        """Record that a worker has joined: from now on the kernel's kills for memory are counted for its process."""
        if name in self.processes:
            self._memory[name] = memory_kills(process)

    def _output(self, name: str) -> IO[bytes]:
        """Return the file that a worker's output goes to."""
        if self.logs is None:
            return open(os.devnull, "ab")
        path = self.logs / f"{name}.log"
        try:
            make_folder(self.logs, is_private=True)
            return open(path, "ab", opener=opener)
        except OSError as error:
            raise write_failed(path, error) from error

    def ending(self, name: str, limit_seconds: float = 0.0) -> str:
        """Return how a worker ended, in words; empty while it runs, or where it is not one of these."""
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
        """Return the end of what a worker printed."""
        if self.logs is None:
            return ""
        with contextlib.suppress(OSError):
            output = (self.logs / f"{self._logged.get(name, name)}.log").read_bytes()
            return output[-_TAIL_BYTES:].decode(errors="replace").strip()
        return ""

    def stop(self) -> None:
        """End all workers: wait for those that were told to leave, then ask those that are left, then kill them."""
        try:
            self._wait(_LEAVE_SECONDS)
            self._signal(signal.SIGTERM)
            self._wait(_ASKED_SECONDS)
        finally:  # also where the waits above are interrupted
            self._signal(signal.SIGKILL)
            self._wait(_ASKED_SECONDS)
            self.processes.clear()
            self.started_as.clear()

    def end(self, name: str) -> None:
        """End one worker's process at once, where it was started here and no other worker is in it."""
        process = self.processes.get(name)
        if process is not None and sum(other is process for other in self.processes.values()) == 1:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """Kill all workers without waiting until they have ended."""
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
    """Kill every worker that this process has started, without waiting until they have ended."""
    for workers in list(_started):
        workers.kill()


def pin_process(process: int, core: int) -> None:
    """Keep the threads that a process has now, and those they start later, on one core."""
    pinned: set[str] = set()
    while new := set(os.listdir(f"/proc/{process}/task")) - pinned:  # an unpinned one may start others meanwhile
        for thread in new:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), {core})
        pinned |= new


def keep_memory() -> None:
    """Make glibc keep freed memory for the next step: asking the kernel for it again costs a page fault per 4 KB."""
    _set_allocator(mapped_from=32 * 2**20, trimmed_from=2**31 - 1, padding=16 * 2**20)


def return_memory() -> None:
    """Make glibc return the memory of every tensor of 256 KB or more as it is freed.

    In memory that is kept, glibc reuses the place of a freed tensor for one of the same size only where a neighbour is
    free too: aligned requests ask for a bit more than they get. A network of 0.6 GB of weights that held 0.44 GB for
    its backward pass took 0.26 GB more than its tensors. Tensors with pages of their own leave no such holes; a step
    takes 10 to 20 % more time on the processor.
    """
    _set_allocator(mapped_from=2**18, trimmed_from=2**20, padding=2**17)


def _set_allocator(*, mapped_from: int, trimmed_from: int, padding: int) -> None:
    """Set glibc's allocator: bytes from which a block has pages of its own, free bytes at the heap's end from which
    they are returned, and bytes asked for in advance."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in (
            (_M_MMAP_THRESHOLD, mapped_from),
            (_M_TRIM_THRESHOLD, trimmed_from),
            (_M_TOP_PAD, padding),
        ):
            library.mallopt(option, value)


def give_back_memory() -> None:
    """Give freed memory back to the kernel once, after work that took much more than what follows will."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def is_to_load_everything() -> bool:
    return os.environ.get(LOAD_VARIABLE) == "1"


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, if that was asked for.

    Otherwise the process learns of its parent's end by the control connection.
    """
    if os.environ.get(DIE_VARIABLE) == "1":
        end_with(parent)
    elif os.getppid() != parent:
        os._exit(0)


def end_with(parent: int) -> None:
    """Make the kernel, where it can, kill this process when its parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that took effect
        os._exit(0)


def divide_into(name: str, slots: int) -> tuple[str, int]:
    """Become several workers, in as many processes, which share torch's memory; return each one's name and parent.

    To be called after torch was imported and before it has started a thread. The calling process stays as the parent of
    all and ends when they have, with the first exit code that was not 0; if it is killed, they are too.
    """
    parent = os.getpid()
    children: dict[int, str] = {}
    for slot in slot_names(name, slots):
        child = os.fork()
        if child == 0:
            end_with(parent)
            return slot, parent
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
