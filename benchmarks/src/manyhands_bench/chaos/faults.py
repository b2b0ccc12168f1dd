"""The kinds of faults: how each is made, confirmed, and repaired.

Every fault is a generator: it strikes, yields what it did, and when it is resumed it repairs what a person would have
to repair. Each confirms that it *fired*: the process is gone, packets were dropped, a write to the full disk failed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from manyhands.lab.spaces import COORDINATOR_SPACE, entered
from manyhands_bench.chaos.draw import COORDINATOR, SLOWED_TIMES, Fault
from manyhands_bench.chaos.fork_server import is_alive, wait_gone
from manyhands_bench.chaos.trial import GONE_SECONDS, ScenarioProcesses
from manyhands_bench.chaos.worker import STANDING_SECONDS

_SPARE_BYTES, _LEAK_BYTES = 24 * 2**20, 2**30
_DUTY_SECONDS = 0.1
_JUNK_BYTES = 4096
_HALF_OPEN_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
_LISTENS = "0A"
_ANSWER_SECONDS = 5.0


@dataclass
class Struck:
    """The effect of a fault."""

    at: float
    """The moment it struck, by time.monotonic(): recovery counts from here."""
    victims: tuple[str, ...] = ()
    has_fired: bool = True
    incarnation: int = 0
    """The coordinator's incarnation at that moment."""


Course = Generator[Struck, None, None]


def course(fault: Fault, trial: ScenarioProcesses) -> Course:
    """Return the fault as it strikes this trial: the first next() strikes, the second repairs."""
    return _COURSES[fault.kind](fault, trial)


def _kill(fault: Fault, trial: ScenarioProcesses) -> Course:
    (name,) = victims = trial.victims(fault)
    trial.unusable |= {name}
    struck = Struck(time.monotonic(), victims, incarnation=trial.incarnation)
    struck.has_fired = trial.end_process(trial.workers[name])
    yield struck
    trial.start_worker(name)


def _stop(fault: Fault, trial: ScenarioProcesses) -> Course:
    (name,) = victims = trial.victims(fault)
    process = trial.workers[name]
    if fault.is_fatal:
        trial.unusable |= {name}
    struck = Struck(time.monotonic(), victims, incarnation=trial.incarnation)
    os.kill(process, signal.SIGSTOP)
    struck.has_fired = _becomes(process, "T")
    if not fault.is_fatal:
        trial.pause(fault.seconds)
        os.kill(process, signal.SIGCONT)
    yield struck
    if is_alive(process):
        os.kill(process, signal.SIGCONT)


def _hang(fault: Fault, trial: ScenarioProcesses) -> Course:
    (name,) = victims = trial.victims(fault)
    trial.unusable |= {name}
    has_fired = trial.order(name, STANDING_SECONDS + _ANSWER_SECONDS, do="hang")
    yield Struck(time.monotonic(), victims, bool(has_fired), trial.incarnation)
    trial.start_worker(name)


def _partition(fault: Fault, trial: ScenarioProcesses) -> Course:
    victims = trial.victims(fault)
    trial.unusable |= set(victims)
    struck = Struck(time.monotonic(), victims, incarnation=trial.incarnation)
    trial.place.partition(*victims)
    yield struck
    struck.has_fired = sum(map(trial.place.dropped, victims)) > 0
    trial.place.heal(*victims)
    for name in victims:  # an evicted process is kept out for a minute: a person starts it anew
        if name not in trial.watched.alive:
            trial.start_worker(name)


def _slow_link(fault: Fault, trial: ScenarioProcesses) -> Course:
    (name,) = victims = trial.victims(fault)
    struck = Struck(time.monotonic(), victims, incarnation=trial.incarnation)
    is_kept = trial.place.slow_down(name, fault.amount)
    yield struck
    trial.pause(struck.at + fault.seconds - time.monotonic())
    struck.has_fired = is_kept and trial.place.sent(name) > 0
    trial.place.heal(name)


def _junk(fault: Fault, trial: ScenarioProcesses) -> Course:
    drawing = random.Random(f"{trial.scenario.name} {fault.delay_seconds}")
    targets = [(trial.place.address(COORDINATOR_SPACE), trial.port)]
    for name, process in trial.workers.items():
        targets += [(trial.place.address(name), port) for port in listening_ports(process)]
    struck = Struck(time.monotonic(), (), incarnation=trial.incarnation)
    made: list[socket.socket] = []
    with (
        entered(trial.place.namespace(COORDINATOR_SPACE))
        if trial.place.network is not None
        else contextlib.nullcontext()
    ):
        reached = sum(_throw_junk(target, drawing, made) for target in targets)
    struck.has_fired = reached == len(targets) and len(targets) > len(trial.workers)
    yield struck
    trial.pause(struck.at + _HALF_OPEN_SECONDS - time.monotonic())
    for connection in made:
        connection.close()


