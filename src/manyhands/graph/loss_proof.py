"""Proves from a loss's operators, for any data, how the loss combines over samples.

The walk determines what each tensor of the loss is as a function of the samples. See `loss` for what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from manyhands.facts.network import LossCombination
from manyhands.graph import ops
from manyhands.graph.graph import Graph
from manyhands.graph.labels import CLASS_LOSSES
from manyhands.graph.nodes import (
    Argument,
    Node,
    SampleCount,
    Special,
    Value,
    Weight,
    records_of,
    values_of,
    weights_of,
)
from manyhands.graph.random_ops import RANDOM_CALLS
from manyhands.graph.rows import outer_of
from manyhands.graph.sample_mixing import mixes_samples
from manyhands.graph.trees import tree_leaves


@dataclass(frozen=True)
class _Kind:
    """The kind of function of the samples that a tensor is, times the number of samples to some power.

    fixed     the same for any samples
    each      rows of samples, each made from its own sample only
    sum       a sum over the samples of something made from each; with power -1, a mean
    numbers   0, 1, 2, ... one for each sample
    """

    what: Literal["fixed", "each", "sum", "numbers"]
    power: int = 0
    is_zero: bool = False


_FIXED, _EACH = _Kind("fixed"), _Kind("each")
_PAIRS = frozenset({"triplet_margin_loss", "cosine_embedding_loss"})
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_TOTALS = frozenset({"aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim"})
_CASTS = frozenset({"to", "_to_copy", "type_as"})
_VIEWS = frozenset({
    "view", "reshape", "view_as", "reshape_as", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t",
    "unsqueeze", "squeeze", "slice", "select", "narrow", "movedim", "swapaxes", "clone", "contiguous", "alias",
    "detach",
})  # fmt: skip
_PARTS = frozenset({"chunk", "split", "split_with_sizes", "unbind"})
_LINEAR = _VIEWS | _CASTS | {"neg", "expand", "expand_as", "broadcast_to", "stack", "cat", "concat"}
"""Operators with f(a + b) = f(a) + f(b) and f(2a) = 2f(a), for whole tensors."""


class LossProof:
    """A walk over the loss from its inputs to its value. A tensor without a kind is anything at all.

    `totals` are inputs that are the same for any samples, times the number of samples to some power (loss_totals.py).
    """

    def __init__(
        self, loss: Graph, penalties: frozenset[str] = frozenset(), totals: Mapping[str, int] | None = None
    ) -> None:
        self.loss = loss
        self.specs = {spec.name: spec for spec in loss.inputs}
        self.specs.update({spec.name: spec for node in loss.nodes for spec in node.outputs})
        self.makers = {spec.name: node for node in loss.nodes for spec in node.outputs}
        self.targets = set(tree_leaves(loss.input_tree[0][1]))
        self.kinds: dict[str, _Kind] = {
            spec.name: _EACH for spec in loss.inputs if spec.batch_axis == 0 and spec.rows_per_sample == 1
        } | dict.fromkeys(penalties, _FIXED)
        self.kinds.update((name, _Kind("fixed", power)) for name, power in (totals or {}).items())
        self.ignored: list[tuple[str, int]] = []
        """Parts of the target, each with the class that a mean leaves out."""

    def combination(self) -> LossCombination:
        if any(spec.pairs_samples for spec in self.specs.values()):
            return "whole"
        outers: dict[str, int | None] = {}
        for node in self.loss.nodes:
            if has_effects(node):
                return "whole"
            outer = outer_of(node, self.specs, outers)
            outers.update((spec.name, None) for spec in node.outputs if outer != 1)  # rows of a target lie in order
            kind = self._kind(node, mixes_samples(node, self.specs, outers))
            if kind is not None:
                self.kinds.update((spec.name, kind) for spec in node.outputs)
        value = self.kinds.get(self.loss.outputs[0])
        if value is None or value.what not in ("sum", "fixed"):
            return "whole"
        if value.what == "fixed":
            return "mean" if value.power == 0 else "sum" if value.power == 1 else "whole"
        return "mean" if value.power == -1 else "sum" if value.power == 0 else "whole"

    def _kind(self, node: Node, mixes: bool) -> _Kind | None:
        if any(name not in self.kinds for name in values_of(node)):
            return None
        kinds = [self.kinds[name] for name in values_of(node)]
        name, output = node.target.split(".")[1], node.outputs[0]
        if node.target in ("aten.mul.Tensor", "aten.mul.Scalar"):
            return self._product(node, 1)
        if node.target in ("aten.div.Tensor", "aten.div.Scalar"):
            return self._product(node, -1)
        if name in ("add", "sub", "rsub"):
            return self._total(node)
        if node.target in ops.LOSS:
            return self._loss_operator(node, mixes)
        if name == "arange":
            return _Kind("numbers") if node.arguments == (SampleCount(1),) else self._fixed(node, kinds)
        if name == "index" and self._picks_one_of_each(node):
            return _EACH
        if (name in _LINEAR or node.target in _TOTALS) and len(set(kinds)) == 1 and not weights_of(node):
            kind = self._linear(node, kinds[0], mixes)
            if kind is not None:
                return kind
        if any(kind.what not in ("fixed", "each") or kind.power for kind in kinds):
            return None
        if output.batch_axis is None:
            return self._fixed(node, kinds)
        if mixes or (name == "embedding" and _name(node.arguments[0])):
            return None  # an embedding's table is no weight: samples look each other up
        return _EACH

    def _fixed(self, node: Node, kinds: list[_Kind]) -> _Kind | None:
        """Return the kind of what is made of nothing but constants, and not of how many samples there are."""
        if any(kind.what != "fixed" or kind.power for kind in kinds) or node.outputs[0].batch_axis is not None:
            return None
        if any(isinstance(record, SampleCount) for record in records_of(node)):
            return None
        return _Kind("fixed", is_zero=node.target.split(".")[1] in _ZEROS)

    def _operand(self, argument: Argument) -> _Kind | None:
        if isinstance(argument, Value):
            return self.kinds.get(argument.name)
        if isinstance(argument, SampleCount):
            return _Kind("fixed", 1)
        if isinstance(argument, Weight):
            tensor = self.loss.state.get(argument.name)
            is_constant = tensor is not None and not tensor.is_meta and not tensor.requires_grad
            return _Kind("fixed", is_zero=is_constant and tensor is not None and not bool(tensor.any()))
        is_number = isinstance(argument, (int, float, Special))
        return _Kind("fixed", is_zero=argument == 0) if is_number else None

    def _operands(self, node: Node) -> tuple[_Kind, _Kind] | None:
        first, second = self._operand(node.arguments[0]), self._operand(node.arguments[1])
        if first is None or second is None or "numbers" in (first.what, second.what):
            return None
        return first, second

    def _product(self, node: Node, sign: int) -> _Kind | None:
        operands = self._operands(node)
        if operands is None:
            return None
        first, second = operands
        power = first.power + sign * second.power
        if "sum" in (first.what, second.what):
            is_scaled = second.what == "fixed" or (sign == 1 and first.what == "fixed")
            return _Kind("sum", power) if is_scaled else None
        return _Kind("each" if "each" in (first.what, second.what) else "fixed", power)

    def _total(self, node: Node) -> _Kind | None:
        """Return the kind of a sum of two. A fixed summand is the mean over the samples of itself, and N times it is a
        sum."""
        operands = self._operands(node)
        alpha = node.arguments[2] if len(node.arguments) > 2 else node.options.get("alpha", 1)
        if operands is None or not isinstance(alpha, (int, float)):
            return None
        first, second = operands
        for kind, other in ((first, second), (second, first)):
            if kind.what == "fixed" and kind.is_zero:
                return other
        if "sum" in (first.what, second.what):
            if "each" in (first.what, second.what):
                return None
            powers = {kind.power - (kind.what == "fixed") for kind in operands}
            return _Kind("sum", powers.pop()) if len(powers) == 1 else None
        if first.power != second.power:
            return None
        return _Kind("each" if "each" in (first.what, second.what) else "fixed", first.power)

    def _linear(self, node: Node, kind: _Kind, mixes: bool) -> _Kind | None:
        name, output = node.target.split(".")[1], node.outputs[0]
        if name in _CASTS and not output.dtype.startswith(("float", "bfloat")):
            return None  # rounding
        if output.batch_axis is None and kind.what == "each":
            if node.target not in _TOTALS:
                return None
            return _Kind("sum", kind.power - (name == "mean"))
        if output.batch_axis is None:
            counts = any(isinstance(record, SampleCount) for record in records_of(node))
            return None if counts or kind.what == "numbers" else kind
        return kind if kind.what == "each" and not mixes else None

    def _picks_one_of_each(self, node: Node) -> bool:
        """Return whether a node is `x[torch.arange(len(x)), classes]`: every sample looks into its own row."""
        source, indices = node.arguments[0], node.arguments[1]
        if not isinstance(source, Value) or self.kinds[source.name] != _EACH or node.outputs[0].batch_axis is None:
            return False
        spec, first = self.specs[source.name], indices[0]
        others = [self.kinds[index.name] for index in indices[1:] if isinstance(index, Value)]
        return (
            (spec.batch_axis, spec.rows_per_sample) == (0, 1)
            and isinstance(first, Value)
            and self.kinds[first.name].what == "numbers"
            and all(kind in (_EACH, _FIXED) for kind in others)
        )

    def _loss_operator(self, node: Node, mixes: bool) -> _Kind | None:
        name = node.target.split(".")[1]
        kinds = [self.kinds[value] for value in values_of(node)]
        batched = [self.specs[value] for value in values_of(node) if self.kinds[value].what == "each"]
        if any(kind.what not in ("fixed", "each") or kind.power for kind in kinds) or not batched:
            return None
        if name in CLASS_LOSSES | _PAIRS:
            first = batched[0]
            if first.name != _name(node.arguments[0]) or len(first.shape) < 2:
                return None
            if any(spec.batch_axis != 0 for spec in batched):
                return None  # e.g. as the axis of classes
        elif len({len(spec.shape) - (spec.batch_axis or 0) for spec in batched}) > 1:
            return None  # (B, 1) against (B): every sample meets every other
        reduction = ops.argument(node, "reduction")
        if reduction == 0:
            return None if mixes or node.outputs[0].batch_axis is None else _EACH
        if reduction == 1 and name in CLASS_LOSSES and not self._is_plain_mean(node):
            return None
        return _Kind("sum", -1) if reduction == 1 else _Kind("sum", 0) if reduction == 2 else None

    def _is_plain_mean(self, node: Node) -> bool:
        """Return whether a mean over classes divides by the number of targets, but for those of an ignored class."""
        target = _name(node.arguments[1])
        if target not in self.specs:
            return False
        if self.specs[target].dtype.startswith(("float", "bfloat")):
            return True  # probabilities of classes, by the number of targets even where classes have weights
        if ops.argument(node, "weight") is not None:
            return False
        number = ops.argument(node, "ignore_index")
        if not isinstance(number, int):
            return False
        origin = self._origin(target)
        if origin in self.targets:
            self.ignored.append((origin, number))
            return True
        maker = self.makers.get(origin)
        # Elsewhere the ignored class cannot be looked for before the loss is run; but places in a row are not below 0.
        return maker is not None and maker.target.split(".")[1] == "argmax" and number < 0

    def _origin(self, name: str) -> str:
        """Return the tensor of which another holds some of the values as they are."""
        while name in self.makers and self.makers[name].target.split(".")[1] in _VIEWS | _PARTS | {"to", "_to_copy"}:
            name = values_of(self.makers[name])[0]
        return name


def has_effects(node: Node) -> bool:
    """Return whether a node draws, writes a buffer or uses statistics of the batch."""
    random = RANDOM_CALLS.get(node.target)
    if node.updates or (random is not None and random.draws(node, training=True)):
        return True
    return node.target in ("aten.batch_norm.default", "aten.instance_norm.default") and bool(node.arguments[5])


def _name(argument: Argument) -> str:
    return argument.name if isinstance(argument, Value) else ""
