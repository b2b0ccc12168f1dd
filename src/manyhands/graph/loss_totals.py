"""The totals of a loss: what it makes from the targets of all samples together, without looking at an output.

    F.cross_entropy(o, t, weight=w)        sum of w[t_i] * n_i   / total of all w[t_i]
    F.cross_entropy(o, t)                  sum of n_i            / number of targets that are not ignored
    ((o - t) ** 2 * mask).sum() / mask.sum().clamp(min=1)        the mask's total, clamped

The loss of a share needs the totals of the whole batch. Targets are there before the first output is computed, so the
totals are computed ahead from all of them, and the loss is rewritten to take them as inputs: what is left of it is a
plain sum or mean over samples, which `LossProof` proves. A tensor counts as a total only if the graph shows that
targets and constants are all that it is made from; a loss that weighs by its outputs has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import msgspec
import torch

from manyhands.facts.errors import BadData
from manyhands.facts.network import TensorSpec
from manyhands.graph import ops
from manyhands.graph.graph import Graph
from manyhands.graph.labels import CLASS_LOSSES
from manyhands.graph.loss_proof import has_effects
from manyhands.graph.nodes import Argument, Node, Value, Weight, values_of
from manyhands.graph.piece import Context, Piece
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights

LOSS_TOTALS = "totals of the loss"
"""The name under which the totals of a batch travel beside its targets."""
POWERS = (0, 1, -1)
"""The powers of n/N by which totals may be scaled for n of N samples: 0 where the rest is a sum over samples, 1 or -1
where dividing or multiplying by totals gives something that is added to a mean."""


@dataclass(frozen=True)
class LossTotal:
    """A number, or several, made from all targets of a batch: a tensor of the loss, or a mean's sum of weights."""

    name: str
    """The input of the rewritten loss."""
    source: str
    """The loss's tensor that is the total; or that holds the class numbers of which weights are added up."""
    shape: tuple[int, ...]
    dtype: str
    is_of_classes: bool = False
    weight: Argument = None
    """The weights of classes; None: each counts once."""
    ignored: int = -100

    @property
    def elements(self) -> int:
        return prod(self.shape)


