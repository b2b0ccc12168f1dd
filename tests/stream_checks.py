"""What a stream must have done: every device its share, and the bytes between devices the plan's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from manyhands.executor.log import DeviceLog
from manyhands.executor.messages import COORDINATOR, plan_bytes
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.runtime import streaming
from manyhands.schedule.channels import ChannelGeometry
from manyhands.schedule.feeding import samples_of
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.policy import Schedule
from real_runs import computed_elements


def only_whole_batches(patch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a sample waits for those that fill its batch."""
    patch.setattr(streaming, "FILL_SECONDS", 60.0)


def assert_as_planned(
    plan: Plan, network: Network, logs: Mapping[str, DeviceLog], between: Mapping[tuple[str, str], int], batches: int
) -> None:
    """`batches`: how many were answered, in one generation; all of them whole (`only_whole_batches`)."""
    schedule, devices = Schedule(plan, network), plan.devices
    passes = batches * plan.micro_batches // plan.steps_per_round
    planned = plan_bytes({name: tuple(schedule.every_action(name)) for name in devices}, network)
    expected = {pair: size * passes // plan.micro_batches for pair, size in planned.items() if size}
    assert {pair: size for pair, size in between.items() if COORDINATOR not in pair} == expected
    assert set(logs) == set(devices)
    sent = {(name, to): size for name, log in logs.items() for to, size in log.sent_bytes.items() if size}
    came = {(of, name): size for name, log in logs.items() for of, size in log.received_bytes.items() if size}
    assert {pair: size for pair, size in sent.items() if COORDINATOR not in pair} == expected
    assert {pair: size for pair, size in came.items() if COORDINATOR not in pair} == expected
    for name, log in logs.items():
        geometries = schedule.lowering.work[name].geometries
        first, last = samples_of(geometries[0], name)
        assert log.samples == (last - first) * passes
        assert log.operators == sum(geometry.last - geometry.first for geometry in geometries) * passes
        assert log.elements == sum(planned_elements(geometry, name) for geometry in geometries) * passes
        assert log.refused_frames == 0


def planned_elements(geometry: StageGeometry, device: str) -> int:
    """Of maps, or of tensors cut by channels, that a device computes in one pass."""
    if not isinstance(geometry, ChannelGeometry):
        return computed_elements(geometry, device)
    made = [name for op in geometry.ops for name in op.outputs if name in geometry.split]
    return sum(geometry.own(device, name).volume for name in made)
