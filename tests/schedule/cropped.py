"""A small interpreter for tests: operators on crops, devices as NaN-filled buffers, exchanges as slicing.

For shares that the executor does not run yet, by channels; tiles are tested with the executor itself.

Whatever a device reads without having it is NaN, and a NaN spreads: so a box that is too small cannot go unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.facts.boxes import Box
from manyhands.facts.moves import adjoint
from manyhands.facts.network import Network, Op
from manyhands.facts.reads import Blocks, Window
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph, Node
from manyhands.schedule.geometry import StageGeometry

NAN = float("nan")


class Mixed(nn.Module):
    """Most window operators at once: strided, dilated, grouped, even kernels, a residual, a gate, a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1)
        self.b = nn.BatchNorm2d(4)
        self.c = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
        self.d = nn.Conv2d(4, 4, 5, padding=4, dilation=2)
        self.e = nn.Conv2d(8, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(self.a(x)))
        y = torch.relu(F.max_pool2d(x, 3, 2, 1) + self.c(x))
        gated = self.d(y) * torch.sigmoid(y)
        wide = F.interpolate(torch.cat([gated, y], 1), scale_factor=2, mode="nearest")
        out: Tensor = self.e(F.avg_pool2d(wide, 3, 2))
        return out


class Plain(nn.Module):
    """A chain whose maps shrink unevenly: stride beyond the kernel, a pool that leaves the last row unread."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 3, (5, 3), padding=(2, 1))
        self.b = nn.Conv2d(3, 4, 2, stride=3)
        self.c = nn.Conv2d(4, 4, 3, padding=1)
        self.d = nn.Conv2d(4, 2, (1, 3), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.a(x)), 2)
        x = torch.sigmoid(self.c(torch.relu(self.b(x))))
        out: Tensor = self.d(x)
        return out


def captured(module: nn.Module, rows: int, columns: int) -> Graph:
    torch.manual_seed(0)
    module = module.double().train()
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.eval()
            child.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            child.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    example = torch.randn(2, 2, rows, columns, dtype=torch.float64)
    return capture(module, example, granularity="operators")


def parameters(graph: Graph) -> dict[str, Tensor]:
    """Fresh weights that collect gradients."""
    trainable = {spec.name for spec in graph.weights if spec.trainable}
    return {name: tensor.detach().clone().requires_grad_(name in trainable) for name, tensor in graph.state.items()}


def run_op(network: Network, node: Node, op: Op, weights: dict[str, Tensor], inputs: list[Tensor], box: Box) -> Tensor:
    """One operator's `box` of its output, from exactly the boxes that its read rules demand, one per read."""
    name = node.target.split(".")[1]
    rules = op.reads[0].rules
    if name in ("conv2d", "max_pool2d", "avg_pool2d"):
        fill = -torch.inf if name == "max_pool2d" else 0.0
        spec = network.tensors[op.reads[0].tensor]
        x = _padded(inputs[0], [r for r in rules if isinstance(r, Window)][-2:], box, spec.shape, fill)
        rows, columns = rules[-2], rules[-1]
        assert isinstance(rows, Window)
        assert isinstance(columns, Window)
        kernel, stride = (rows.kernel, columns.kernel), (rows.stride, columns.stride)
        dilation = (rows.dilation, columns.dilation)
        if name == "max_pool2d":
            return F.max_pool2d(x, kernel, stride, 0, dilation)
        if name == "avg_pool2d":
            return F.avg_pool2d(x, kernel, stride)
        return _convolution(node, rules[1], weights, x, box, stride, dilation)
    if name == "batch_norm":
        low, high = box.intervals[1]
        scale, shift, mean, variance = (weights[a.name][low:high] for a in node.arguments[1:5])
        return F.batch_norm(inputs[0], mean, variance, scale, shift, False, 0.0, node.arguments[7])
    if name == "upsample_nearest2d":
        x = inputs[0]
        for axis in (2, 3):
            rule, (low, high) = rules[axis], box.intervals[axis]
            assert isinstance(rule, Blocks)
            start = low // rule.outputs * rule.outputs
            x = x.repeat_interleave(rule.outputs, axis).narrow(axis, low - start, high - low)
        return x
    if name == "cat":
        return torch.cat(inputs, node.arguments[1])
    calls: dict[str, Any] = {"relu": torch.relu, "sigmoid": torch.sigmoid, "add": torch.add, "mul": torch.mul}
    return calls[name](*inputs)  # type: ignore[no-any-return]


def _convolution(
    node: Node, channels: Any, weights: dict[str, Tensor], x: Tensor, box: Box, stride: Any, dilation: Any
) -> Tensor:
    """Only the output channels of `box`, from the input channels they read."""
    low, high = box.intervals[1]
    start, stop, groups = low, high, 1
    if isinstance(channels, Blocks):  # whole groups, of which the box may be a part
        first, last = low // channels.outputs, -(-high // channels.outputs)
        start, stop, groups = first * channels.outputs, last * channels.outputs, last - first
    weight, bias = weights[node.arguments[1].name][start:stop], weights[node.arguments[2].name][start:stop]
    return F.conv2d(x, weight, bias, stride, 0, dilation, groups)[:, low - start : high - start]


