"""A stage's graph rewritten for one device that has some channels of it (DECNN §3.2).

Convolutions get the number of groups that they have here, shapes become the local ones, and a slice is inserted
wherever an operator reads less than what is on the device. The result is a graph like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from manyhands.executor.channel_messages import joined_shape
from manyhands.facts.boxes import Box
from manyhands.facts.network import Op, TensorSpec
from manyhands.facts.reads import Blocks
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Node, SampleCount, Value
from manyhands.schedule.channels import CHANNELS, Boxes, ChannelGeometry

_GROUPS = 6
"""The place of a convolution's groups among its arguments."""


class LocalGraph:
    """A stage's operators as one device runs them."""

    def __init__(self, graph: Graph, geometry: ChannelGeometry, device: str) -> None:
        self.geometry, self.device, self.network = geometry, device, graph.network
        self.biases: dict[str, str] = {}
        """Operator that makes partial sums -> the bias that is added to their sum."""
        self._nodes: list[Node] = []
        self._starts: dict[int, int] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._reading: dict[str, Boxes] = {}
        """Tensor that the group under way reads from before it -> the boxes of it that are here."""
        starts = {first: number for number, first in enumerate(geometry.group_starts)}
        for index in range(geometry.first, geometry.last):
            self._starts[index] = len(self._nodes)
            if index in starts:
                self._reading = geometry.reading[starts[index]][device]
            if not graph.nodes[index].updates:
                self._add(index, graph.nodes[index])
        self._starts[geometry.last] = len(self._nodes)
        made = {spec.name for node in self._nodes for spec in node.outputs}
        outputs = [name for name in self._kept() if name in made]
        outside = tuple(spec for name, spec in self._specs.items() if name not in made)
        self.graph = Graph(
            name=graph.name, inputs=outside, input_tree=[[], {}], output_tree=outputs, nodes=tuple(self._nodes),
            weights=graph.weights, aliases={}, state={}, granularity=graph.granularity,
        )  # fmt: skip
        facts = msgspec.structs.replace(self.network, tensors={**self.network.tensors, **self._specs})
        self.graph.__dict__["network"] = facts  # kernels read it; nothing is planned by it

    def range(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of the nodes of operators [first, last)."""
        return self._starts[first], self._starts[last]

    def name(self, tensor: str, boxes: Boxes) -> str:
        """Return the name of boxes of a tensor: a device's own part has the tensor's name."""
        is_own = self.geometry.is_made_here(tensor) and boxes == (self.geometry.own(self.device, tensor),)
        return tensor if is_own else tensor + "".join(map(str, boxes))

    def _kept(self) -> list[str]:
        """Return the tensors that are read, sent or returned besides what nodes read."""
        names = list(self.network.outputs)
        for group, tensors in zip(self.geometry.groups, self.geometry.reading):
            names += [*group.fetches, *group.sums]
            names += [name for name, boxes in tensors[self.device].items() if self.name(name, boxes) != name]
        later = self.network.ops[self.geometry.last :]
        return list(dict.fromkeys([*names, *(name for op in later for name in op.inputs)]))

    def _add(self, index: int, node: Node) -> None:
        op = self.network.ops[index]
        changed: dict[str, str] = {}
        for name, box in self.geometry.needs(self.device, index).items():
            changed[name] = self._input(op, name, box)
        node = _renamed(node, changed)
        if index in self.geometry.input_based:
            bias = node.arguments[2] if len(node.arguments) > 2 else None
            if bias is not None:
                self.biases[op.name] = bias.name
            node = msgspec.structs.replace(node, arguments=(*node.arguments[:2], None, *node.arguments[3:]))
        elif any(name in self.geometry.split for name in op.outputs):
            node = self._cut(op, node)
        self._nodes.append(node)
        self._specs.update({spec.name: spec for spec in node.outputs})

    def _input(self, op: Op, name: str, box: Box) -> str:
        """Return the name under which an operator finds a box of a tensor; a slice is inserted where more of it is
        here."""
        boxes = self._reading.get(name, ())
        if self.geometry.shuffles(self.network.op_index[op.name]):  # of every group what is needed, and no more
            local_name = self.name(name, boxes)
            self._specs.setdefault(local_name, self._spec(local_name, name, Box.whole(joined_shape(boxes))))
            return local_name
        if not self.geometry.is_made_here(name):
            hull, local_name = self.geometry.entering(name).hull(self.device), name
        else:
            hull = boxes[0] if boxes else self.geometry.own(self.device, name)
            local_name = self.name(name, (hull,))
        self._specs.setdefault(local_name, self._spec(local_name, name, hull))
        needed, held = box.intervals[CHANNELS], hull.intervals[CHANNELS]
        if needed != held:  # along other axes all is here, and a window's stride passes over what it does not read
            cut = f"{local_name}>{op.name}"
            spec = self._spec(cut, name, hull.replace(CHANNELS, needed))
            place = (CHANNELS, needed[0] - held[0], needed[1] - held[0], 1)
            node = Node(cut, "aten.slice.Tensor", (Value(local_name), *place), {}, (spec,), module=op.module)
            self._nodes.append(node)
            self._specs[cut] = spec
            local_name = cut
        return local_name

    def _spec(self, local_name: str, name: str, box: Box) -> TensorSpec:
        """Return the specification of a box of a tensor, for one sample."""
        spec = self.network.tensors[name]
        shape = tuple(spec.shape[axis] if axis == spec.batch_axis else extent for axis, extent in enumerate(box.shape))
        return msgspec.structs.replace(spec, name=local_name, shape=shape)

    def _cut(self, op: Op, node: Node) -> Node:
        """Return an operator that makes this device's channels only."""
        name = op.outputs[0]
        box = self.geometry.own(self.device, name)
        spec = self._spec(name, name, box)
        arguments: tuple[Any, ...] = node.arguments
        target = node.target
        if op.channels == "grouped":
            rule = op.reads[0].rules[CHANNELS]
            assert isinstance(rule, Blocks)
            first, last = box.intervals[CHANNELS]
            arguments = (*arguments[:_GROUPS], max(1, (last - first) // rule.outputs), *arguments[_GROUPS + 1 :])
        elif op.channels == "shaped":
            sizes = [SampleCount(spec.shape[0]), *spec.shape[1:]]
            target, arguments = "aten.reshape.default", (arguments[0], sizes)
        options = {} if op.channels == "shaped" else node.options
        return msgspec.structs.replace(node, target=target, arguments=arguments, options=options, outputs=(spec,))


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Return a node with other names for what it reads."""
    if all(old == new for old, new in names.items()):
        return node

    def change(argument: Any) -> Any:
        if isinstance(argument, Value):
            return Value(names.get(argument.name, argument.name))
        if isinstance(argument, (list, tuple)):
            return type(argument)(change(item) for item in argument)
        return argument

    options = {key: change(value) for key, value in node.options.items()}
    return msgspec.structs.replace(node, arguments=change(node.arguments), options=options)
