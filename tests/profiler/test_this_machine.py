"""This machine: measured once, kept, and refused when the file is another machine's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.facts.errors import BadFile
from manyhands.profiler.clock import TimedTrial
from manyhands.profiler.this_machine import identify, this_machine


def _timer(trial: TimedTrial) -> float:
    return {"convolution": 0.02, "product": 0.01, "copy": 0.01, "small": 0.001}[trial.name]


def _never(trial: TimedTrial) -> float:
    raise AssertionError("measured again")


def test_the_numbers_follow_from_the_clock() -> None:
    device = this_machine(threads=1, timer=_timer)
    macs = 2 * 64 * 64 * 9 * 56 * 56 + 256 * 1024 * 512
    assert device.gflops == pytest.approx(6 * macs / 0.03 / 1e9, rel=1e-3)
    assert device.memory_bytes_per_second == pytest.approx(2 * 64 * 2**20 / 0.01)
    assert device.operator_seconds == pytest.approx(2e-6)
    assert not device.estimated
    assert device.memory_bytes > 10**8
    assert "torch" in device.source


def test_it_is_measured_once() -> None:
    first = this_machine(threads=1, timer=_timer)
    assert this_machine(threads=1, timer=_never) == first
    assert this_machine(threads=1, name="laptop", timer=_never).name == "laptop"
    with pytest.raises(AssertionError, match="measured again"):
        this_machine(threads=1, refresh=True, timer=_never)


@pytest.mark.slow
def test_the_real_clock_gives_sensible_numbers() -> None:
    device = this_machine(threads=1)
    assert 0.01 < device.gflops < 1e5
    assert 1e7 < device.memory_bytes_per_second < 1e13
    assert 1e-8 < device.operator_seconds < 1e-2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1"),
        ("[]", "is not the description"),
        (json.dumps({"machine": "a toaster", "cluster": {}}), "describes 'a toaster'"),
        (json.dumps({"machine": identify(1).text, "cluster": {"devices": [{"kind": "local"}]}}), "gflops: is missing"),
    ],
)
def test_a_damaged_file_is_refused(own_cache: Path, content: str, message: str) -> None:
    path = own_cache / "machines" / f"{identify(1).slug}.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(BadFile, match=message):
        this_machine(threads=1, timer=_never)
