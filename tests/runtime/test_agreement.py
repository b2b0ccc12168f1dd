"""Devices whose numbers are wrong are found by comparing what passes through several hands, and the job goes on
without them: the weights are those of an undisturbed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from fault_cluster import PLANS, Fault, FaultCluster, Trip, reference
from manyhands.executor.optimizers import slots
from manyhands.facts.errors import NotFinite
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.runtime.agreement import Evidence, decided
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.stalls import Verdict
from manyhands.runtime.worker import Worker
from manyhands.transport.memory import as_bytes
from real_runs import BATCH, LAYERS

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c")
FAULT_STEP = 4
PAIR = Plan("Sequential", BATCH, (Stage((0, LAYERS), ("a", "b"), BySamples((8, 4))),))


def check_evicted(trip: Trip, device: str, words: str, micro_batches: int = 1) -> None:
    trip.check(reference(micro_batches))
    lost = trip.facts("lost")
    assert [facts["devices"] for facts in lost] == [[device]], lost
    assert words in lost[0]["reason"], lost
    assert trip.cluster.coordinator.members[device].is_evicted


def wrong_messages(kind: str, *, change: float = 1e-3) -> Callable[[Worker], None]:
    """From now on one number of each chunk that is sent is wrong: of gradients ("r0"), or of their sum ("r1")."""

    def does(worker: Worker) -> None:
        send = worker.endpoint.send

        def altered(to: str, step: int, topic: str, parts: Any, **options: bool) -> None:
            if "gradients" in topic and f" {kind} " in topic:
                copies = [torch.frombuffer(bytearray(as_bytes(part)), dtype=torch.float64) for part in parts]
                copies[0][0] += change
                parts = [as_bytes(copy) for copy in copies]
            send(to, step, topic, parts, **options)

        worker.endpoint.send = altered  # type: ignore[method-assign]

    return does


def spoilt_gradients(number: float) -> Callable[[Worker], None]:
    """From now on one number of each gradient that this worker computes is another."""

    def does(worker: Worker) -> None:
        assert worker.prepared is not None
        assert worker.prepared.executor is not None
        reducer = worker.prepared.executor.reductions.reducer
        start = reducer.start

        def spoilt(reduce: Any, step: int, gradients: list[torch.Tensor]) -> None:
            if step >= FAULT_STEP:
                gradients[0].view(-1)[0] = number
            start(reduce, step, gradients)

        reducer.start = spoilt  # type: ignore[method-assign]

    return does


def adds_wrongly(worker: Worker) -> None:
    """From now on what others send is added up twice."""
    take = worker.endpoint.mailbox.take_unless

    def twice(source: str, step: int, topic: str, has_come: Callable[[], bool]) -> memoryview | None:
        came = take(source, step, topic, has_come)
        if "gradients" in topic:
            assert worker.prepared is not None
            assert worker.prepared.executor is not None
            gradient = next(w.grad for w in worker.prepared.executor.weights.trainable().values() if w.grad is not None)
            gradient += 1e-3  # its own memory changes while it adds
        return came

    worker.endpoint.mailbox.take_unless = twice  # type: ignore[method-assign]


def drifts(worker: Worker) -> None:
    """One weight changes by itself."""
    assert worker.prepared is not None
    assert worker.prepared.executor is not None
    weight = next(iter(worker.prepared.executor.weights.trainable().values()))
    with torch.no_grad():
        weight.view(-1)[0] += 1e-6


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("device", NAMES)
def test_a_device_that_sends_a_wrong_sum(device: str) -> None:
    """The others hold the same, which is not what it formed."""
    fault = Fault(device, "backward", "called", step=FAULT_STEP, does=wrong_messages("r1"))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"])
    check_evicted(trip, device, f"at step {FAULT_STEP} the sum of the gradients that {device} formed")


@pytest.mark.slow
def test_a_device_that_sends_other_gradients_than_it_has() -> None:
    fault = Fault("b", "backward", "called", step=FAULT_STEP, does=wrong_messages("r0"))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"])
    check_evicted(trip, "b", "what b sent is not what a received (it and a, c)")


@pytest.mark.slow
def test_a_device_that_adds_up_wrongly() -> None:
    fault = Fault("c", "backward", "called", step=FAULT_STEP, does=adds_wrongly)
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"])
    check_evicted(trip, "c", "its sum of the gradients is not the sum of what it was given")


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("plan", ["samples", "tiles"])
def test_a_device_whose_weights_drift(plan: str) -> None:
    fault = Fault("b", "forward", "called", step=FAULT_STEP, does=drifts)
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS[plan])
    check_evicted(trip, "b", "its weights of layers")


def test_of_two_devices_either_may_be_wrong() -> None:
    """It is not known which: the one that does less goes, and the reason says so."""
    fault = Fault("b", "forward", "called", step=FAULT_STEP, does=drifts)
    with FaultCluster(("a", "b"), fault) as cluster:
        trip = cluster.travel(PAIR)
    check_evicted(trip, "b", "either may be wrong, and b does less of the work")


def test_a_gradient_that_is_not_finite_is_blamed_on_its_device() -> None:
    """Without it, the same step is run again on the others, where all is well."""
    fault = Fault("b", "backward", "called", step=FAULT_STEP, does=spoilt_gradients(float("nan")))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"])
    check_evicted(trip, "b", f"at step {FAULT_STEP} its gradient was not finite")


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_in_a_hybrid_pipeline() -> None:
    fault = Fault("a", "backward", "called", step=FAULT_STEP, nth=2, does=spoilt_gradients(float("inf")))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["hybrid"])
    check_evicted(trip, "a", "its gradient was not finite", PLANS["hybrid"].micro_batches)


@pytest.mark.slow
def test_a_member_is_not_blamed_for_what_it_received() -> None:
    """The last stage sends one of the two devices before it a gradient that is none: that device's own is none then."""
    fault = Fault("c", "send", "called", step=FAULT_STEP, does=not_finite_to("a"))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["hybrid"])
    check_evicted(trip, "c", "what it sent to others was not finite", PLANS["hybrid"].micro_batches)