class LossTotals:
    """A loss, rewritten to take its totals as inputs, and a graph that makes them from targets."""

    def __init__(self, original: Graph, loss: Graph, totals: tuple[LossTotal, ...]) -> None:
        self.original, self.loss, self.totals = original, loss, totals
        self._piece: Piece | None = None
        self._dtype = next(spec.dtype for node in loss.nodes for spec in node.outputs if spec.name == loss.outputs[0])

    @property
    def spec(self) -> TensorSpec:
        """The tensor in which all totals of a batch travel; float64 holds every one exactly."""
        return TensorSpec(LOSS_TOTALS, (sum(total.elements for total in self.totals),), "float64")

    def of(self, targets: Mapping[str, torch.Tensor], samples: int) -> torch.Tensor:
        """Return the totals of a batch, one after another, from its targets by the names of the loss's inputs."""
        if self._piece is None:
            self._piece = Piece(_before_outputs(self.original, self.totals), Weights.copied(self.original))
        piece = self._piece
        with torch.no_grad():
            made = piece({name: targets[name] for name in piece.inputs}, Context(samples=samples))
            values = [self._value(total, made, piece.weights.tensors) for total in self.totals]
        return torch.cat([value.double().reshape(-1) for value in values])

    @staticmethod
    def _value(total: LossTotal, made: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        source = made[total.source]
        if not total.is_of_classes:
            return source
        numbers = source.long()
        is_kept = numbers != total.ignored
        if total.weight is None:
            return is_kept.sum()
        of_class = (made if isinstance(total.weight, Value) else weights)[total.weight.name].double()
        bad = is_kept & ((numbers < 0) | (numbers >= len(of_class)))
        if bool(bad.any()):
            raise BadData(
                f"The loss is given the class {int(numbers[bad][0])}; there are weights for {len(of_class)} classes.",
                hint=f"Number the classes from 0; what is to be left out has the label {total.ignored} (ignore_index).",
            )
        return torch.where(is_kept, of_class[numbers.where(is_kept, 0)], 0.0).sum()

    def inputs(self, totals: torch.Tensor, part: float, power: int) -> dict[str, torch.Tensor]:
        """Return the totals by the names of the rewritten loss's inputs, for a part n/N of the samples."""
        values: dict[str, torch.Tensor] = {}
        first = 0
        for total in self.totals:
            piece = totals[first : first + total.elements]
            first += total.elements
            dtype = getattr(torch, total.dtype)
            if power and not dtype.is_floating_point:
                dtype = getattr(torch, self._dtype)  # counts are multiplied and divided by, and no longer whole
            values[total.name] = (piece * part**power).to(dtype).reshape(total.shape)
        return values


def totals_of(loss: Graph) -> LossTotals | None:
    """Return a loss's totals, and the loss rewritten to take them; None where it has none. Whether the rewritten loss
    is a sum or a mean over samples is for `LossProof` to say."""
    if any(has_effects(node) for node in loss.nodes):
        return None
    ahead, from_targets = _made_ahead(loss)
    if loss.outputs[0] in ahead:
        return None
    totals: dict[str, LossTotal] = {}
    nodes: list[Node] = []
    renamed: dict[str, str] = {}
    for node in loss.nodes:
        is_total = all(spec.name in from_targets and spec.batch_axis is None for spec in node.outputs)
        if is_total and node.outputs[0].name in ahead:
            for spec in node.outputs:
                renamed[spec.name] = f"total of {spec.name}"
                totals[renamed[spec.name]] = LossTotal(renamed[spec.name], spec.name, spec.shape, spec.dtype)
        elif (total := _weights_of_mean(node, ahead, loss)) is not None:
            totals[total.name] = total
            nodes += _divided(_renamed(node, renamed), total)
        else:
            nodes.append(_renamed(node, renamed))
    kept = _needed(nodes, {loss.outputs[0]})
    read = {name for node in kept for name in values_of(node)}
    taken = tuple(total for total in totals.values() if total.name in read)
    if not taken:
        return None
    inputs = (*loss.inputs, *(TensorSpec(total.name, total.shape, total.dtype) for total in taken))
    return LossTotals(loss, msgspec.structs.replace(loss, inputs=inputs, nodes=kept), taken)


def _made_ahead(loss: Graph) -> tuple[set[str], set[str]]:
    """Return the tensors that are made from targets and constants alone, and those of them that depend on a target."""
    from_targets = set(tree_leaves(loss.input_tree[0][1]))
    ahead = set(from_targets)
    for node in loss.nodes:
        names = values_of(node)
        if all(name in ahead for name in names):
            made = {spec.name for spec in node.outputs}
            ahead |= made
            if any(name in from_targets for name in names):
                from_targets |= made
    return ahead, from_targets


def _weights_of_mean(node: Node, ahead: set[str], loss: Graph) -> LossTotal | None:
    """Return the total by which a mean over classes divides; None: the node is no such mean, or shows it too late."""
    if node.target.split(".")[1] not in CLASS_LOSSES or ops.argument(node, "reduction") != 1:
        return None
    if node.outputs[0].name in ahead:
        return None
    output, target, weight = *node.arguments[:2], ops.argument(node, "weight")
    ignored = ops.argument(node, "ignore_index")
    if not isinstance(target, Value) or target.name not in ahead or not isinstance(ignored, int):
        return None
    if not (weight is None or isinstance(weight, Weight) or (isinstance(weight, Value) and weight.name in ahead)):
        return None
    specs = {spec.name: spec for spec in loss.inputs}
    specs.update({spec.name: spec for made in loss.nodes for spec in made.outputs})
    if specs[target.name].dtype.startswith(("float", "bfloat")) or not isinstance(output, Value):
        return None  # probabilities of classes
    name, dtype = node.outputs[0].name, node.outputs[0].dtype
    return LossTotal(f"total of {name}", target.name, (), dtype, True, weight, ignored)


def _divided(node: Node, total: LossTotal) -> tuple[Node, Node]:
    """Return a mean as a sum, and its division by a total."""
    spec = node.outputs[0]
    sum_spec = msgspec.structs.replace(spec, name=f"sum of {spec.name}")
    arguments, options = list(node.arguments), dict(node.options)
    names = [parameter.name for parameter in ops.resolve(node.target)._schema.arguments]
    place = names.index("reduction")
    if place < len(arguments):
        arguments[place] = 2
    else:
        options["reduction"] = 2
    added = msgspec.structs.replace(
        node, name=sum_spec.name, arguments=tuple(arguments), options=options, outputs=(sum_spec,)
    )
    both = (Value(sum_spec.name), Value(total.name))
    return added, msgspec.structs.replace(node, target="aten.div.Tensor", arguments=both, options={}, outputs=(spec,))


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Return the node with some tensors that it reads replaced by others."""

    def visit(argument: Argument) -> Argument:
        if isinstance(argument, Value):
            return Value(names.get(argument.name, argument.name))
        return tuple(map(visit, argument)) if isinstance(argument, (list, tuple)) else argument

    if not names or not set(names).intersection(values_of(node)):
        return node
    options = {key: visit(argument) for key, argument in node.options.items()}
    return msgspec.structs.replace(node, arguments=visit(node.arguments), options=options)


def _needed(nodes: list[Node], names: set[str]) -> tuple[Node, ...]:
    """Return the nodes that some tensors are made by, in order."""
    needed, kept = set(names), []
    for node in reversed(nodes):
        if any(spec.name in needed for spec in node.outputs):
            needed.update(values_of(node))
            kept.append(node)
    return tuple(reversed(kept))


def _before_outputs(loss: Graph, totals: tuple[LossTotal, ...]) -> Graph:
    """Return the graph that makes what totals are made from."""
    sources = [total.source for total in totals]
    sources += [total.weight.name for total in totals if isinstance(total.weight, Value)]
    sources = list(dict.fromkeys(sources))
    return msgspec.structs.replace(loss, nodes=_needed(list(loss.nodes), set(sources)), output_tree=sources)