def _throw_junk(target: tuple[str, int], drawing: random.Random, made: list[socket.socket]) -> bool:
    """Send several kinds of rubbish to one port; return whether every connection was made."""
    rubbish = drawing.randbytes(_JUNK_BYTES)
    texts = (
        rubbish, b"\x16\x03\x01\x02\x00\x01" + rubbish, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"", b"\0" * 2**16,
    )  # fmt: skip
    for text in texts:
        try:
            connection = socket.create_connection(target, _CONNECT_SECONDS)
        except OSError:
            return False
        made.append(connection)
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it may be refused before all is sent
            connection.send(text)
    return True


def _disk_full(fault: Fault, trial: ScenarioProcesses) -> Course:
    at = time.monotonic()
    is_full = trial.place.fill_disk()
    trial.pause(fault.seconds)
    incarnation = trial.incarnation
    trial.place.free_disk()
    if trial.has_ended():  # as documented, with a message; a person makes room and resumes
        at = time.monotonic()
        trial.start_coordinator()
    yield Struck(at, (), is_full, incarnation)


def _oom(fault: Fault, trial: ScenarioProcesses) -> Course:
    (name,) = victims = trial.victims(fault)
    process = trial.workers[name]
    trial.unusable |= {name}
    before = trial.place.tighten(name, _SPARE_BYTES)
    struck = Struck(time.monotonic(), victims, incarnation=trial.incarnation)
    trial.order(name, 0.01, do="leak", bytes=_LEAK_BYTES)  # it never answers
    has_gone = wait_gone(process, GONE_SECONDS)
    struck.has_fired = has_gone and trial.place.loosen(name) > before
    yield struck
    trial.place.loosen(name)
    trial.start_worker(name)


def _clock(fault: Fault, trial: ScenarioProcesses) -> Course:
    (name,) = trial.victims(fault)
    at = time.monotonic()
    has_fired = trial.order(name, _ANSWER_SECONDS, do="clock", seconds=fault.amount)
    yield Struck(at, (name,) if name != COORDINATOR else (), bool(has_fired), trial.incarnation)


def _coordinator(fault: Fault, trial: ScenarioProcesses) -> Course:
    struck = Struck(time.monotonic(), (), incarnation=trial.incarnation)
    struck.has_fired = trial.end_process(trial.coordinator)
    trial.start_coordinator()
    yield struck


def _slow_device(fault: Fault, trial: ScenarioProcesses) -> Course:
    (name,) = victims = trial.victims(fault)
    process, over = trial.workers[name], threading.Event()
    counted = [0]

    def slow_down() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(process, signal.SIGSTOP)
                over.wait(_DUTY_SECONDS * (1 - 1 / SLOWED_TIMES))
                os.kill(process, signal.SIGCONT)
                counted[0] += 1
                over.wait(_DUTY_SECONDS / SLOWED_TIMES)

    slowing = threading.Thread(target=slow_down, name="slow device", daemon=True)
    struck = Struck(time.monotonic(), victims, incarnation=trial.incarnation)
    slowing.start()
    try:
        yield struck
        trial.pause(struck.at + fault.seconds - time.monotonic())
        struck.has_fired = counted[0] > fault.seconds / _DUTY_SECONDS / 2
    finally:
        over.set()
        slowing.join()
        if is_alive(process):
            os.kill(process, signal.SIGCONT)


_COURSES: dict[str, Callable[[Fault, ScenarioProcesses], Course]] = {
    "kill": _kill, "stop": _stop, "hang": _hang, "partition": _partition, "slow-link": _slow_link, "junk": _junk,
    "disk-full": _disk_full, "oom": _oom, "clock": _clock, "coordinator": _coordinator, "slow-device": _slow_device,
}  # fmt: skip


def _becomes(process: int, state: str, limit_seconds: float = GONE_SECONDS) -> bool:
    """Return whether a process gets into this state within the limit, by the kernel's account."""
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == state:
                return True
        time.sleep(0.005)
    return False


def listening_ports(process: int) -> list[int]:
    """Return the TCP ports at which a process, possibly in another network namespace, accepts connections."""
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    ports = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS and words[9] in inodes:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return ports
