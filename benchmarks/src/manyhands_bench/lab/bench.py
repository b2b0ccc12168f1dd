"""Figures of `manyhands bench lab`: requested against measured values, over the whole range that labs use."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time

import psutil

from manyhands.facts.cluster import Cluster, LabCluster, preset
from manyhands.facts.device import Device
from manyhands.facts.lab import Played, Seat, play, scale_text
from manyhands.facts.link import Link
from manyhands.lab import groups, measure, record
from manyhands.lab.lab import Lab
from manyhands.lab.removal import labs, take_down
from manyhands.lab.spaces import Spaces, has_netem
from manyhands.profiler.this_machine import identify
from manyhands.session.lab_session import check_possible
from manyhands_bench.figures import Figures, Progress

RATES_MBIT = (0.05, 0.5, 5, 50, 100, 480, 1000)
DELAYS_MS = (1, 2, 5, 10, 20, 40)
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
_MBIT = 1e6 / 8
_NAME = "bench"
_MEMORY_BYTES = 256 * 10**6
_SHARE_SECONDS = 3.0
_UP_DOWN_REPEATS = 5
_RATE_REPEATS = 5
"""Repeats of which the median counts: one may fall into a moment in which this machine was busy elsewhere."""
_QUICK_MBIT = 5
"""The rate below which rates are measured once, for many seconds."""
_START_SECONDS = 20.0


def _pair(delay_seconds: float, rate: float = math.inf) -> Played:
    """Return two devices on one core each."""
    cores = sorted(os.sched_getaffinity(0))
    devices = tuple(
        Device(name=name, gflops=1.0, memory_bytes=_MEMORY_BYTES, up_bytes_per_second=rate, down_bytes_per_second=rate)
        for name in ("a", "b")
    )
    seats = tuple(
        Seat(device.name, 1.0, (cores[place % len(cores)],), _MEMORY_BYTES) for place, device in enumerate(devices)
    )
    return Played(1.0, 1, Cluster(_NAME, devices, Link(math.inf, delay_seconds)), seats)


def bench_lab(quick: bool, say: Progress) -> Figures:
    """Return every figure of `manyhands bench lab`."""
    check_possible()
    figures: Figures = {
        "machine": identify(1).text,
        "lab_setting": f"{scale_text(1.0)}; rates count bits of Ethernet frames, of which TCP's payload is 0.956; "
        f"medians of {_RATE_REPEATS} from {_QUICK_MBIT} Mbit/s on; delay is half of the round trip through "
        f"{'netem' if has_netem() else 'the user-space switch'}",
    }
    figures |= _rates(RATES_MBIT[1::2] if quick else RATES_MBIT, say)
    figures |= _delays(DELAYS_MS[::3] if quick else DELAYS_MS, say)
    figures |= _shares(SHARES[::3] if quick else SHARES, say)
    figures |= _memory(say)
    figures |= _up_down(1 if quick else _UP_DOWN_REPEATS, say)
    figures |= _leftovers(say)
    return figures


def _rates(rates: tuple[float, ...], say: Progress) -> Figures:
    """Measure both directions between two devices, at 0 ms (through the bridge) and at 1 ms (through the switch,
    without netem)."""
    figures: Figures = {}
    worst = 0.0
    for delay_ms in (0, 1):
        with Lab.up(_pair(delay_ms / 1e3, rates[0] * _MBIT), _NAME, owned=True) as lab:
            for rate in rates:
                say(f"rate, {rate:g} Mbit/s at {delay_ms} ms")
                for device in ("a", "b"):
                    lab.spaces.set_rates(device, rate * _MBIT, rate * _MBIT)
                repeats = _RATE_REPEATS if rate >= _QUICK_MBIT else 1
                got = [
                    statistics.median(measure.rate(lab, *ends, rate * _MBIT) / _MBIT for _ in range(repeats))
                    for ends in (("a", "b"), ("b", "a"))
                ]
                error = max(abs(rate_got - rate) / rate for rate_got in got)
                figures[f"rate_got_mbit_{rate:g}_delay_{delay_ms}ms"] = min(got)
                worst = max(worst, error)
    return {"rate_error": worst, **figures}


def _delays(delays: tuple[float, ...], say: Progress) -> Figures:
    """Measure half the round trip of small datagrams, idle and with every core busy."""
    figures: Figures = {}
    worst = 0.0
    for delay in delays:
        with Lab.up(_pair(delay / 1e3), _NAME, owned=True) as lab:
            say(f"delay, {delay:g} ms")
            idle = measure.round_trip(lab, "a", "b") / 2 * 1e3
            burning = [
                subprocess.Popen([sys.executable, "-P", "-m", "manyhands.lab.probes", "burn", "30"])
                for _ in os.sched_getaffinity(0)
            ]
            try:
                busy = measure.round_trip(lab, "a", "b") / 2 * 1e3
            finally:
                for process in burning:
                    process.kill()
                    process.wait()
        figures |= {f"delay_got_ms_{delay:g}": idle, f"delay_busy_got_ms_{delay:g}": busy}
        worst = max(worst, abs(idle - delay) / delay)
    busiest = max(abs(float(figures[f"delay_busy_got_ms_{delay:g}"]) - delay) / delay for delay in delays)
    return {"delay_error": worst, "delay_error_busy": busiest, **figures}


def _shares(requested: tuple[float, ...], say: Progress) -> Figures:
    figures: Figures = {}
    worst = 0.0
    with Lab.up(_pair(0.0), _NAME, owned=True) as lab:
        for share in requested:
            say(f"share of the processor, {share:.0%}")
            lab.groups.set_cpu(lab.name, "a", share)
            got = measure.shares(lab, ["a"], _SHARE_SECONDS)["a"]
            figures[f"cpu_got_{share:g}"] = got
            worst = max(worst, abs(got - share) / share)
    return {"cpu_error": worst, **figures}


def _memory(say: Progress) -> Figures:
    say("memory")
    with Lab.up(_pair(0.0), _NAME, owned=True) as lab:
        killed_at = measure.memory_at_death(lab, "a")
    return {"memory_error": abs(killed_at - _MEMORY_BYTES) / _MEMORY_BYTES if killed_at is not None else math.inf}


def _up_down(repeats: int, say: Progress) -> Figures:
    """Measure the seconds to bring six devices with delays and limits up and down again."""
    played = play(
        LabCluster(preset("pi3x6")), core_gflops=100.0, cores=sorted(os.sched_getaffinity(0))
    )  # the speed decides only their shares
    seconds = []
    for repeat in range(repeats):
        say(f"six devices up and down, {repeat + 1}")
        start = time.perf_counter()
        with Lab.up(played, _NAME, owned=True):
            pass
        seconds.append(time.perf_counter() - start)
    return {"up_down_seconds": statistics.median(seconds)}


_OWNER = """
import sys, time
from manyhands_bench.lab.bench import _pair
from manyhands.lab.lab import Lab
lab = Lab.up(_pair(0.001), sys.argv[1], owned=sys.argv[2] == "owned")
print("up", flush=True)
time.sleep(600)
"""


def _leftovers(say: Progress) -> Figures:
    """Count what remains after `down`, after the owner was killed, and after a later `down` of a lab without owner."""
    say("leftovers")
    count = len(_remains())
    for owned in ("owned", "left"):
        process = subprocess.Popen([sys.executable, "-c", _OWNER, _NAME, owned], stdout=subprocess.PIPE, text=True)
        measure.wait_for_word(process, "up")
        process.kill()
        process.communicate()
        if owned == "left":
            take_down(_NAME)
        end = time.monotonic() + _START_SECONDS
        while (remains := _remains()) and time.monotonic() < end:
            time.sleep(0.05)
        count += len(remains)
        take_down(_NAME)
    return {"leftovers": count}


def _remains() -> list[str]:
    """Return the namespaces, groups, records and processes that bear the lab's name."""
    remains = [f"namespace {name}" for name in Spaces.names_of(_NAME)]
    remains += [f"group {device}" for device in groups.find().devices(_NAME)]
    remains += [f"record {name}" for name in record.names() if name == _NAME]
    remains += [f"lab {name}" for name in labs() if name == _NAME]
    return remains + [f"process {pid}" for pid in _supervisors()]


def _supervisors() -> list[int]:
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "manyhands.lab.supervisor" in words and _NAME in words:
            pids.append(process.pid)
    return pids
