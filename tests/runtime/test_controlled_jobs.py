"""A split that is steered: rounds that end early, cuts that move, K that changes, at every step; nothing is lost by it.

Whole clusters in this process, in float64; K = 0, so that all of it is one device's training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fault_cluster import LIMIT_SECONDS, STEPS, Fault, FaultCluster, Trip, reference
from manyhands.facts.plan import Plan, Replay, Single, Stage
from manyhands.runtime.control_messages import State
from manyhands.runtime.control_parts import Arrival
from manyhands.runtime.gathering import Gathering
from real_runs import BATCH, LAYERS

pytestmark = pytest.mark.xdist_group("faults")  # what it is compared with is computed once
ENDS = ("a", "b")


def split(cut: int, *, mini_batches: int = 4, k: int = 0) -> Plan:
    if cut == LAYERS:
        stages: tuple[Stage, ...] = (Stage((0, LAYERS), ENDS[:1], Single()),)
    else:
        stages = (Stage((0, cut), ENDS[:1], Single()), Stage((cut, LAYERS), ENDS[1:], Single()))
    return Plan(
        "Sequential", mini_batches * BATCH, stages, micro_batches=mini_batches, order="replay", replay=Replay(k),
    )  # fmt: skip


class Steps:
    """Wants another plan after these steps, and must have one at those; the cut goes from one place to the next."""

    def __init__(self, changes: Sequence[int] = (), stops: Sequence[int] = (), cuts: Sequence[int] = (2, 1)) -> None:
        self.changes, self.stops, self.cuts = list(changes), stops, list(cuts)
        self.began_at: list[int] = []
        self.asked = 0

    def stop_at(self, step: int) -> int | None:
        return next((stop for stop in self.stops if stop > step), None)

    def should_change(self, steps_done: int) -> bool:
        if self.changes and steps_done >= self.changes[0]:
            self.changes.pop(0)
            return True
        return False

    def arrived(self, device: str, arrivals: Sequence[Arrival]) -> None: ...

    def began(self, plan: Plan, steps_done: int) -> None:
        self.began_at.append(steps_done)

    def plan(self, old: Plan, names: tuple[str, ...]) -> Plan:
        self.asked += 1
        if ENDS[1] not in names:
            return split(LAYERS)
        return split(self.cuts[self.asked % len(self.cuts)])


def trained(controller: Steps, *faults: Fault, **options: object) -> Trip:
    with FaultCluster(ENDS, *faults) as cluster:
        return cluster.travel(split(1), controller=controller, rewrite=controller.plan, **options)  # type: ignore[arg-type]


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("backup_every", [0, 2])
@pytest.mark.parametrize("changes", [(1,), (2, 3), (4,), (5, 6), (STEPS - 1,), (STEPS,)])
def test_a_change_at_any_step(changes: tuple[int, ...], backup_every: int) -> None:
    controller = Steps(changes)
    trip = trained(controller, backup_every=backup_every)
    trip.check(reference(1))
    assert trip.outcome.staleness == [0] * STEPS
    assert trip.outcome.generations == 1 + controller.asked
    assert trip.saved[-1] == STEPS, "the last state was saved"
    if changes[0] < STEPS - 1:
        assert controller.asked >= 1


def test_a_change_at_every_step() -> None:
    controller = Steps(range(1, STEPS + 1), cuts=(1, 2, LAYERS))
    trip = trained(controller, backup_every=0, snapshots=(3, 5))
    trip.check(reference(1))
    assert controller.asked >= 2
    assert trip.saved[-1] == STEPS
    assert trip.saved == sorted(set(trip.saved))
    for step in (3, 5):  # saved where the round under way ends: of four steps, or fewer if it pauses
        assert any(step <= saved < step + 4 for saved in trip.saved), (
            f"the checkpoint of step {step} was lost by a pause"
        )


def test_a_pause_waits_for_the_checkpoint_of_a_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, late = Gathering._fetched, []

    def held(self: Gathering, name: str, message: State, *rest: Any) -> dict[str, torch.Tensor] | None:
        if message.step == 4:
            limit = time.monotonic() + LIMIT_SECONDS
            while not self.run.is_paused and time.monotonic() < limit:
                time.sleep(0.005)
            time.sleep(0.1)  # a generation that did not wait would be over
            late.append(self.run.is_paused)
        return fetched(self, name, message, *rest)

    monkeypatch.setattr(Gathering, "_fetched", held)
    trip = trained(Steps((4,)), backup_every=0, snapshots=(4,))
    trip.check(reference(1))
    assert late
    assert all(late), "the pause came first"
    assert trip.saved == [4, STEPS]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("stops", [(1,), (3, 6), (4,), (STEPS,)])
def test_a_plan_that_ends_at_a_step(stops: tuple[int, ...]) -> None:
    controller = Steps(stops=stops)
    trip = trained(controller)
    trip.check(reference(1))
    firsts = [facts["step"] for facts in trip.outcome.recoveries]
    assert firsts == [stop for stop in stops if stop < STEPS]


def test_copies_do_not_pile_up_without_backups() -> None:
    controller = Steps(range(1, STEPS), cuts=(LAYERS, LAYERS))
    with FaultCluster(ENDS) as cluster:
        trip = cluster.travel(split(1), controller=controller, rewrite=controller.plan, backup_every=0)
        assert controller.asked >= 2
        assert len(cluster.workers["a"].keeping.listing()[0]) <= 3
    trip.check(reference(1))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("step", [0, 4])
def test_one_is_lost_and_then_it_changes(step: int) -> None:
    controller = Steps((6,))
    trip = trained(controller, Fault("b", "backward", step=step), backup_every=2)
    trip.check(reference(1))
    assert trip.outcome.plan is not None
    assert trip.outcome.plan.devices == ("a",)
