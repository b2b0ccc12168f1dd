"""Devices that are lost in the middle of a sum by PyTorch's process groups: the job goes on, exactly."""

from __future__ import annotations

import pytest

from fault_cluster import PLANS, STEPS, Fault, FaultCluster, reference
from manyhands.facts.collectives import TORCH
from manyhands.runtime import collective_store
from manyhands.runtime.member import Member

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c")
FAULT_STEP = 5


def group_sums(cluster: FaultCluster, device: str) -> dict[str, int]:
    assert cluster.trip is not None
    return cluster.trip.outcome.logs[device].group_sums


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
