"""One scenario as it runs: its processes, their reported state, and the waits, each with a limit."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from manyhands.lab.spaces import COORDINATOR_SPACE
from manyhands_bench.chaos.coordinator import CoordinatorConfig
from manyhands_bench.chaos.draw import COORDINATOR, SPLIT_DEVICES, ChaosScenario, Fault
from manyhands_bench.chaos.fork_server import ForkServer, is_alive, wait_gone
from manyhands_bench.chaos.place import Place
from manyhands_bench.chaos.reports import Watched
from manyhands_bench.chaos.worker import WorkerConfig, order

START_SECONDS = 60.0
"""The limit from starting a coordinator to its first round."""
END_SECONDS = 30.0
GONE_SECONDS = 5.0
"""The limit from SIGKILL to the end of a process."""
_LOOK_SECONDS = 0.01
_RESTART_SECONDS = 0.2
_PORT = 7077


class Stuck(Exception):
    """The scenario cannot go on: it hangs, or the job ended although it should not have."""

    def __init__(self, text: str, *, is_hang: bool) -> None:
        super().__init__(text)
        self.is_hang = is_hang


@dataclass
class ScenarioProcesses:
    """The processes of one scenario."""

    scenario: ChaosScenario
    place: Place
    forks: ForkServer
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    workers: dict[str, int] = field(default_factory=dict)
    """Device -> its process."""
    coordinator: int = 0
    incarnation: int = -1
    port: int = 0
    unusable: set[str] = field(default_factory=set)
    """Devices that a fault has made unusable, until they have joined again: it is right to give them up."""
    false_evictions: list[str] = field(default_factory=list)
    is_ending: bool = False
    _judged: int = 0
    _restarted_at: float = 0.0
    _serial: int = 0

    def __post_init__(self) -> None:
        (self.place.folder / "logs").mkdir(exist_ok=True)
        self.watched = Watched(self.place.folder / "reports.jsonl")
        self.port = _PORT if self.place.network is not None else _free_port()

    # Processes

    def start_worker(self, name: str) -> None:
        """Start a worker, or start it again."""
        self.end_process(self.workers.get(name, 0))
        config = WorkerConfig(name, self.place.address(COORDINATOR_SPACE), self.port, self.token, self._control(name))
        self.workers[name] = self.forks.start(
            config, self.place.folder / "logs" / f"{name}.log", namespace=self.place.namespace(name),
            group=self.place.group(name),
        )  # fmt: skip

    def start_coordinator(self) -> None:
        """Start the coordinator; if the run folder has a checkpoint, it goes on from there, as --resume does."""
        self.incarnation += 1
        config = CoordinatorConfig(
            self.scenario.share, self.scenario.devices, self.place.address(COORDINATOR_SPACE), self.port, self.token,
            str(self.place.disk / "run"), str(self.watched.path), self._control(COORDINATOR), self.incarnation,
        )  # fmt: skip
        log = self.place.folder / "logs" / f"coordinator-{self.incarnation}.log"
        self.coordinator = self.forks.start(config, log, namespace=self.place.namespace(COORDINATOR_SPACE))

    def end_process(self, process: int) -> bool:
        """Kill a process; return whether it was alive and is gone now."""
        if not process or not is_alive(process):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        return wait_gone(process, GONE_SECONDS)

    def _control(self, name: str) -> str:
        path = self.place.folder / f"{name}.sock"
        path.unlink(missing_ok=True)
        return str(path)

    def order(self, name: str, limit_seconds: float, **command: object) -> bool | None:
        """Send a process a command and return its reply; None: it did not reply."""
        self._serial += 1
        reply_path = str(self.place.folder / f"ask-{self._serial}.sock")
        return order(str(self.place.folder / f"{name}.sock"), reply_path, limit_seconds, **command)

    def victims(self, fault: Fault) -> tuple[str, ...]:
        """Return the names of the devices that a fault strikes, picked from those in use now."""
        names = sorted(name for name in self.watched.in_use if name in self.watched.alive) or sorted(self.workers)
        if fault.victims == (-1,):
            return (COORDINATOR,)
        first = names[fault.victims[0] % len(names)]
        if len(fault.victims) == 1:
            return (first,)
        others = [name for name in names if name != first] or [worker for worker in self.workers if worker != first]
        return first, others[fault.victims[1] % len(others)]

    def may_end_with(self, victims: tuple[str, ...]) -> bool:
        """Return whether the job ends, and is to be resumed, when these are lost: an edge has the data of a split."""
        return self.scenario.share == "split" and SPLIT_DEVICES[0] in victims

    # Waiting

    def look(self) -> None:
        """Read new reports, and count devices that were evicted without a reason."""
        self.watched.poll()
        new = self.watched.gone[self._judged :]
        self._judged = len(self.watched.gone)
        if self.is_ending:
            return
        self.false_evictions += [loss.name for loss in new if loss.name not in self.unusable]

    def has_ended(self) -> bool:
        """Return whether the coordinator's process is gone."""
        return not is_alive(self.coordinator)

    def until(
        self, is_so: Callable[[], bool], limit_seconds: float, phase: str, *, may_end: bool = False,
        restarts: bool = False,
    ) -> bool:  # fmt: skip
        """Wait until `is_so()`; return False if the coordinator has ended meanwhile and `may_end`. Raise Stuck at the
        limit, and if the coordinator has ended and may not. `restarts`: workers whose process has ended are started
        again, as a service manager does."""
        end = time.monotonic() + limit_seconds
        while True:
            self.look()
            if is_so():
                return True
            if self.has_ended():
                self.look()
                if may_end:
                    return False
                raise Stuck(
                    f"{phase}: the job ended: {self.watched.endings.get(self.incarnation, 'no error')}", is_hang=False
                )
            if time.monotonic() > end:
                raise Stuck(f"{phase}: not within {limit_seconds:g} s", is_hang=True)
            if restarts:
                self._restart_workers()
            time.sleep(_LOOK_SECONDS)

    def pause(self, seconds: float) -> None:
        """Wait for some seconds, and read new reports meanwhile."""
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            self.look()
            time.sleep(min(remaining, _LOOK_SECONDS))
        self.look()

    def until_calm(self, steps: int, limit_seconds: float, phase: str) -> None:
        """Wait until all devices are members and `steps` new steps are completed."""
        since = -1.0

        def is_calm() -> bool:
            nonlocal since
            if not set(self.scenario.devices) <= set(self.watched.alive):
                since = -1.0
                return False
            self.unusable.clear()
            since = time.monotonic() if since < 0 else since
            return len(self.watched.steps_since(since)) >= steps

        self.until(is_calm, limit_seconds, phase, restarts=True)

    def _restart_workers(self) -> None:
        if time.monotonic() - self._restarted_at < _RESTART_SECONDS:
            return
        self._restarted_at = time.monotonic()
        for name, process in self.workers.items():
            if not is_alive(process):
                self.start_worker(name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
