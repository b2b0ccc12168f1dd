"""The messages that a device will receive in a round, by name and size: anything else is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from manyhands.executor.boxes import dtype_of, empty
from manyhands.executor.share_loss import shared_totals, target_names
from manyhands.facts.boxes import Box, Interval
from manyhands.facts.errors import BadData, BadPlan
from manyhands.facts.network import DTYPE_BYTES, Network, TensorSpec
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.plan_check import op_range
from manyhands.graph.graph import Graph
from manyhands.graph.loss_totals import LOSS_TOTALS
from manyhands.schedule.actions import Action, Receive, Reduce
from manyhands.schedule.feeding import AT_HOME, fed_inputs
from manyhands.schedule.lowering import Lowering
from manyhands.schedule.reduction import byte_points, rounds_of, topic

COORDINATOR = "coordinator"
"""The name under which the process that started the run feeds inputs and gathers results."""
ROW_BYTES = 8
"""Bytes of a sample's number."""
ROWS = "rows of the batch"
"""What every device is fed, beside inputs, where buffers are carried from pass to pass: how many rows of a batch are
samples. The others are blank and are not computed, or they would be carried on. No input can be called so."""


@dataclass(frozen=True)
class FeedPart:
    """A box of an input or target that the coordinator hands to a device for every micro-batch."""

    name: str
    box: Box
    dtype: str
    stage: int = AT_HOME
    """The stage that reads it."""
    is_target: bool = False
    is_local: bool = False
    """Whether the device has it, in its silo or because it was preloaded there: the rows' numbers travel."""
    scattered: tuple[Interval, ...] = ()
    """The origin of the rows of `box`, if they do not lie side by side: intervals of the micro-batch's rows."""

    @property
    def is_of_samples(self) -> bool:
        """Whether it can be preloaded: all but the totals of a loss, which are made of every batch. They come last."""
        return self.name != LOSS_TOTALS

    @property
    def bytes(self) -> int:
        return len(range(*self.box.intervals[0])) * ROW_BYTES if self.is_local else self._volume_bytes

    @property
    def _volume_bytes(self) -> int:
        return self.box.volume * DTYPE_BYTES[self.dtype]

    def room(self) -> torch.Tensor:
        """Return memory for what travels."""
        return torch.empty(self.bytes // ROW_BYTES, dtype=torch.int64) if self.is_local else empty(self.box, self.dtype)

    def cut_from(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this box of the samples that a silo gave."""
        shape = tuple(b - a for a, b in self.box.intervals)
        cut = rows[(slice(None), *self.box.slices()[1:])] if rows.dim() == len(shape) else rows
        if tuple(cut.shape) != shape or (rows.is_floating_point() and not dtype_of(self.dtype).is_floating_point):
            raise BadData(
                f"The silo's '{self.name}' gives {str(rows.dtype).removeprefix('torch.')}{list(rows.shape)}; the "
                f"network was captured with {self.dtype}{list(shape)}.",
                hint="All parts of a job must be of the same samples: look at the file given with --silo.",
            )
        return cut.to(dtype_of(self.dtype))


def feed_parts(
    graph: Graph, lowering: Lowering, device: str, *, targets: bool, local: Collection[str] = ()
) -> tuple[FeedPart, ...]:
    """Return what a device is fed, in the order it travels.

    `local` names what the device has itself, so that the numbers of rows will do.
    """
    network = lowering.network
    inputs = fed_inputs(lowering).get(device, ())
    parts = [FeedPart(part.tensor, part.box, network.tensors[part.tensor].dtype, stage) for stage, part in inputs]
    if graph.carried:
        parts.append(FeedPart(ROWS, Box.whole((1,)), "int64"))
    last = lowering.geometries[-1]
    if targets and graph.loss is not None and device in last.loss_devices:
        specs = {spec.name: spec for spec in graph.loss.inputs}
        rows = last.sample_intervals(device)
        parts += [_target(specs[name], rows, last.samples) for name in target_names(graph)]
        totals = shared_totals(graph, lowering.plan)
        parts += [_target(totals.spec, rows, last.samples)] if totals is not None else []
    return tuple(replace(part, is_local=True) if part.name in local else part for part in parts)


def everything_fed(graph: Graph, *, targets: bool = True) -> frozenset[str]:
    """Return the names of all inputs, and of the targets."""
    return frozenset([*(spec.name for spec in graph.inputs), *(target_names(graph) if targets else ())])


def _target(spec: TensorSpec, intervals: tuple[Interval, ...], samples: int) -> FeedPart:
    """Return a device's rows of a target, those of its own samples; a target without rows goes to every device."""
    box = Box.whole(spec.shape_for(samples))
    if spec.batch_axis is None:
        return FeedPart(spec.name, box, spec.dtype, is_target=True)
    rows = tuple((first * spec.rows_per_sample, last * spec.rows_per_sample) for first, last in intervals)
    start, count = rows[0][0], sum(last - first for first, last in rows)
    box = box.replace(spec.batch_axis, (start, start + count))
    return FeedPart(spec.name, box, spec.dtype, is_target=True, scattered=rows if len(rows) > 1 else ())


def expected_messages(
    actions: Iterable[Action], device: str, network: Network,
    bytes_of: Callable[[Receive], int] | None = None, row_bytes_of: Callable[[Reduce], int] | None = None,
) -> dict[tuple[str, str], int]:  # fmt: skip
    """Return (source, topic) -> bytes of the messages that a device receives, from its own actions.

    `bytes_of` and `row_bytes_of`: the bytes of a message, and of each row or sum of a reduction's (0: as planned),
    where tensors do not travel as they are planned.
    """
    expected: dict[tuple[str, str], int] = {}
    for action in actions:
        if isinstance(action, Receive):
            size = bytes_of(action) if bytes_of is not None else action.message.bytes
            expected[(action.source, action.message.topic)] = size
        elif isinstance(action, Reduce):
            points = byte_points(action, network)
            described = row_bytes_of(action) if row_bytes_of is not None else 0
            for number, hops in enumerate(rounds_of(action)):
                for hop in hops:
                    if hop.target == device:
                        size = points[hop.last] - points[hop.first]
                        if described:
                            size = described * (1 if action.what == "gradients" else hop.last - hop.first)
                        expected[(hop.source, topic(action, number, hop.first))] = size
    return expected


def runs_here(plan: Plan, network: Network) -> None:
    """Refuse a plan that can be simulated, but not run by the executor; the message names the stage and the reason."""
    for index, stage in enumerate(plan.stages):
        shares_samples = stage.share.splits_samples and len(stage.devices) > 1
        if not plan.is_training and plan.batch_norm == "synchronised" and shares_samples:
            _has_running_statistics(index, stage, network)
        types = {
            network.weights[name].dtype
            for name in network.weights_of(*op_range(stage, network))
            if network.weights[name].trainable
        }
        if len(types) > 1 and len(stage.devices) > 1 and stage.reduce == "allreduce" and plan.is_training:
            raise BadPlan(
                f"stages[{index}] trains weights of types {', '.join(sorted(types))} on {len(stage.devices)} devices; "
                "their gradients are added up in one type.",
                hint="Use one type, or reduce: gateway.",
            )


def _has_running_statistics(index: int, stage: Stage, network: Network) -> None:
    """Refuse a batch norm that keeps no statistics: in a stream none travel, so it would normalise each share by
    itself."""
    for op in network.ops[slice(*op_range(stage, network))]:
        if op.statistics and not any(network.weights[name].buffer for name in op.weights):
            raise BadPlan(
                f"stages[{index}] is shared by {stage.share.by}, but the batch norm {op.module or op.name} keeps no "
                "running statistics: in a stream each device would normalise its samples by themselves.",
                hint="Give that layer to a stage with one device, or write batch_norm: local.",
            )


def plan_bytes(schedule_actions: dict[str, Sequence[Action]], network: Network) -> dict[tuple[str, str], int]:
    """Return (source, target) -> bytes that a plan sends between two devices in one round."""
    totals: dict[tuple[str, str], int] = {}
    for device, actions in schedule_actions.items():
        for (source, _), size in expected_messages(actions, device, network).items():
            totals[(source, device)] = totals.get((source, device), 0) + size
    return totals
