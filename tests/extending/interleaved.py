"""A way of sharing as another package would bring it: device i of n computes samples i, i + n, i + 2n, ...

It follows ARCHITECTURE.md, "How to add a way of sharing": a struct, a geometry, a runner, a strategy, and a function
that registers them, which the package's entry point in the group `manyhands.sharing` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from manyhands.executor.sharing import RunnerSetup, register_sharing, unregister_sharing
from manyhands.facts.boxes import Box, Interval
from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan, Share, Stage
from manyhands.facts.plan_check import op_range
from manyhands.planner.strategies import register_strategy, unregister_strategy
from manyhands.planner.task import Task
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.samples import WholeSampleGeometry

if TYPE_CHECKING:
    from manyhands.executor.runner import Runner

NAME = "interleaved"


class ByInterleavedSamples(msgspec.Struct, Share, frozen=True, tag=NAME, tag_field="by", forbid_unknown_fields=True):
    """Each device computes every n-th sample of a micro-batch."""

    splits_samples: ClassVar[bool] = True
    note: str = ""

    def sample_counts(self, samples: int, devices: int) -> tuple[int, ...]:
        return tuple(len(range(place, samples, devices)) for place in range(devices))

    def text(self, place: int) -> str:
        return f"every sample after number {place}"

    def check(self, plan: Plan, index: int, network: Network) -> None:
        stage = plan.stages[index]
        if plan.micro_batch_size < len(stage.devices):
            raise BadPlan(f"stages[{index}] has {len(stage.devices)} devices for {plan.micro_batch_size} samples.")
        for op in network.ops[slice(*op_range(stage, network))]:
            if len(stage.devices) > 1 and (op.mixes_samples or (op.random and plan.is_training)):
                raise BadPlan(f"stages[{index}] is shared by {NAME}, but {op.name} mixes samples or draws by place.")


class InterleavedGeometry(WholeSampleGeometry):
    """Which samples each device has; everything else follows."""

    def sample_intervals(self, device: str) -> tuple[Interval, ...]:
        place, count = self.devices.index(device), len(self.devices)
        return tuple((sample, sample + 1) for sample in range(place, self.samples, count))


def interleaved_runner(geometry: StageGeometry, setup: RunnerSetup) -> Runner:
    """Returns a runner that holds a device's samples one after another."""
    from interleaved_runner import InterleavedRunner

    from manyhands.graph.kernels import kernel_calls

    calls = kernel_calls(setup.graph, setup.kernels)
    return InterleavedRunner(setup.graph, setup.weights, geometry, setup.device, setup.actions, calls)


def local_box(geometry: StageGeometry, device: str, tensor: str, box: Box) -> Box:
    """Returns where a box lies in what a device holds of a tensor; a box is never of two samples."""
    spec = geometry.network.tensors[tensor]
    if spec.batch_axis is None or len(geometry.devices) == 1:
        return box
    first, last = box.intervals[spec.batch_axis]
    sample, row = divmod(first, spec.rows_per_sample)
    start = (sample - geometry.devices.index(device)) // len(geometry.devices) * spec.rows_per_sample + row
    return box.replace(spec.batch_axis, (start, start + last - first))


def proposals(task: Task) -> Iterator[Plan]:
    """Yields the whole network on all devices, by interleaved samples, with as many micro-batches as was asked for."""
    stage = Stage((0, len(task.network.layers)), task.cluster.names, ByInterleavedSamples())
    yield task.plan([stage], task.micro_batches or 1)


def register() -> None:
    register_sharing(ByInterleavedSamples, InterleavedGeometry, interleaved_runner)
    register_strategy(NAME, proposals)


def unregister() -> None:
    unregister_sharing(ByInterleavedSamples)
    unregister_strategy(NAME)


def document(devices: list[str], network: str = "n", batch_size: int = 4) -> dict[str, Any]:
    """Returns a plan of one stage, as a file has it."""
    stage = {"layers": [0, 1], "devices": devices, "share": {"by": NAME}}
    return {"network": network, "batch_size": batch_size, "stages": [stage]}


def install(folder: Path) -> None:
    """Writes into a folder of Python's path what `pip install` leaves of this package beside its modules."""
    facts = folder / "interleaved-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: interleaved\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[manyhands.sharing]\n{NAME} = interleaved:register\n")
