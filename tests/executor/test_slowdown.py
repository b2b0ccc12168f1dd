"""A slowed device sleeps after computing; a GPU not in its first round, which loads kernels."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from manyhands.executor import slowdown
from manyhands.executor.slowdown import Slowdown


class Slept:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Clock:
    """In place of a GPU's clock: the GPU computes as long as Python launches kernels, or a part of that."""

    part = 1.0

    def __init__(self, device: torch.device, head_start_seconds: float) -> None:
        self.head_start_seconds = head_start_seconds

    def start(self) -> None:
        self.began = time.monotonic()

    def stop(self) -> None:
        self.launched = time.monotonic() - self.began

    def seconds(self) -> list[float]:
        return [self.part * self.launched]

    def launch_seconds(self) -> list[float]:
        return [self.launched]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Slept:
    sleeper = Slept()
    monkeypatch.setattr(slowdown.time, "sleep", sleeper)
    monkeypatch.setattr(slowdown, "synchronize", lambda device: None)
    monkeypatch.setattr(slowdown, "GpuClock", Clock)
    return sleeper


def computed(slowed: Slowdown) -> float:
    """Compute for a while; return the seconds of it."""
    started = slowed.begin()
    while slowed.begin().seconds - started.seconds < 0.005:
        time.monotonic()
    took = slowed.begin().seconds - started.seconds
    slowed.stretch(started)
    return took


def test_it_sleeps_for_what_a_slower_device_takes_longer(slept: Slept) -> None:
    slowed = Slowdown(4.0)
    for _ in range(2):
        slowed.begin_round()
        took = computed(slowed)
        assert slept.seconds.pop() == pytest.approx(3 * took, rel=0.5)
    assert not slept.seconds


def test_a_gpu_is_not_slowed_in_its_first_round(slept: Slept) -> None:
    slowed = Slowdown(4.0, torch.device("cuda", 0))
    assert slowed.slows
    slowed.begin_round()
    computed(slowed)
    assert not slept.seconds
    slowed.begin_round()
    took = computed(slowed)
    assert slept.seconds == [pytest.approx(3 * took, rel=0.5)]


def test_kernels_of_a_gpu_take_longer_and_launching_them_does_not(
    slept: Slept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "part", 0.5)
    slowed = Slowdown(8.0, torch.device("cuda", 0))
    slowed.begin_round()
    slowed.begin_round()
    took = computed(slowed)
    assert slept.seconds == [pytest.approx((8 * 0.5 - 1) * took, rel=0.5)]
    clock = slowed.begin().clock
    assert isinstance(clock, Clock)
    assert clock.head_start_seconds == pytest.approx(took, rel=0.5), "it is kept busy while Python launches"


def test_messages_of_a_gpu_are_not_slowed() -> None:
    """Copies to the machine's memory take no longer on a slower one; a processor packs a message itself."""
    assert not Slowdown(4.0, torch.device("cuda", 0)).of_messages().slows
    assert Slowdown(4.0).of_messages().slows


@pytest.mark.parametrize("threads", [1, 2])
def test_it_does_not_sleep_for_what_it_waited(slept: Slept, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """A GPU that waited for the sums of slow processors was stretched by that, too: its steps took minutes."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    gpu = Slowdown(4.0, torch.device("cuda", 0))
    gpu.begin_round()
    for slowed in (Slowdown(4.0), gpu):
        slowed.begin_round()
        started = slowed.begin()
        with slowed.waiting():
            threading.Event().wait(0.2)
        slowed.stretch(started)
        assert slept.seconds.pop() < 3 * 0.1


def test_a_factor_of_one_changes_nothing(slept: Slept) -> None:
    slowed = Slowdown(1.0)
    slowed.begin_round()
    computed(slowed)
    assert not slept.seconds
    assert not slowed.slows
