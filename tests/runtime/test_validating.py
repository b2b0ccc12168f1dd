"""A job that validates between two rounds: results are those of plain PyTorch with the weights of that step, training
goes on as if nothing had been, and a worker that is lost meanwhile costs nothing but time.

Whole clusters in this process, in float64.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional

from fault_cluster import PLANS, STEPS, Fault, FaultCluster, Trip, captured, reference
from manyhands.facts.errors import BadValue
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.job.validation import HeldOut, JobValidation, Validated
from manyhands.runtime.validating import CheckpointRequests
from real_runs import BATCH, LAYERS, Pictures, network

pytestmark = pytest.mark.xdist_group("faults")  # captured once, and what it is compared with is computed once

NAMES = ("a", "b", "c")
HELD_OUT = 29
"""Samples: no whole number of batches."""
EVERY = 4


@cache
def expected(micro_batches: int, steps: int) -> tuple[float, float]:
    """Loss and accuracy of the plain module with one device's weights after so many steps."""
    model, data = network(), Pictures(HELD_OUT)
    model.load_state_dict(reference(micro_batches, steps=steps).state.weights, strict=False)
    with torch.no_grad():
        outputs = model.eval()(data.pictures)
    loss = float(functional.cross_entropy(outputs, data.classes))
    return loss, float((outputs.argmax(1) == data.classes).double().mean())


class Followed:
    """A job with validations, and what they reported."""

    def __init__(self, plan: str, *faults: Fault, every: int = EVERY, metrics: Any = None, **options: Any) -> None:
        self.plan, self.results, self.failures = plan, list[Validated](), list[BadValue]()
        with FaultCluster(NAMES, *faults) as cluster:
            validation = JobValidation(
                cluster.coordinator, HeldOut(Pictures(HELD_OUT), every, metrics or {}), captured(),
                functional.cross_entropy, steps=STEPS, steps_per_epoch=6, validated=0, report=self._take,
                should_stop=lambda: bool(self.failures),
            )  # fmt: skip
            self.trip: Trip = cluster.travel(
                PLANS[plan], validation=validation, should_stop=lambda: bool(self.failures), **options
            )

    def _take(self, results: Validated, failure: BadValue | None) -> None:
        if failure is None:
            self.results.append(results)
        else:
            self.failures.append(failure)

    def check(self, *steps: int, generations: int | None = 1) -> None:
        self.trip.check(reference(PLANS[self.plan].micro_batches), generations=generations)
        assert [one.steps_done for one in self.results] == list(steps)
        for one in self.results:
            loss, accuracy = expected(PLANS[self.plan].micro_batches, one.steps_done)
            assert one.metrics["loss"] == pytest.approx(loss, rel=1e-10)
            assert one.metrics["accuracy"] == pytest.approx(accuracy, rel=1e-12)
            assert one.samples == HELD_OUT


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("plan", PLANS)
def test_it_equals_the_plain_module_at_every_step_it_is_due(plan: str) -> None:
    """The last step is one of them: what is saved of it is saved after it."""
    followed = Followed(plan)
    followed.check(EVERY, STEPS)
    assert followed.trip.saved[-1] == STEPS
    assert [one.epoch for one in followed.results] == [0, 1]


