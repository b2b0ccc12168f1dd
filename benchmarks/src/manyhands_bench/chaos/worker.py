"""A worker of the chaos benchmark: the ordinary worker, in a process that also obeys the benchmark.

Whatever no signal can do from outside is done here: the computing thread stands still while heartbeats go on, the
process's wall clock jumps, memory leaks until the kernel ends the process. Nothing in manyhands is changed for it:
methods are wrapped in this process alone. Commands come as datagrams to a Unix socket; each is answered once it has
been carried out.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manyhands.executor.executor import Executor
from manyhands.runtime.joining import Joining
from manyhands.runtime.service import serve
from manyhands.schedule.actions import Action

STANDING_SECONDS = 10.0
"""The limit for the computing thread to reach the gate when it is closed."""
_LEAK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class WorkerConfig:
    """The arguments of the worker process."""

    name: str
    host: str
    port: int
    token: str
    control: str
    """The Unix socket at which commands arrive."""


def run(config: WorkerConfig) -> None:
    """Join, and work until the coordinator ends the run, as `manyhands worker --join` does."""
    gate = Gate()
    _before_actions(gate)
    obey_at(config.control, {"hang": gate.close, "leak": leak, "clock": shift_clock})
    joining = Joining(config.host, config.port, config.token, config.name, threads=1)
    serve(joining, lambda text: print(text, file=sys.stderr, flush=True), rejoin=True)


class Gate:
    """A gate that the computing thread passes before every action: while closed, the thread stands there."""

    def __init__(self) -> None:
        self._is_closed = False
        self._stands = threading.Event()

    def pass_by(self) -> None:
        if self._is_closed:
            self._stands.set()
            threading.Event().wait()  # for ever: its starter ends this process

    def close(self, command: dict[str, Any]) -> bool:
        """Close the gate; return whether the computing thread stands there within the limit."""
        self._is_closed = True
        return self._stands.wait(STANDING_SECONDS)


def _before_actions(gate: Gate) -> None:
    act = Executor._act

    def gated(executor: Executor, action: Action) -> None:
        gate.pass_by()
        act(executor, action)

    Executor._act = gated  # type: ignore[method-assign, assignment]


def leak(command: dict[str, Any]) -> bool:
    """Allocate memory until there is none; this does not return if the kernel ends the process for it."""
    blocks = []
    for _ in range(int(command["bytes"]) // _LEAK_BYTES):
        blocks.append(bytearray(b"x") * _LEAK_BYTES)  # every page is written to
    return False


def shift_clock(command: dict[str, Any]) -> bool:
    """Make this process's `time.time` jump; the machine's clock, which others use, stays as it is."""
    real, seconds = time.time, float(command["seconds"])
    before = real()
    time.time = lambda: real() + seconds
    return abs(time.time() - before - seconds) < 60.0


def obey_at(path: str, commands: dict[str, Callable[[dict[str, Any]], bool]]) -> None:
    """Start a thread that carries out commands from this socket for as long as the process lives."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(path)

    def obey() -> None:
        while True:
            text, sender = listening.recvfrom(65536)
            command = json.loads(text)
            is_done = commands[command["do"]](command)
            with contextlib.suppress(OSError):
                listening.sendto(b"1" if is_done else b"0", sender)

    threading.Thread(target=obey, name="chaos", daemon=True).start()


def order(path: str, reply_path: str, limit_seconds: float, **command: Any) -> bool | None:
    """Send a command to the process at `path`, from a socket at `reply_path`; return its answer, None: none in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        asking.bind(reply_path)
        asking.settimeout(limit_seconds)
        try:
            asking.sendto(json.dumps(command).encode(), path)
            return asking.recv(16) == b"1"
        except OSError:
            return None
