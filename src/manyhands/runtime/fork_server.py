"""Starts workers of this machine without loading PyTorch in each: one process loads it and is the parent of all.

    parent process ── command, environment, descriptor of the output ──▶ fork server ── fork ──▶ a worker
                   ◀── process id; later, on a pipe, the exit status ───

Loading takes seconds of processor time and two hundred megabytes; a fork takes neither. The fork server does nothing
else: it computes nothing and has no threads, so a process that it forks is as good as new. It ends with the process
that started it, and by itself when no request has come for a while and no child is left; its children end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec

LOAD_VARIABLE = "MANYHANDS_LOAD_EVERYTHING"
"""The environment variable that, set to 1, makes a process load all a worker may need before it reports ready."""
ANSWER_SECONDS = 120.0
"""How long loading may take on a slow device."""
IDLE_SECONDS = 60.0
"""A fork server without children ends after this long without a request."""
_LARGEST_BYTES = 16 * 2**20
_NUMBER = struct.Struct("<q")
_ROOM = "." * 256
"""An argument of the fork server: children write their own arguments over the memory where the kernel keeps it."""
_UNKNOWN_ENDING = -signal.SIGKILL
"""The exit status where the fork server ended first: the kernel has killed its children."""


class NoForkServer(Exception):
    """There is no fork server, or it does not answer: the worker is to be started as a process of its own."""


class ForkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to fork a process."""

    words: list[str]
    """The arguments of the `manyhands` command."""
    environment: dict[str, str]
    folder: str
    cores: list[int]


_decoder = msgspec.msgpack.Decoder(ForkRequest)