@pytest.mark.quick("samples")
@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on_to_the_last_bit(plan: str) -> None:
    with FaultCluster(NAMES) as cluster:
        plain = cluster.travel(PLANS[plan]).outcome
    validated = Followed(plan, every=2).trip.outcome
    assert plain.losses == validated.losses
    assert plain.state is not None
    assert validated.state is not None
    for one, other in (
        (plain.state.weights, validated.state.weights),
        (plain.state.optimizer, validated.state.optimizer),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    for name, log in plain.logs.items():  # those of all generations together
        assert validated.logs[name].rounds == validated.logs[name].same_actions == log.rounds == STEPS
        assert (validated.logs[name].sent_bytes, validated.logs[name].samples) == (log.sent_bytes, log.samples)


def in_the_midst(device: str, kind: str) -> tuple[Fault, Fault]:
    """Lost at the second batch of the first validation: a generation of steps 4, 5 and 6, the first prepared at 4."""
    begun = Fault(device, "prepare", "called", step=EVERY, does=lambda worker: None)
    return begun, Fault(device, "forward", kind, step=EVERY + 1, after=begun)


@pytest.mark.quick("samples-b-killed")
@pytest.mark.parametrize("kind", ["killed", "silent"])
@pytest.mark.parametrize("device", ["a", "b"])
@pytest.mark.parametrize("plan", ["samples", "pipeline", "hybrid", "tiles+single"])
def test_a_worker_lost_in_the_midst_of_it(plan: str, device: str, kind: str) -> None:
    """It is run again by the plan of the others, with the weights of the same step, and reported once."""
    followed = Followed(plan, *in_the_midst(device, kind))
    followed.check(EVERY, STEPS, generations=2)
    (lost,) = followed.trip.facts("lost")
    assert lost["devices"] == [device]
    (recovery,) = followed.trip.outcome.recoveries
    # What b alone held was copied to another at the validation or, where that copy was still on its way, before it.
    assert recovery["replayed"] == 0 or plan == "pipeline"


@pytest.mark.slow
def test_a_worker_lost_after_it_does_not_make_it_run_again() -> None:
    """It has its state of that step alone: those since the last backup are run again, and the results stay."""
    followed = Followed("pipeline", Fault("b", "load", step=EVERY, nth=2), backup_every=3)
    followed.check(EVERY, STEPS, generations=2)
    (recovery,) = followed.trip.outcome.recoveries
    assert recovery["step"] == 3


@pytest.mark.slow
def test_a_worker_joins_in_the_meantime() -> None:
    joined: list[str] = []

    def join(name: str) -> None:
        if not joined:
            joined.append(name)
            cluster.start("c")

    results: list[Validated] = []
    with FaultCluster(("a", "b")) as cluster:
        validation = JobValidation(
            cluster.coordinator, HeldOut(Pictures(HELD_OUT), EVERY, {}), captured(), functional.cross_entropy,
            steps=STEPS, steps_per_epoch=6, validated=0, report=lambda one, failure: results.append(one),
            should_stop=lambda: False,
        )  # fmt: skip
        two = Plan("Sequential", BATCH, (Stage((0, LAYERS), ("a", "b"), BySamples((6, 6))),))
        trip = cluster.travel(two, validation=validation, at_step={3: lambda: join("c")})
    trip.check(reference(1), generations=2)
    assert [one.steps_done for one in results] == [EVERY, STEPS]
    assert trip.outcome.plan is not None
    assert "c" in trip.outcome.plan.devices


@pytest.mark.slow
def test_preloaded_samples_stay_on_the_devices() -> None:
    """They travel once: a validation in between leaves them there."""
    followed = Followed("samples", is_preloaded=True, every=2)
    followed.check(2, 4, 6, 8)
    plain = Followed("samples", is_preloaded=True, every=8)
    received = [{name: log.received_bytes for name, log in one.trip.outcome.logs.items()} for one in (followed, plain)]
    assert received[0] == received[1]


@pytest.mark.slow
def test_a_metric_that_raises_stops_the_job_with_the_state_of_that_step() -> None:
    def broken(predictions: Any, targets: Any) -> float:
        raise KeyError("classes")

    followed = Followed("samples", metrics={"top5": broken})
    (failure,) = followed.failures
    assert "The metric 'top5' raised KeyError: 'classes'" in failure.message
    assert followed.results == []
    assert followed.trip.outcome.is_stopped
    assert followed.trip.saved == [EVERY]


@pytest.mark.slow
def test_a_checkpoint_on_request() -> None:
    """It is of the round under way, and the plan stays."""
    requests = CheckpointRequests()
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(
            PLANS["pipeline"], requests=requests, at_step={2: lambda: requests.add(3, "best"), 6: lambda: None}
        )
    trip.check(reference(PLANS["pipeline"].micro_batches), generations=1)
    first, last = trip.saved
    assert 3 <= first <= 6
    assert last == STEPS
    assert not requests.is_pending
    assert list(requests.served_by(first)) == ["best"]
    assert list(requests.served_by(STEPS)) == []
    assert all(log.rounds == STEPS for log in trip.outcome.logs.values())


def test_requests_are_served_by_the_next_checkpoint() -> None:
    requests = CheckpointRequests()
    requests.add(3, "best")
    requests.add(3)
    requests.add(5, "last")
    assert requests.is_pending
    requests.ordered()
    assert not requests.is_pending
    assert list(requests.served_by(2)) == []
    assert list(requests.served_by(4)) == ["best"]
    assert list(requests.served_by(9)) == ["last"]
