"""Class numbers in a target: finds the parts that a loss takes as class numbers, and checks that those classes
exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.facts.errors import BadData
from manyhands.graph import ops
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Value, values_of
from manyhands.graph.tape import bind_inputs
from manyhands.graph.trees import tree_leaves, tree_map

CLASS_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_WHOLE_VIEWS = frozenset({
    "view", "reshape", "view_as", "reshape_as", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t",
    "unsqueeze", "squeeze", "movedim", "swapaxes", "clone", "contiguous", "alias", "detach", "to", "_to_copy",
})  # fmt: skip
"""Operators that keep every value of their input: a wrong label in a target is a wrong label in the loss."""


@dataclass(frozen=True)
class ClassLabels:
    """A part of the target that holds class numbers."""

    leaf: str
    """The loss's input."""
    outputs: int
    """The number of classes of the network's output."""
    ignored: int
    """The number that stands for no class."""

    def wrong(self, target: torch.Tensor) -> tuple[int, int] | None:
        """Return the place along the first axis, and the value, of the first label that is no class."""
        if target.is_meta or target.numel() == 0:
            return None
        numbers = target.long()
        bad = ((numbers < 0) | (numbers >= self.outputs)) & (numbers != self.ignored)
        if not bool(bad.any()):
            return None
        place = bad.flatten().nonzero()[0, 0]
        rows = numbers.shape[0] if numbers.dim() else 1
        return int(place) // (numbers.numel() // rows), int(numbers.flatten()[place])


def labels_of(loss: Graph) -> tuple[ClassLabels, ...]:
    """Return the parts of the target that a captured loss takes as class numbers, as they are."""
    specs = {spec.name: spec for spec in loss.inputs}
    specs.update({spec.name: spec for node in loss.nodes for spec in node.outputs})
    makers = {spec.name: node for node in loss.nodes for spec in node.outputs}
    targets = set(tree_leaves(loss.input_tree[0][1]))
    labels: dict[ClassLabels, None] = {}
    for node in loss.nodes:
        if node.target.split(".")[1] not in CLASS_LOSSES:
            continue
        output, target = node.arguments[:2]
        ignored = ops.argument(node, "ignore_index")
        if not isinstance(output, Value) or not isinstance(target, Value) or not isinstance(ignored, int):
            continue
        shape, name = specs[output.name].shape, target.name
        if len(shape) < 2 or specs[output.name].batch_axis != 0 or specs[output.name].pairs_samples:
            continue
        if specs[name].dtype.startswith(("float", "bfloat")):
            continue  # probabilities of classes
        while name in makers and makers[name].target.split(".")[1] in _WHOLE_VIEWS:
            name = values_of(makers[name])[0]
        if name in targets:
            labels[ClassLabels(name, shape[1], ignored)] = None
    return tuple(labels)


def check_labels(graph: Graph, target: Any, which: str = "The targets") -> None:
    """Refuse a target of the graph's loss that names a class the network has no output for."""
    if graph.loss is None or not (labels := labels_of(graph.loss)):
        return
    blank = tree_map(lambda _: None, graph.loss.input_tree[0][0])
    check_leaves(labels, bind_inputs(graph.loss, (blank, target)), which)


def check_leaves(labels: tuple[ClassLabels, ...], targets: Mapping[str, Any], which: str) -> None:
    """Check targets given by the names of the loss's inputs."""
    for part in labels:
        wrong = part.wrong(targets[part.leaf])
        if wrong is not None:
            sample, label = wrong
            hint = f"Number the classes from 0, or give the network {label + 1} outputs."
            if label < 0:
                hint = f"Number the classes from 0; what is to be left out has the label {part.ignored} (ignore_index)."
            if targets[part.leaf].dim() == 1:
                expression = f"[i for i, (_, y) in enumerate(data) if not 0 <= y < {part.outputs}]"
                hint += f" All of them, of a data set of pairs: {expression}"
            raise BadData(
                f"{which}: sample {sample} has the label {label}; the network has {part.outputs} outputs, for labels "
                f"from 0 to {part.outputs - 1}.",
                hint=hint,
            )
