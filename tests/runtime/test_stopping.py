"""A job that is asked to stop ends its round, keeps the last step done, and goes on later as if nothing had been.

Whole clusters in this process, in float64; then real workers and real signals.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from test_controlled_jobs import ENDS, Steps, split

from fault_cluster import PLANS, STEPS, Fault, FaultCluster, Trip, assert_equal, assert_near, reference
from groups import slow_if
from manyhands.executor import checkpoint
from manyhands.facts.errors import WorkerLost
from manyhands.facts.plan import Plan
from manyhands.job import base as job
from manyhands.job.stopping import SAME_SECONDS, Stopping, stopping
from manyhands.observe.live import read_live
from manyhands.runtime.retry_policy import RetryPolicy
from real_runs import Pictures, assert_same, names, shared, train, workers

pytestmark = pytest.mark.xdist_group("faults")  # what it is compared with is computed once


def stopped(plan: Plan, step: int, *faults: Fault, **options: Any) -> Trip:
    """A job that is asked to stop when `step` has been told."""
    asked = threading.Event()
    devices = ENDS if plan.order == "replay" else plan.devices
    with FaultCluster(devices, *faults) as cluster:
        return cluster.travel(plan, at_step={step: asked.set}, should_stop=asked.is_set, **options)


def check_goes_on(trip: Trip, plan: Plan, step: int) -> int:
    """What was stopped, and what goes on from there in a cluster of its own, are together one undisturbed run."""
    outcome, whole = trip.outcome, reference(1 if plan.order == "replay" else plan.micro_batches)
    assert outcome.is_stopped
    assert outcome.state is not None
    done = outcome.state.steps_done
    assert step < done < STEPS
    assert trip.saved[-1] == done, "the last step done was saved"
    assert [one for one, _ in trip.steps] == list(range(done)), "every step that was told, and no other"
    for fault in trip.cluster.faults:
        assert len(fault.fired) == 1, fault
    with FaultCluster(ENDS if plan.order == "replay" else plan.devices) as cluster:
        rest = cluster.travel(plan, start=outcome.state)
    assert rest.outcome.state is not None
    assert_near([*outcome.losses, *rest.outcome.losses], whole.losses)
    assert_equal(rest.outcome.state.weights, whole.state.weights)
    assert_equal(rest.outcome.state.optimizer, whole.state.optimizer)
    assert rest.outcome.state.scalars == whole.state.scalars
    return done


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("name", "step", "backup_every"),
    [
        pytest.param(name, step, every, marks=slow_if((name, step, every) not in QUICK))
        for QUICK in [{("hybrid", 1, 2), ("tiles", 2, 0)}]
        for name in PLANS
        for step in (0, 1, 2, 3)
        for every in (0, 2)
    ],
)
def test_the_last_step_done_is_kept_and_gone_on_from(name: str, step: int, backup_every: int) -> None:
    plan = PLANS[name]
    trip = stopped(plan, step, backup_every=backup_every)
    done = check_goes_on(trip, plan, step)
    assert done <= step + 4, "no more than what was under way was done first"
    assert trip.logged == []


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_split_ends_its_round_early(step: int) -> None:
    """Its only round, of which no step has been told yet."""
    asked, plan = threading.Event(), split(1, mini_batches=STEPS)

    class Asking(Steps):
        def should_change(self, steps_done: int) -> bool:
            if steps_done > step:
                asked.set()
            return False

    with FaultCluster(ENDS) as cluster:
        trip = cluster.travel(plan, controller=Asking(), should_stop=asked.is_set)
    check_goes_on(trip, plan, step)


def test_a_pilot_is_not_asked_any_more() -> None:
    controller = Steps(changes=(3,))
    trip = stopped(split(1), 1, controller=controller, rewrite=controller.plan)
    assert controller.asked == 0
    check_goes_on(trip, split(1), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "nth"),
    [
        ("prepare", 2),
        pytest.param("load", 2, marks=pytest.mark.slow),
        pytest.param("survey", 1, marks=pytest.mark.slow),
    ],
)
def test_one_is_lost_while_it_stops(place: str, nth: int) -> None:
    """Copies are where they belong: what is left has everything of some step."""
    fault = Fault("b", place, nth=nth)
    trip = stopped(PLANS["hybrid"], 3, fault, backup_every=1)
    outcome, whole = trip.outcome, reference(2)
    assert len(fault.fired) == 1
    assert outcome.is_stopped
    assert outcome.state is not None
    done = outcome.state.steps_done
    assert trip.saved[-1] == done >= 1
    with FaultCluster(("a", "b", "c")) as cluster:
        rest = cluster.travel(PLANS["hybrid"], start=outcome.state)
    assert_near([*outcome.losses[:done], *rest.outcome.losses], whole.losses)
    assert rest.outcome.state is not None
    assert_equal(rest.outcome.state.weights, whole.state.weights)


def test_while_others_are_waited_for_it_ends_at_once() -> None:
    """With too few workers there may never be another step."""
    asked = threading.Event()
    with (
        FaultCluster(("a", "b", "c"), Fault("b", "backward", step=3)) as cluster,
        pytest.raises(KeyboardInterrupt),
    ):
        cluster.travel(
            PLANS["hybrid"], snapshots=(2,), retry_policy=RetryPolicy("light", min_devices=3, wait_seconds=60.0),
            at_event={"waiting": asked.set}, should_stop=asked.is_set,
        )  # fmt: skip
    assert cluster.trip is not None
    assert cluster.trip.saved == [2]


@pytest.mark.slow
def test_asked_after_the_last_step_it_is_just_finished() -> None:
    trip = stopped(PLANS["samples"], STEPS - 1)
    trip.check(reference(1))
    assert not trip.outcome.is_stopped


@pytest.mark.slow
def test_nobody_left() -> None:
    """What cannot be saved is said as the loss it is."""
    with pytest.raises((WorkerLost, KeyboardInterrupt)):
        stopped(PLANS["samples"], 2, Fault("a", "survey", also=("b", "c")))


# Signals


def test_a_signal_so_soon_after_another_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("manyhands.job.stopping.time.monotonic", lambda: now[0])
    with Stopping() as found:
        found.is_patient = True
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += SAME_SECONDS / 2
        os.kill(os.getpid(), signal.SIGTERM)
        assert found.is_asked
        now[0] += SAME_SECONDS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_where_nothing_is_under_way_it_ends_at_once() -> None:
    done: list[str] = []
    with Stopping(at_once=lambda: done.append("at once")) as found:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert not done, "that was the first"
        with stopping() as inner:
            assert inner is found
        found._heard_at -= 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert done == ["at once"]


def test_whoever_hears_signals_himself_goes_on_doing_so() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with stopping() as found:
            signal.raise_signal(signal.SIGINT)
            assert not found.is_asked
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_has_none_of_its_own() -> None:
    found: list[bool] = []

    def look() -> None:
        with stopping() as inner:
            found.append(inner.is_asked)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    assert found == [False]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None], ids=["SIGINT", "SIGTERM", "raised"])
def test_a_signal_in_train(number: signal.Signals | None, tmp_path: Path) -> None:
    """The round ends, the module and the newest checkpoint hold the last step done, and it can be gone on from."""
    with workers(2) as coordinator:
        plan = shared(names(coordinator), 5, 7)
        whole = train(coordinator, plan, tmp_path / "whole", steps=12)

        def at_step(step: int, loss: float, seconds: float) -> None:
            if step == 4:
                if number is None:
                    raise KeyboardInterrupt
                signal.raise_signal(number)

        folder = tmp_path / "stopped"
        with pytest.raises(KeyboardInterrupt, match=r"of 12 steps are done.*\n.*resume="):
            train(coordinator, plan, folder, steps=12, on_step=at_step)
        newest = checkpoint.latest(folder)
        assert newest is not None
        done = int(newest.name.rpartition("-")[2])
        assert 5 <= done <= 8
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [(one["event"], one["step"]) for one in events][-1] == ("stopped", done)
        assert not [one for one in events if one["event"] in ("failed", "finished")]
        rest = train(coordinator, plan, folder, steps=12, resume=True)
        assert rest.result.losses == whole.result.losses
        assert_same(rest.state, whole.state)


@pytest.mark.slow
def test_while_it_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is trained, and kept: there is nothing to go on with."""

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with workers(2) as coordinator:
        monkeypatch.setattr(job.Job, "evaluated", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"^All 3 steps are done\. Checkpoint: .*step-000003$"):
            train(coordinator, shared(names(coordinator), 5, 7), tmp_path / "run", steps=3, test=Pictures())
    live = read_live(tmp_path / "run")
    assert live is not None
    assert live.state == "stopped"