def test_in_a_pipeline_the_error_names_the_device_where_it_began() -> None:
    """The loss is computed on c, from what b sent."""
    fault = Fault("b", "send", "called", step=FAULT_STEP, does=not_finite_to("c", "value"))
    with FaultCluster(NAMES, fault) as cluster:
        with pytest.raises(NotFinite, match=f"The loss is nan at step {FAULT_STEP}, on c; it began in layer 1, on b"):
            cluster.travel(PLANS["pipeline"])
        assert fault.fired
        assert not any(one.is_evicted for one in cluster.coordinator.members.values())


def not_finite_to(peer: str, kind: str = "gradient") -> Callable[[Worker], None]:
    def does(worker: Worker) -> None:
        send = worker.endpoint.send

        def altered(to: str, step: int, topic: str, parts: Any, **options: bool) -> None:
            if to == peer and f" {kind} " in f" {topic} ":
                parts = [torch.full_like(part, float("nan")) for part in parts]
            send(to, step, topic, parts, **options)

        worker.endpoint.send = altered  # type: ignore[method-assign]

    return does


@pytest.mark.slow
def test_gradients_that_are_not_finite_wherever_the_step_is_run() -> None:
    """One device is evicted at most; then it is the network's own, and the error says where it began."""
    first = Fault("b", "backward", "called", step=FAULT_STEP, does=spoilt_gradients(float("nan")))
    faults = [first, Fault("c", "load", "called", after=first, does=spoilt_gradients(float("nan")))]
    with FaultCluster(NAMES, *faults) as cluster:
        with pytest.raises(NotFinite) as found:
            cluster.travel(PLANS["samples"])
        assert all(len(fault.fired) == 1 for fault in faults)
        assert [name for name, one in cluster.coordinator.members.items() if one.is_evicted] == ["b"]
        process = cluster.coordinator.members["b"].identity.process
        assert cluster.coordinator.membership.quarantine.refusal(process, "b", cluster.clock()) is None
    assert f"it began in the gradients of step {FAULT_STEP}, in layer" in found.value.message
    assert found.value.message.endswith("on c.")


class TestDecided:
    def test_nothing_is_wrong(self) -> None:
        assert decided(Evidence(), {}, {}) is None

    def test_whose_own_account_is_wrong_comes_first(self) -> None:
        found = Evidence([Verdict("b", "it cannot add")], [Verdict("a", "differs")], [("a", "c", "what")])
        assert decided(found, {}, {}) == (Verdict("b", "it cannot add"), True)

    def test_who_contradicts_most(self) -> None:
        found = Evidence(disputes=[("a", "b", "what"), ("c", "b", "what")])
        assert decided(found, {"a": 0.1, "b": 0.8, "c": 0.1}, {}) == (Verdict("b", "what (it and a, c)"), True)

    def test_who_did_so_before(self) -> None:
        """Of two, the one that does less goes; had that been the wrong one, the other is known the next time."""
        work, before = {"a": 0.4, "b": 0.2, "c": 0.4}, Counter[str]()
        first = decided(Evidence(disputes=[("a", "b", "what")]), work, before)
        assert first is not None
        assert first[0].device == "b"
        assert not first[1]
        before.update(("a", "b"))
        again = decided(Evidence(disputes=[("a", "c", "what")]), {"a": 0.9, "c": 0.1}, before)
        assert again == (Verdict("a", "what (it and c)"), True)


@pytest.mark.slow
def test_an_account_that_is_not_of_the_plan() -> None:
    def does(worker: Worker) -> None:
        send = worker._send

        def less(message: Any) -> None:
            send(msgspec.structs.replace(message, sums=message.sums[1:]) if isinstance(message, Progress) else message)

        worker._send = less  # type: ignore[method-assign]

    with FaultCluster(NAMES, Fault("b", "backward", "called", step=FAULT_STEP, does=does)) as cluster:
        trip = cluster.travel(PLANS["samples"])
    check_evicted(trip, "b", "leaves out a sum of gradients")


def test_a_network_that_diverges_evicts_nobody() -> None:
    lr = Optimizer("SGD", lr=1e200)
    plan = msgspec.structs.replace(PLANS["samples"], optimizer_slots=slots(lr))
    with FaultCluster(NAMES) as cluster:
        with pytest.raises(NotFinite, match=r"at step \d, .*; it began in (the gradients of step \d, in )?layer"):
            cluster.travel(plan, optimizer=lr)
        assert not any(one.is_evicted for one in cluster.coordinator.members.values())
