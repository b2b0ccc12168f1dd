"""Stages whose first device alone steps the weights (`reduce: gateway`): its optimizer's state is nowhere else, unless
a copy of it is kept."""

from __future__ import annotations

import msgspec
import pytest

from fault_cluster import PLANS, Fault, FaultCluster, reference
from manyhands.facts.plan import Plan

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c")


def with_gateways(plan: Plan) -> Plan:
    stages = tuple(msgspec.structs.replace(stage, reduce="gateway") for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


@pytest.mark.quick("samples-a")
@pytest.mark.parametrize("lost", ["a", "b", "b-a", "a-b"])
@pytest.mark.parametrize("plan", ["samples", "hybrid", "tiles"])
def test_a_gateway_is_lost_and_others_are(plan: str, lost: str) -> None:
    faults = [Fault(device, "backward", step=4 + 2 * turn) for turn, device in enumerate(lost.split("-"))]
    with FaultCluster(NAMES, *faults) as cluster:
        trip = cluster.travel(with_gateways(PLANS[plan]))
    trip.check(reference(PLANS[plan].micro_batches), generations=1 + len(faults))
    assert "rewound" not in trip.events
