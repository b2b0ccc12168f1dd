"""Measuring and planning again while training: when it is worth it, what it changes, and that nothing is lost by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional

from hand_made import cluster as made_cluster
from hand_made import even_profile
from manyhands.data.loader import Prefetcher
from manyhands.data.order import BatchOrder
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, WorkerLost
from manyhands.facts.plan import ByTiles, Plan, Single, Stage
from manyhands.facts.profile import Profile
from manyhands.files.documents import read_document
from manyhands.graph.capture import capture
from manyhands.job import refining
from manyhands.job.refining import Refinement, Refiner
from manyhands.job.replanning import KEPT, SWITCHED
from manyhands.plans.local_cluster import threads_each
from manyhands.plans.local_profiles import StepCosts, stored_step_costs
from manyhands.plans.planned import Planned
from manyhands.plans.simulating import simulate
from manyhands.runtime.controller import Change
from manyhands.runtime.coordinator import Coordinator
from manyhands.session import step_costs
from manyhands.training.train import TrainJob
from real_runs import BATCH, LAYERS, SGD, Pictures, assert_close, names, network, shared, train, workers

STEPS = 9
NAMES = ("a", "b")


# When


class Replans:
    """A re-planner of two devices, which counts what it is asked for."""

    backup_every = 0

    def __init__(self) -> None:
        self.graph = capture(network(dropout=0.0), torch.zeros(2, 1, 8, 8, dtype=torch.float64))
        self.asked: list[str] = []

    def __call__(self, plan: Plan, names: tuple[str, ...], how: str) -> Change:
        self.asked.append("replan")
        return Change(plan, {}, how)

    def learnt(self, cluster: Cluster, profile: Profile) -> None:
        self.asked.append("learnt")

    def begins_anew(self, plan: Plan, seconds: float) -> None:
        self.asked.append("begins anew")

    def kernels(self, plan: Plan) -> dict[str, Any]:
        return {}


class Refined:
    """A refiner by a clock that a test sets, between two plans of which the second is faster once all is known."""

    def __init__(self, seconds: float = 1.0, last_step: int = 1000, then: Plan | None = None) -> None:
        self.replans = Replans()
        network = self.replans.graph.network
        self.cluster = made_cluster(NAMES)
        self.profile = even_profile(network, NAMES)
        self.slow = Plan("Sequential", BATCH, (Stage((0, LAYERS), NAMES[:1], Single()),))
        self.fast = then or shared(NAMES, 6, 6)
        prediction = simulate(self.slow, network, self.cluster, self.profile)
        planned = PlannedRun(self.slow, network, self.cluster, self.profile, prediction, last_step, Path())
        self.now, self.written = 0.0, 0
        self.error: Exception | None = None
        course = Refinement(seconds, last_step, self.measure, lambda *_: self.fast, self.on_measured, lambda: self.now)
        self.refiner = Refiner(self.replans, planned, course)  # type: ignore[arg-type]

    def measure(self) -> tuple[Cluster, Profile]:
        self.now += 1.0
        if self.error is not None:
            raise self.error
        return self.cluster, self.profile

    def on_measured(self, cluster: Cluster, profile: Profile) -> None:
        self.written += 1

    def after(self, seconds: float, steps: int) -> bool:
        """Whether a change is due after so long and so many steps."""
        self.now = seconds
        return self.refiner.should_change(steps)

    def begin(self) -> Refined:
        self.refiner.began(self.slow, 0)
        return self


def test_it_takes_a_thirtieth_of_the_time_at_most() -> None:
    run = Refined(seconds=1.0)
    assert not run.after(100.0, 100), "the first round is not done"
    run.now = 0.0
    run.begin()
    assert [run.after(float(seconds), seconds) for seconds in (1, 29, 30)] == [False, False, True]


def test_a_short_run_keeps_its_plan() -> None:
    run = Refined(seconds=1.0, last_step=59).begin()
    assert not any(run.after(float(step), step) for step in range(1, 60))
    assert run.refiner.is_over
    slow = Refined(seconds=1.0, last_step=60).begin()
    assert not slow.after(270.0, refining.LEAST_STEPS - 1), "too few steps to tell what one takes"
    assert slow.after(300.0, refining.LEAST_STEPS)


def test_it_switches_to_the_faster_plan_once() -> None:
    run = Refined().begin()
    assert run.after(30.0, 30)
    change = run.refiner(run.slow, NAMES, "auto")
    assert (change.plan, change.how) == (run.fast, SWITCHED)
    assert change.reason.startswith("Another plan is faster, after measuring for 1 s more: ")
    assert run.replans.asked == ["learnt", "begins anew"]
    assert run.written == 1
    assert not run.after(900.0, 900)


def test_it_keeps_the_plan_where_another_gains_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Refined().begin()
    assert run.after(30.0, 30)
    monkeypatch.setattr(refining, "LEAST_GAIN", 100.0)
    change = run.refiner(run.slow, NAMES, "auto")
    assert (change.plan, change.how) == (run.slow, KEPT)
    assert change.reason.startswith("The plan stays, after measuring for 1 s more: ")
    few = Refined(last_step=60).begin()
    assert few.after(30.0, 30)
    few.refiner.steps = 59  # what is gained in the last step is less than was spent
    monkeypatch.setattr(refining, "LEAST_GAIN", 1.0)
    assert few.refiner(few.slow, NAMES, "auto").how == KEPT


def test_who_comes_or_goes_has_the_job_planned_as_ever() -> None:
    run = Refined().begin()
    assert run.after(30.0, 30)
    assert run.refiner(run.slow, NAMES[:1], "light").how == "light"
    assert run.replans.asked == ["replan"]
    assert not run.after(60.0, 60)
    early = Refined().begin()
    assert early.refiner(early.slow, NAMES, "heavy").how == "heavy", "it was not due"


def test_a_failed_measurement_keeps_the_plan_and_a_lost_worker_does_not() -> None:
    run = Refined().begin()
    run.error = BadValue("No room.")
    assert run.after(30.0, 30)
    change = run.refiner(run.slow, NAMES, "auto")
    assert (change.plan, change.how) == (run.slow, KEPT)
    assert "No room." in change.reason
    lost = Refined().begin()
    lost.error = WorkerLost("b is lost.")
    assert lost.after(30.0, 30)
    with pytest.raises(WorkerLost):
        lost.refiner(lost.slow, NAMES, "auto")
    assert lost.refiner(lost.slow, NAMES[:1], "light").how == "light"


# What it leaves as it was


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def planned_in_turn(monkeypatch: pytest.MonkeyPatch, *plans: Plan) -> None:
    """The strategy makes these plans, one after another; the next is always faster, and worth it at once."""
    left = list(plans)
    monkeypatch.setattr(
        TrainJob, "_made", lambda *_: Planned(left.pop(0) if len(left) > 1 else left[0], [], is_partial=True)
    )
    monkeypatch.setattr(Refiner, "_step_seconds", lambda itself, plan: 1e6 - 1e3 * plans.index(_plain(plan)))
    monkeypatch.setattr(refining, "PART", 1e9)
    monkeypatch.setattr(refining, "LEAST_STEPS", 2)
    monkeypatch.setattr(refining, "LEAST_GAIN", 0.0)


def _plain(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, homes={})


def plans_of(devices: tuple[str, ...]) -> dict[str, Plan]:
    stages = (Stage((0, 1), devices[:1], Single()), Stage((1, LAYERS), devices[1:], Single()))
    tiled = (Stage((0, 2), devices, ByTiles((2, 1))), Stage((2, LAYERS), devices[:1], Single()))
    return {
        "samples": shared(devices, 5, 7),
        "pipeline": Plan("Sequential", BATCH, stages, micro_batches=1),
        "tiles": Plan("Sequential", BATCH, tiled),
    }


def plainly_trained(steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, data = network(dropout=0.0), Pictures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    losses = []
    with Prefetcher(data, BatchOrder(len(data), BATCH, True, 5), 0, steps) as batches:
        for _, inputs, targets in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return model.state_dict(), losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("samples", "pipeline"), pytest.param("tiles", "samples", marks=pytest.mark.slow),
                          pytest.param("pipeline", "tiles", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_run_that_switches_its_plan_trains_as_one_device(
    first: str, second: str, cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_of(names(cluster))
    planned_in_turn(monkeypatch, plans[first], plans[second])
    said: list[str] = []
    ran = train(cluster, "auto", tmp_path, model=network(dropout=0.0), steps=STEPS, say=said.append)
    state, losses = plainly_trained(STEPS)
    assert_close(ran.state, state)
    assert ran.result.losses == pytest.approx(losses, rel=1e-10)
    assert _plain(ran.planned.plan) == plans[first]
    assert _plain(ran.result.plan) == plans[second]
    assert ran.result.recoveries == []
    assert sum(text.startswith("Another plan is faster") for text in said) == 1
    events = (tmp_path / "events.jsonl").read_text()
    assert events.count('"replanned"') == 1
    assert SWITCHED in events
    assert Plan.from_dict(read_document(tmp_path / "plan.yaml")) == ran.result.plan
    monkeypatch.setattr(TrainJob, "_made", None)  # a resumed run plans nothing
    again = train(cluster, "auto", tmp_path, model=network(dropout=0.0), steps=STEPS + 3, resume=True)
    assert again.planned.plan == again.result.plan == ran.result.plan
    state, losses = plainly_trained(STEPS + 3)
    assert_close(again.state, state)


@pytest.mark.xdist_group("training")
def test_measuring_what_a_step_costs_leaves_the_state_with_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(refining, "PART", 1e9)
    monkeypatch.setattr(refining, "LEAST_STEPS", 2)
    monkeypatch.setattr(step_costs, "USUAL", StepCosts(0.0, 0.0))  # two workers pay, before they are measured
    said: list[str] = []
    ran = train(
        Cluster.local(2), "auto", tmp_path / "run", model=network(dropout=0.0), steps=STEPS, say=said.append,
        profile_seconds=0.05,
    )  # fmt: skip
    assert any(" after measuring for " in text for text in said), said
    assert stored_step_costs(Cluster.local(2), threads_each(2)) is not None
    assert ran.result.recoveries == []  # no step is run again: what the workers held was still there
    state, losses = plainly_trained(STEPS)
    assert_close(ran.state, state)
    assert ran.result.losses == pytest.approx(losses, rel=1e-10)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("given", ["plan", "tune", "start", "thorough"])
def test_where_nothing_is_to_change_nothing_is_refined(
    given: str, cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_of(names(cluster))
    planned_in_turn(monkeypatch, plans["samples"], plans["pipeline"])
    options: dict[str, dict[str, Any]] = {
        "plan": {}, "tune": {"tune": 2}, "start": {"feed": "start"}, "thorough": {"profile_seconds": 0},
    }  # fmt: skip
    ran = train(
        cluster, plans["samples"] if given == "plan" else "auto", tmp_path, steps=6, optimizer=SGD, **options[given]
    )
    assert "replanned" not in (tmp_path / "events.jsonl").read_text()
    assert _plain(ran.result.plan) == plans["samples"]
