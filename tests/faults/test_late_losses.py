"""Workers that report a round after the next one has begun, as GPUs do: the same losses and weights, faults or none."""

from __future__ import annotations

from typing import Any

import pytest

from fault_cluster import PLANS, Fault, FaultCluster, Trip, reference
from manyhands.executor.executor import Executor
from manyhands.executor.late_loss import LateLoss
from manyhands.facts.errors import NotFinite

NAMES = ("a", "b", "c")
FAULT_STEP = 5
pytestmark = pytest.mark.xdist_group("faults")


@pytest.fixture(autouse=True)
def waited_for(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every executor puts its losses off; what was waited for is listed."""
    usual, wait, numbers = Executor.__init__, LateLoss.wait, list[float]()

    def made(self: Executor, *arguments: Any, **options: Any) -> None:
        usual(self, *arguments, **options)
        self.puts_off_losses = True

    def waited(self: LateLoss) -> float:
        numbers.append(wait(self))
        return numbers[-1]

    monkeypatch.setattr(Executor, "__init__", made)
    monkeypatch.setattr(LateLoss, "wait", waited)
    return numbers


def travelled(*faults: Fault) -> Trip:
    with FaultCluster(NAMES, *faults) as cluster:
        return cluster.travel(PLANS["samples"])


def test_nothing_else_changes(waited_for: list[float]) -> None:
    trip = travelled()
    trip.check(reference(PLANS["samples"].micro_batches), generations=1)
    assert len(waited_for) >= len(trip.outcome.losses)


@pytest.mark.parametrize("kind", ["killed", "silent"])
def test_a_worker_is_lost(waited_for: list[float], kind: str) -> None:
    trip = travelled(Fault("a", "backward", kind, step=FAULT_STEP))
    trip.check(reference(PLANS["samples"].micro_batches), generations=2)
    assert waited_for


def test_one_that_is_not_finite_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateLoss, "wait", lambda self: float("nan"))
    with pytest.raises(NotFinite, match=r"(?s)The loss is nan at step 0, on .*exact=True"):
        travelled()
