"""Measures what a lab's devices really get: rates, round trips, shares of the processor, and the size at which they run
out of memory.

Networks are measured at this machine's full speed, not at the device's: a slow device would measure itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from manyhands.facts.errors import LabError
from manyhands.lab.lab import Lab

_PORT = 7099
_PACKETS = 40
"""The number of packets that a rate is measured with, if they arrive within `_MOST_SECONDS`."""
_PACKET_BYTES = 1500
_LEAST_SECONDS, _MOST_SECONDS = 1.5, 45.0
_HEAD_BYTES = 30_000
"""The first bytes arrive faster: they fill queues and use up the bursts that are allowed."""
_LEAST_HEAD_BYTES, _MOST_HEAD_SECONDS = 6000, 15.0
_FIRST_WINDOW_BYTES = 10 * 1448
_LIMIT_SECONDS = 90.0
_SPARE_SECONDS = 40.0
"""The time that a measurement may take beyond 1.5 times its planned duration: programs start, machines are busy."""
_LEAST_PINGS, _PINGS = 3, 60
_PING_SECONDS = 10.0
_BEYOND = 1.25
"""The memory that a device requests before it is killed, as a multiple of its own."""


def _words(lab: Lab, member: str, *words: str, only_network: bool = False) -> list[str]:
    prefix = lab.words(member, only_network=only_network)
    return [*prefix, sys.executable, "-P", "-m", "manyhands.lab.probes", *words]


@contextlib.contextmanager
def _running(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_word(process: subprocess.Popen[str], word: str) -> None:
    """Wait until a process prints `word` as its first line; kill one that prints something else, or nothing for
    long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline().strip() if selector.select(_SPARE_SECONDS) else ""
    if line != word:
        process.kill()
        _, errors = process.communicate()
        raise LabError(f"A probe did not start: {(errors or line).strip()[-300:] or 'it printed nothing'}")


def _answer(process: subprocess.Popen[str], measurement: str, seconds: float) -> float:
    """Return the number that the process prints. It is meant to take so many seconds."""
    limit = _SPARE_SECONDS + 1.5 * seconds
    try:
        output, errors = process.communicate(timeout=limit)
        return float(json.loads(output.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise LabError(f"{measurement}: nothing was measured within {limit:.0f} s.") from None
    except (IndexError, ValueError):
        raise LabError(f"{measurement}: nothing was measured. {errors.strip()[-300:]}") from None


class RatePlan(NamedTuple):
    """The plan for measuring a rate."""

    head_bytes: int
    head_seconds: float
    """Neither head counts: TCP is still speeding up."""
    seconds: float
    whole_seconds: float


def rate_plan(asked_bytes_per_second: float, round_trip_seconds: float = 0.0) -> RatePlan:
    """Return a plan that takes about a minute at the most, except where round trips alone take longer."""
    set_rate = asked_bytes_per_second
    seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, _PACKETS * _PACKET_BYTES / set_rate, 3 * round_trip_seconds))
    head_bytes = min(_HEAD_BYTES, max(_LEAST_HEAD_BYTES, int(set_rate * _MOST_HEAD_SECONDS)))
    windows = set_rate * round_trip_seconds / _FIRST_WINDOW_BYTES
    head_seconds = round_trip_seconds * (2 + math.ceil(math.log2(windows)) if windows > 1 else 1)
    return RatePlan(head_bytes, head_seconds, seconds, max(head_seconds, head_bytes / set_rate) + seconds)


def ping_count(asked_seconds: float) -> int:
    """Return how many pings take about ten seconds."""
    most = _PING_SECONDS / asked_seconds if asked_seconds > 0 else _PINGS
    return int(min(_PINGS, max(_LEAST_PINGS, most)))


def rate(lab: Lab, sender: str, receiver: str, asked_bytes_per_second: float, round_trip_seconds: float = 0.0) -> float:
    """Return the bytes per second of one TCP connection, once it is at full speed."""
    plan = rate_plan(asked_bytes_per_second, round_trip_seconds)
    seconds, head = str(plan.seconds), (str(plan.head_bytes), str(plan.head_seconds))
    address = lab.address(receiver)
    measurement = f"The rate from {sender} to {receiver}"
    with _running(_words(lab, receiver, "sink", address, str(_PORT), seconds, *head, only_network=True)) as sink:
        wait_for_word(sink, "listening")
        with _running(_words(lab, sender, "source", address, str(_PORT), str(plan.whole_seconds), only_network=True)):
            return _answer(sink, measurement, plan.whole_seconds)


def round_trip(lab: Lab, name: str, other: str, asked_seconds: float = 0.0) -> float:
    """Return the seconds of a round trip, the median of small datagrams: fewer of them where each is meant to take
    long."""
    count, wait = ping_count(asked_seconds), max(5.0, 3 * asked_seconds)
    address = lab.address(other)
    measurement = f"The round trip from {name} to {other}"
    with _running(_words(lab, other, "echo", address, str(_PORT), str(30 + wait), only_network=True)) as echo:
        wait_for_word(echo, "listening")
        with _running(_words(lab, name, "ping", address, str(_PORT), str(count), str(wait), only_network=True)) as ping:
            return _answer(ping, measurement, (count + 3) * asked_seconds)


def shares(lab: Lab, devices: Sequence[str], seconds: float) -> dict[str, float]:
    """Return the share of a core that each device gets when all compute at once."""
    with contextlib.ExitStack() as stack:
        for device in devices:
            for _ in range(lab.played.slots):
                stack.enter_context(_running(_words(lab, device, "burn", str(seconds + 60))))
        for device in devices:
            _wait_for_processes(lab, device)
        time.sleep(0.3)  # Python has started, and computes
        before = {device: _used(lab, device) for device in devices}
        time.sleep(seconds)
        after = {device: _used(lab, device) for device in devices}
    return {
        device: (after[device][1] - before[device][1]) / (after[device][0] - before[device][0]) for device in devices
    }


def _wait_for_processes(lab: Lab, device: str) -> None:
    end = time.monotonic() + 10
    while len(lab.groups.processes(lab.name, device)) < lab.played.slots:
        if time.monotonic() > end:
            raise LabError(f"Nothing starts on {device}.")
        time.sleep(0.01)


def _used(lab: Lab, device: str) -> tuple[float, float]:
    return time.monotonic(), lab.groups.statistics(lab.name, device).cpu_seconds


def memory_at_death(lab: Lab, device: str) -> int | None:
    """Return the memory that a process had when the kernel killed it for taking more than the device has; None: it was
    not killed."""
    limit = lab.played.seat(device).memory_bytes
    before = lab.groups.statistics(lab.name, device).oom_kills
    with _running(_words(lab, device, "hoard", str(int(limit * _BEYOND)))) as process:
        try:
            code = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
    after = lab.groups.statistics(lab.name, device)
    return after.peak_bytes if code == -signal.SIGKILL and after.oom_kills > before else None
