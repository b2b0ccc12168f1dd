"""The critical path of bare computing, and the executor's overhead over it."""

from __future__ import annotations

import pytest

from manyhands.facts.plan import Plan, Stage
from manyhands_bench.pipeline.overhead import critical_path, executor_overhead
from manyhands_bench.pipeline.torch_setting import BareRound

pytestmark = pytest.mark.xdist_group("bench_pipeline")


def quiet(text: str) -> None:
    """No progress."""


def two_stages(micro_batches: int) -> Plan:
    return Plan("any", 8, (Stage((0, 1), ("a",)), Stage((1, 2), ("b",))), micro_batches=micro_batches)


def alike(micro_batches: int, *stages: tuple[float, float, float]) -> list[BareRound]:
    """Stages whose micro-batches take equally long."""
    return [BareRound([one] * micro_batches, [back] * micro_batches, step) for one, back, step in stages]


def test_the_critical_path_of_two_equal_stages() -> None:
    """M+1 forward passes and M+1 backward passes, as drawn in the papers; and the step."""
    assert critical_path(two_stages(4), alike(4, (1.0, 1.0, 0.5), (1.0, 1.0, 0.25))) == pytest.approx(10.5)


def test_the_critical_path_waits_for_the_slower_stage() -> None:
    assert critical_path(two_stages(4), alike(4, (1.0, 2.0, 0.0), (0.0, 0.0, 0.0))) == pytest.approx(12.0)
    assert critical_path(two_stages(4), alike(4, (1.0, 2.0, 0.0), (10.0, 20.0, 0.0))) == pytest.approx(1 + 4 * 30 + 2)


def test_one_micro_batch_goes_there_and_back() -> None:
    assert critical_path(two_stages(1), alike(1, (1.0, 2.0, 0.1), (3.0, 4.0, 0.2))) == pytest.approx(10.1)


def test_what_holds_up_one_pass_holds_up_the_round() -> None:
    stages = alike(4, (1.0, 1.0, 0.0), (1.0, 1.0, 0.0))
    stages[1].backward[2] += 5.0
    assert critical_path(two_stages(4), stages) == pytest.approx(15.0)


@pytest.mark.slow
def test_overhead_figures() -> None:
    figures = executor_overhead(quiet, True)
    assert float(figures["executor_round_seconds"]) > 0
    assert float(figures["executor_bare_seconds"]) > 0
    assert 0.3 < float(figures["executor_overhead"]) < 5  # other work on this machine moves it
