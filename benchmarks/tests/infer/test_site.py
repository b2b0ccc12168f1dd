"""Seconds of a stream that has run."""

from __future__ import annotations

import pytest

from manyhands.executor.log import DeviceLog, MeasuredSpan
from manyhands_bench.infer.site import WARM_UPS, Ran


def test_a_stream_is_timed_after_it_has_warmed_up() -> None:
    turns, at_once = WARM_UPS + 3, WARM_UPS + 4
    ran = Ran(turns)
    for number in range(turns):
        ran.asked.append(float(number))
        ran.answered.append(number + (9.0 if number < WARM_UPS else 0.2 + 0.1 * (number - WARM_UPS)))
    begin = ran.answered[-1]
    gaps = [3.0] * WARM_UPS + [0.5, 0.5, 0.5, 0.5]
    ran.answered += [begin + sum(gaps[: number + 1]) for number in range(at_once)]
    assert ran.latency == pytest.approx(0.3)
    assert ran.interval == pytest.approx(0.5)


def test_answers_of_a_batch_count_once() -> None:
    """The first batch has what was there when it began, the last what was left: neither is counted."""
    batches = [(1.0, 3), (2.0, 8), (3.0, 8), (4.0, 8), (5.0, 5)]
    answered = [moment + 1e-4 * number for moment, count in batches for number in range(count)]
    assert Ran(0, answered=answered).interval == pytest.approx(3 / 24)
    assert Ran(0, answered=answered[:19]).interval == pytest.approx(2 / 16)


def test_a_sample_is_inside_from_the_first_device_to_the_last() -> None:
    def span(device: str, start: float, end: float, step: int, kind: str = "forward") -> MeasuredSpan:
        return MeasuredSpan(device, "compute", start, end, kind, "", step)

    one = DeviceLog("a", peak_bytes=5, spans=[span("a", 1, 2, 7), span("a", 0, 9, 7, "send"), span("a", 11, 12, 8)])
    two = DeviceLog("b", peak_bytes=8, spans=[span("b", 1.5, 4, 7), span("b", 10, 14, 8)])
    ran = Ran(2, logs={"a": one, "b": two})
    assert ran.inside == pytest.approx(3.5)
    assert ran.peak_bytes == 8
