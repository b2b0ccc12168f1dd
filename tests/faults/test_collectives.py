"""Devices that are lost in the middle of a sum by PyTorch's process groups: the job goes on, exactly."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from fault_cluster import PLANS, STEPS, Fault, FaultCluster, reference
from manyhands.executor.process_groups import GroupKey
from manyhands.facts.collectives import TORCH
from manyhands.runtime import collective_store
from manyhands.runtime.member import Member
from manyhands.runtime.worker import Worker

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c")
FAULT_STEP = 5


def group_sums(cluster: FaultCluster, device: str) -> dict[str, int]:
    assert cluster.trip is not None
    return cluster.trip.outcome.logs[device].group_sums


@pytest.mark.quick(every=99)
@pytest.mark.parametrize(
    ("plan", "device", "kind"),
    [
        ("samples", "b", "killed"),
        ("hybrid", "a", "silent"),
        pytest.param("samples", "c", "silent", marks=pytest.mark.slow),
        pytest.param("samples", "b", "hung", marks=pytest.mark.slow),
    ],
)
def test_one_is_lost_before_it_joins_a_sum(plan: str, device: str, kind: str) -> None:
    """The others wait inside the library. They are interrupted, and form new groups without it."""
    fault = Fault(device, "collective", kind, step=FAULT_STEP)
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS[plan], collectives=TORCH)
    trip.check(reference(PLANS[plan].micro_batches), generations=2)
    assert "gradients" in fault.fired[0]
    (lost,) = trip.facts("lost")
    assert lost["devices"] == [device]


def alters(*, before: bool) -> Callable[[Worker], None]:
    """From now on one number is another: of what this device adds to a sum after it has reported it, or of the sum as
    it has it."""

    def does(worker: Worker) -> None:
        assert worker.prepared is not None
        assert worker.prepared.executor is not None
        collectives = worker.prepared.executor.options.collectives
        assert collectives is not None
        groups, add_up = collectives.groups, collectives.groups.all_reduce

        def altered(key: GroupKey, numbers: torch.Tensor, name: str) -> None:
            numbers[0] += 1e-3 * before
            add_up(key, numbers, name)
            numbers[0] += 1e-3 * (not before)

        groups.all_reduce = altered  # type: ignore[method-assign]

    return does


def test_a_device_that_has_another_sum_than_the_others_is_evicted() -> None:
    fault = Fault("b", "forward", "called", step=FAULT_STEP, does=alters(before=False))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"], collectives=TORCH)
    trip.check(reference(1))
    (lost,) = trip.facts("lost")
    assert lost["devices"] == ["b"]
    assert f"at step {FAULT_STEP} the sum of the gradients of a, b, c, as it has it, differs" in lost["reason"]


def test_a_sum_that_is_wrong_on_all_devices_is_noticed() -> None:
    """It may be anybody's: the one with the least work goes, which is the wrong one here."""
    fault = Fault("c", "forward", "called", step=FAULT_STEP, does=alters(before=True))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"], collectives=TORCH)
    trip.check(reference(1))
    (lost,) = trip.facts("lost")
    assert lost["devices"] == ["c"]
    assert "the sum of the gradients is not that of what each reported before it" in lost["reason"]
    assert "either may be wrong" in lost["reason"]


def test_reports_as_of_groups_are_refused_where_messages_carry_sums() -> None:
    """A device cannot leave out what it received, so that nobody compares it."""

    def leaves_out(worker: Worker) -> None:
        assert worker.prepared is not None
        assert worker.prepared.executor is not None
        reducer = worker.prepared.executor.reductions.reducer
        take = reducer.take_records
        reducer.take_records = lambda: [  # type: ignore[method-assign]
            msgspec.structs.replace(record, received=(), sums=()) for record in take()
        ]

    fault = Fault("b", "forward", "called", step=FAULT_STEP, does=leaves_out)
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"])
    trip.check(reference(1))
    (lost,) = trip.facts("lost")
    assert lost["devices"] == ["b"]
    assert "is not of the plan's sizes" in lost["reason"]


def test_where_the_devices_change_so_that_groups_cannot_be_formed_messages_carry_the_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a device of another version joins. At the beginning of a job it is an error."""

    def obstacle(members: dict[str, Member], *, trusts_network: bool) -> object:
        error = real(members, trusts_network=trusts_network)
        return error if len(members) == 3 else collective_store.NotInstalled("no gloo here")

    real = collective_store.obstacle
    monkeypatch.setattr(collective_store, "obstacle", obstacle)
    fault = Fault("b", "collective", step=FAULT_STEP)
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"], collectives=TORCH)
    trip.check(reference(1), generations=2)
    (note,) = [facts["text"] for facts in trip.facts("note") if "messages" in facts["text"]]
    assert note.startswith("Built-in messages carry all sums from step ")
    assert note.endswith("no gloo here")
    assert group_sums(cluster, "a") == {}
    assert trip.length == STEPS