def _padded(x: Tensor, windows: list[Window], box: Box, shape: tuple[int, ...], fill: float) -> Tensor:
    """Padding only where a window reaches over the true border."""
    amounts: list[int] = []
    for axis, window in zip((3, 2), reversed(windows)):
        a, b = box.intervals[axis]
        low, high = a * window.stride - window.padding, (b - 1) * window.stride - window.padding + window.reach + 1
        amounts += [max(0, -low), max(0, high - shape[axis])]
    return F.pad(x, amounts, value=fill) if any(amounts) else x


def part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[box.slices()]


@dataclass
class Whole:
    """The whole computation on one device: what everything is compared with."""

    values: dict[str, Tensor]
    weights: dict[str, Tensor]

    @classmethod
    def run(cls, graph: Graph, x: Tensor) -> Whole:
        network, weights = graph.network, parameters(graph)
        values = {network.inputs[0]: x.clone().requires_grad_()}
        for node, op in zip(graph.nodes, network.ops):
            box = Box.whole(network.tensors[op.outputs[0]].shape_for(len(x)))
            inputs = [values[read.tensor] for read in op.reads]
            values[op.outputs[0]] = run_op(network, node, op, weights, inputs, box)
            values[op.outputs[0]].retain_grad()
        loss = sum(values[name].square().sum() for name in network.outputs)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        return cls(values, weights)


@dataclass
class Split:
    """One stage on its devices, every device with a whole-sized buffer per tensor, NaN where it has nothing."""

    graph: Graph
    geometry: StageGeometry
    entering: dict[str, Tensor]
    values: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    leaves: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    """(group, device, tensor) -> what a group read from outside it."""
    made: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """(device, tensor) -> the computed box, with its autograd history inside its group."""

    @property
    def network(self) -> Network:
        return self.graph.network

    def forward(self) -> None:
        geometry = self.geometry
        groups = geometry.groups
        for device in geometry.devices:
            self.weights[device] = parameters(self.graph)
            own = self.values[device] = {}
            for name in self.network.tensors:
                own[name] = torch.full(geometry.shape(name), NAN, dtype=torch.float64)
            for name, tensor in self.entering.items():
                for box in geometry.entering(name).boxes(device):
                    part(own[name], box).copy_(part(tensor, box))
        for number, group in enumerate(groups):
            for name, found in group.fetches.items():
                for move in found:
                    part(self.values[move.target][name], move.box).copy_(part(self.values[move.source][name], move.box))
            for device in geometry.devices:
                self._compute(number, group.first, group.last, device)

    def _compute(self, number: int, first: int, last: int, device: str) -> None:
        inside: dict[str, Tensor] = {}
        for index in range(first, last):
            node, op = self.graph.nodes[index], self.network.ops[index]
            name = op.outputs[0]
            box = self.geometry.computed[device].get(name)
            if box is None or box.is_empty:
                continue
            inputs = []
            for read in op.reads:
                wanted = read.demand(box, self.geometry.shape(read.tensor))
                if read.tensor in inside:
                    outer = self.geometry.computed[device][read.tensor]
                    crop = part(inside[read.tensor], wanted.relative_to(outer))
                else:
                    key = (number, device, read.tensor)
                    if key not in self.leaves:
                        self.leaves[key] = self.values[device][read.tensor].clone().requires_grad_()
                    crop = part(self.leaves[key], wanted)
                assert not crop.isnan().any(), f"{device} lacks a part of {read.tensor}{wanted} for {op.name}{box}"
                inputs.append(crop)
            inside[name] = run_op(self.network, node, op, self.weights[device], inputs, box)
            assert inside[name].shape == box.shape
            self.made[device, name] = inside[name]
            part(self.values[device][name], box).copy_(inside[name].detach())

    def backward(self, leaving: dict[str, Tensor]) -> dict[str, Tensor]:
        """Backward as the schedule has it. Returns the gradients of what entered."""
        geometry, network = self.geometry, self.network
        deltas = {d: {n: torch.zeros_like(t) for n, t in self.values[d].items()} for d in geometry.devices}
        entering = {name: torch.zeros_like(tensor) for name, tensor in self.entering.items()}
        for device in geometry.devices:
            for name, gradient in leaving.items():
                own = geometry.owned(name).hull(device)
                part(deltas[device][name], own).copy_(part(gradient, own))
        for number, group in reversed(list(enumerate(geometry.groups))):
            returned: dict[tuple[str, str], Tensor] = {}
            for device in geometry.devices:
                outputs, gradients = [], []
                for name in (n for op in network.ops[group.first : group.last] for n in op.outputs):
                    own = geometry.owned(name).hull(device)
                    leaves = any(reader >= group.last for reader in network.readers.get(name, ()))
                    if (leaves or name in leaving) and not own.is_empty:
                        outer = geometry.computed[device][name]
                        outputs.append(part(self.made[device, name], own.relative_to(outer)))
                        gradients.append(part(deltas[device][name], own))
                leaves_of = {t: leaf for (n, d, t), leaf in self.leaves.items() if (n, d) == (number, device)}
                if outputs:
                    torch.autograd.backward(outputs, gradients)
                for name, leaf in leaves_of.items():
                    if leaf.grad is not None:
                        returned[device, name] = leaf.grad.nan_to_num(nan=NAN)
            for (device, name), gradient in returned.items():
                if name in entering:
                    entering[name] += gradient
                else:
                    own = geometry.owned(name).hull(device)
                    part(deltas[device][name], own).add_(part(gradient, own))
            for name, found in group.fetches.items():
                for move in adjoint(found):
                    if (move.source, name) in returned:
                        part(deltas[move.target][name], move.box).add_(part(returned[move.source, name], move.box))
        return entering