class Child:
    """A process that the fork server has forked, with the part of `subprocess.Popen` that workers need."""

    def __init__(self, pid: int, ending: int) -> None:
        self.pid, self._ending = pid, ending
        self.returncode: int | None = None
        self._lock = threading.RLock()
        """Reentrant: a signal handler may call `wait` in the middle of a wait of the same thread."""

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; subprocess.TimeoutExpired where the process has not ended in time."""
        with self._lock:
            if self.returncode is None:
                ready = select.poll()  # a process may have more descriptors than select() counts to
                ready.register(self._ending, select.POLLIN)
                if not ready.poll(None if timeout is None else max(0.0, 1e3 * timeout)):
                    raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            if self.returncode is None:  # another caller may have read it meanwhile
                status = os.read(self._ending, _NUMBER.size)
                self.returncode = _NUMBER.unpack(status)[0] if len(status) == _NUMBER.size else _UNKNOWN_ENDING
                os.close(self._ending)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(OSError):
                os.close(self._ending)


class ForkServer:
    """The parent's end of a fork server. There is one for each number of threads, which libraries read when loaded."""

    def __init__(self, threads: int) -> None:
        near, far = socket.socketpair()
        words = [
            sys.executable, "-P", "-m", "manyhands", "nursery", "--door", str(far.fileno()), "--room", _ROOM,
            "--idle", f"{IDLE_SECONDS:g}",
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        try:
            self.process = subprocess.Popen(
                words, env=environment, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            near.close()
            raise NoForkServer(str(error)) from error
        finally:
            far.close()
        self._socket = near
        self._lock = threading.Lock()
        near.settimeout(ANSWER_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def fork(self, words: Sequence[str], environment: Mapping[str, str], output: int) -> Child:
        """Fork a process that runs the `manyhands` command with these arguments and prints to a descriptor."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        body = msgspec.msgpack.encode(ForkRequest(list(words), dict(environment), os.getcwd(), cores))
        ending, notify = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [_NUMBER.pack(len(body))], [output, notify])
                self._socket.sendall(body)
                answer = _read(self._socket, _NUMBER.size)
        except OSError as error:
            os.close(ending)
            self.close()
            raise NoForkServer(str(error)) from error
        finally:
            os.close(notify)
        return Child(_NUMBER.unpack(answer)[0], ending)

    def close(self) -> None:
        """End the fork server and the processes that it has forked."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
            return
        self.process.kill()
        self.process.wait()


_fork_servers: dict[int, ForkServer] = {}
_finding = threading.Lock()


def fork_server_for(threads: int, workers: int) -> ForkServer:
    """Return this process's fork server for a number of threads.

    NoForkServer where it would not pay off, or where this system does not fork safely.
    """
    if sys.platform != "linux":
        raise NoForkServer("not on this system")
    with _finding:
        fork_server = _fork_servers.get(threads)
        if fork_server is not None and fork_server.is_alive:
            return fork_server
        if workers < 2:
            raise NoForkServer("a single worker")
        _fork_servers[threads] = fork_server = ForkServer(threads)
        return fork_server


def close_fork_servers() -> None:
    """End all fork servers of this process, and the processes they have forked: the next workers start from nothing."""
    with _finding:
        for fork_server in _fork_servers.values():
            fork_server.close()
        _fork_servers.clear()


# The fork server's side


class _Children:
    """The children that have not ended, and the pipe on which the end of each is reported."""

    def __init__(self) -> None:
        self.notify: dict[int, int] = {}
        self.waking, self.woken = os.pipe()
        os.set_blocking(self.woken, False)
        signal.set_wakeup_fd(self.woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def reap(self) -> None:
        """Collect the children that have ended, and report how."""
        os.read(self.waking, 4096)
        for child in list(self.notify):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                pipe = self.notify.pop(child)
                with contextlib.suppress(OSError):  # the parent no longer waits for it
                    os.write(pipe, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
                os.close(pipe)

    def leave(self) -> None:
        """Reset signals and close all pipes, in a child: it has no part in this."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self.waking, self.woken, *self.notify.values()):
            os.close(descriptor)


def tend(requests: socket.socket, idle_seconds: float = IDLE_SECONDS) -> list[str] | None:
    """Fork the processes that are requested, until none was for `idle_seconds` and no child is left.

    Returns in every child, with the arguments of the command it is to run, and at the end in the fork server itself,
    with None.
    """
    children = _Children()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    requests.setblocking(True)
    idle_since = time.monotonic()
    while True:
        ready, _, _ = select.select([requests.fileno(), children.waking], [], [], idle_seconds)
        if children.waking in ready:
            children.reap()
        if requests.fileno() in ready:
            try:
                request, output, notify = _asked(requests)
            except (OSError, msgspec.MsgspecError):
                return None  # the process that started this one has ended
            child = os.fork()
            if child == 0:
                requests.close()
                os.close(notify)
                children.leave()
                _become(request, output)
                return request.words
            os.close(output)
            children.notify[child] = notify
            with contextlib.suppress(OSError):
                requests.sendall(_NUMBER.pack(child))
        if ready or children.notify:
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since >= idle_seconds:
            return None


def _asked(requests: socket.socket) -> tuple[ForkRequest, int, int]:
    start, descriptors, _, _ = socket.recv_fds(requests, _NUMBER.size, 2)
    if len(start) != _NUMBER.size or len(descriptors) != 2:
        raise OSError("closed")
    size = _NUMBER.unpack(start)[0]
    if not 0 < size <= _LARGEST_BYTES:
        raise OSError(f"a request of {size} bytes")
    output, notify = descriptors
    return _decoder.decode(_read(requests, size)), output, notify


def _become(request: ForkRequest, output: int) -> None:
    """Set up this child as if it had been started as a process of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request.environment)
    with contextlib.suppress(OSError):
        os.chdir(request.folder)
    if request.cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, request.cores)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if output > 2:
        os.close(output)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError, IndexError):
        _show([sys.executable, "-P", "-m", "manyhands", *request.words])


def _show(words: Sequence[str]) -> None:
    """Make `ps` and `pgrep` show these as the command of this process, as far as there is room for them."""
    with open("/proc/self/stat", "rb") as stat, open("/proc/self/cmdline", "rb") as shown:
        start, end = map(int, stat.read().rpartition(b")")[2].split()[45:47])
        if end - start != len(shown.read()):
            return  # not where it should be
    text = b"".join(word.encode() + b"\0" for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _read(requests: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = requests.recv(size - len(received))
        if not part:
            raise OSError("closed by the other side")
        received += part
    return bytes(received)
