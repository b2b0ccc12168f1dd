"""How a loss combines over samples: what the losses of the shares of a batch say about the loss of the whole batch.

    mean     loss(batch) = sum of n_i / N * loss(share_i)     F.cross_entropy, F.mse_loss
    sum      loss(batch) = sum of loss(share_i)               reduction="sum"
    whole    neither: all samples must be in one place        class weights, a masked mean, RMSE, a contrastive loss

Numbers alone cannot tell: weights of classes look like a mean where all example targets are alike. So a walk over the
graph proves it from what each operator does, for any data, and a run on drawn data must agree. In doubt it is "whole".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import msgspec
import torch

from manyhands.facts.network import LossCombination, TensorSpec
from manyhands.graph import ops
from manyhands.graph.graph import (
    Argument,
    Enum,
    Graph,
    Node,
    Samples,
    Special,
    Value,
    Weight,
    records_of,
    tree_leaves,
    tree_map,
    values_of,
    weights_of,
)
from manyhands.graph.labels import CLASS_LOSSES, check_labels
from manyhands.graph.piece import Context, Piece
from manyhands.graph.random_ops import RANDOM_CALLS
from manyhands.graph.read_rules import mixes_samples
from manyhands.graph.rows import outer_of
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights


def combination(graph: Graph, outputs: Any, target: Any) -> LossCombination:
    """How `graph.loss` combines over samples. `outputs` and `target` are examples, as the loss takes them.

    A mean-reduced cross entropy counts as a mean as long as no target is its ignored class; whoever shares a batch
    must look for it (has_ignored). If the example target has one, or there are two such classes, it is "whole".
    An example target that names a class without an output is refused: the loss would fail on it, for another reason.
    """
    assert graph.loss is not None, "the graph was captured without a loss"
    check_labels(graph, target)
    proof = _Proof(graph.loss, _penalties(graph))
    proved = proof.combination()
    if proved == "whole" or len({number for _, number in proof.ignored}) > 1:
        return "whole"
    made = {spec.name: spec for node in graph.nodes for spec in node.outputs}
    examples = [torch.ones(made[name].shape, dtype=getattr(torch, made[name].dtype)) for name in graph.penalties]
    given = bind_inputs(graph.loss, ([outputs, examples] if examples else outputs, target))
    if _is_found(proof.ignored, given):
        return "whole"
    with _one_thread():
        return proved if _agrees(graph.loss, proved, given) else "whole"


def _penalties(graph: Graph) -> frozenset[str]:
    """Inputs of the loss that are made from weights alone, whatever the samples."""
    if graph.loss is None or not graph.penalties:
        return frozenset()
    return frozenset(tree_leaves(graph.loss.input_tree[0][0][1]))


def ignored_class(graph: Graph) -> int | None:
    """The class number whose targets a mean-reduced cross entropy in `graph.loss` leaves out; None: there is none."""
    return next((number for _, number in _ignored(graph)), None)


def has_ignored(graph: Graph, target: Any) -> bool:
    """Whether a target holds the ignored class where the loss looks for it.

    Such a batch must not be shared: its loss is a mean over the other targets, and shares differ in how many they have.
    """
    ignored = _ignored(graph)
    if graph.loss is None or not ignored:
        return False
    blank = tree_map(lambda _: None, graph.loss.input_tree[0][0])
    return _is_found(ignored, bind_inputs(graph.loss, (blank, target)))


def _ignored(graph: Graph) -> list[tuple[str, int]]:
    if graph.loss is None:
        return []
    proof = _Proof(graph.loss, _penalties(graph))
    proof.combination()
    return proof.ignored


def _is_found(ignored: list[tuple[str, int]], given: Mapping[str, torch.Tensor]) -> bool:
    """As the loss sees targets: class numbers given as floats are cut off."""
    return any(bool((given[leaf].long() == number).any()) for leaf, number in ignored if not given[leaf].is_meta)


# The proof: what each tensor of the loss is, whatever the data.


@dataclass(frozen=True)
class _Kind:
    """What a tensor is as a function of the samples, times the number of samples to some power.

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
"""f(a + b) = f(a) + f(b) and f(2a) = 2f(a), for whole tensors."""


class _Proof:
    """A walk over the loss from its inputs to its value. A tensor without a kind is anything at all."""

    def __init__(self, loss: Graph, penalties: frozenset[str] = frozenset()) -> None:
        self.loss = loss
        self.specs = {spec.name: spec for spec in loss.inputs}
        self.specs.update({spec.name: spec for node in loss.nodes for spec in node.outputs})
        self.makers = {spec.name: node for node in loss.nodes for spec in node.outputs}
        self.targets = set(tree_leaves(loss.input_tree[0][1]))
        self.kinds: dict[str, _Kind] = {
            spec.name: _EACH for spec in loss.inputs if spec.batch_axis == 0 and spec.rows_per_sample == 1
        } | dict.fromkeys(penalties, _FIXED)
        self.ignored: list[tuple[str, int]] = []
        """Parts of the target with the class that a mean leaves out of them."""

    def combination(self) -> LossCombination:
        outers: dict[str, int | None] = {}
        for node in self.loss.nodes:
            if _has_effects(node):
                return "whole"
            outer = outer_of(node, self.specs, outers)
            outers.update((spec.name, outer) for spec in node.outputs if outer != 1)
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
        given = [self.kinds[name] for name in values_of(node)]
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
            return _Kind("numbers") if node.arguments == (Samples(1),) else self._fixed(node, given)
        if name == "index" and self._picks_one_of_each(node):
            return _EACH
        if (name in _LINEAR or node.target in _TOTALS) and len(set(given)) == 1 and not weights_of(node):
            kind = self._linear(node, given[0], mixes)
            if kind is not None:
                return kind
        if any(kind.what not in ("fixed", "each") or kind.power for kind in given):
            return None
        if output.batch_axis is None:
            return self._fixed(node, given)
        if mixes or (name == "embedding" and _name(node.arguments[0])):
            return None  # an embedding's table is no weight: samples look each other up
        return _EACH

    def _fixed(self, node: Node, given: list[_Kind]) -> _Kind | None:
        """What is made of nothing but constants, and not of how many samples there are."""
        if any(kind.what != "fixed" or kind.power for kind in given) or node.outputs[0].batch_axis is not None:
            return None
        if any(isinstance(record, Samples) for record in records_of(node)):
            return None
        return _Kind("fixed", is_zero=node.target.split(".")[1] in _ZEROS)

    def _operand(self, argument: Argument) -> _Kind | None:
        if isinstance(argument, Value):
            return self.kinds.get(argument.name)
        if isinstance(argument, Samples):
            return _Kind("fixed", 1)
        if isinstance(argument, Weight):
            tensor = self.loss.state.get(argument.name)
            known = tensor is not None and not tensor.is_meta and not tensor.requires_grad
            return _Kind("fixed", is_zero=known and tensor is not None and not bool(tensor.any()))
        is_number = isinstance(argument, (int, float, Special))
        return _Kind("fixed", is_zero=argument == 0) if is_number else None

    def _operands(self, node: Node) -> tuple[_Kind, _Kind] | None:
        one, other = self._operand(node.arguments[0]), self._operand(node.arguments[1])
        if one is None or other is None or "numbers" in (one.what, other.what):
            return None
        return one, other

    def _product(self, node: Node, sign: int) -> _Kind | None:
        operands = self._operands(node)
        if operands is None:
            return None
        one, other = operands
        power = one.power + sign * other.power
        if "sum" in (one.what, other.what):
            is_scaled = other.what == "fixed" or (sign == 1 and one.what == "fixed")
            return _Kind("sum", power) if is_scaled else None
        return _Kind("each" if "each" in (one.what, other.what) else "fixed", power)

    def _total(self, node: Node) -> _Kind | None:
        """A sum of two. What is fixed is a mean over the samples of itself, or N times itself a sum."""
        operands = self._operands(node)
        alpha = node.arguments[2] if len(node.arguments) > 2 else node.options.get("alpha", 1)
        if operands is None or not isinstance(alpha, (int, float)):
            return None
        one, other = operands
        for kind, rest in ((one, other), (other, one)):
            if kind.what == "fixed" and kind.is_zero:
                return rest
        if "sum" in (one.what, other.what):
            if "each" in (one.what, other.what):
                return None
            powers = {kind.power - (kind.what == "fixed") for kind in operands}
            return _Kind("sum", powers.pop()) if len(powers) == 1 else None
        if one.power != other.power:
            return None
        return _Kind("each" if "each" in (one.what, other.what) else "fixed", one.power)

    def _linear(self, node: Node, kind: _Kind, mixes: bool) -> _Kind | None:
        name, output = node.target.split(".")[1], node.outputs[0]
        if name in _CASTS and not output.dtype.startswith(("float", "bfloat")):
            return None  # rounding
        if output.batch_axis is None and kind.what == "each":
            if node.target not in _TOTALS:
                return None
            return _Kind("sum", kind.power - (name == "mean"))
        if output.batch_axis is None:
            counts = any(isinstance(record, Samples) for record in records_of(node))
            return None if counts or kind.what == "numbers" else kind
        return kind if kind.what == "each" and not mixes else None

    def _picks_one_of_each(self, node: Node) -> bool:
        """`x[torch.arange(len(x)), classes]`: every sample looks into its own row."""
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
        given = [self.kinds[value] for value in values_of(node)]
        batched = [self.specs[value] for value in values_of(node) if self.kinds[value].what == "each"]
        if any(kind.what not in ("fixed", "each") or kind.power for kind in given) or not batched:
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
        """Whether a mean over classes divides by the number of targets, but for those of an ignored class."""
        target = _name(node.arguments[1])
        if ops.argument(node, "weight") is not None or target not in self.specs:
            return False
        if self.specs[target].dtype.startswith(("float", "bfloat")):
            return True  # probabilities of classes
        number = ops.argument(node, "ignore_index")
        if not isinstance(number, int):
            return False
        origin = self._origin(target)
        if origin in self.targets:
            self.ignored.append((origin, number))
            return True
        maker = self.makers.get(origin)
        # Elsewhere nobody could look for the ignored class before the loss is run; but places in a row are not below 0.
        return maker is not None and maker.target.split(".")[1] == "argmax" and number < 0

    def _origin(self, name: str) -> str:
        """The tensor of which another holds some of the values as they are."""
        while name in self.makers and self.makers[name].target.split(".")[1] in _VIEWS | _PARTS | {"to", "_to_copy"}:
            name = values_of(self.makers[name])[0]
        return name


def _has_effects(node: Node) -> bool:
    """Whether a node draws, writes a buffer or uses statistics of the batch."""
    random = RANDOM_CALLS.get(node.target)
    if node.updates or (random is not None and random.draws(node, training=True)):
        return True
    return node.target in ("aten.batch_norm.default", "aten.instance_norm.default") and bool(node.arguments[5])


def _name(argument: Argument) -> str:
    return argument.name if isinstance(argument, Value) else ""


# The run: drawn outputs, resampled targets, shares of several sizes.


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch's threads wait for each other longer than such small runs take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_TOLERANCE = 1e-9
_LARGE = 10_000
"""Elements of one sample above which one draw must do: capture is to stay quick."""
_DRAWS = (("normal", False), ("between 0 and 1", True), ("probabilities", False), ("normal", True))
"""How outputs are drawn, and whether targets that are no integers are changed; a loss may not take all of them."""


def _agrees(loss: Graph, claim: LossCombination, given: Mapping[str, torch.Tensor]) -> bool:
    """Whether values and gradients of shares add up to those of the whole, on every draw that the loss can take."""
    try:
        double = in_double(loss)
        piece = Piece(double, Weights({name: tensor.detach().cpu().clone() for name, tensor in double.state.items()}))
    except (RuntimeError, NotImplementedError):
        return False  # e.g. weights without values
    is_large = sum(spec.elements for spec in loss.inputs) > _LARGE
    samples, splits = (3, ((1, 2),)) if is_large else (5, ((2, 3), (1, 1, 1, 2)))
    generator = torch.Generator().manual_seed(0)
    batched = {spec.name for spec in loss.inputs if spec.batch_axis is not None}
    of_outputs = set(tree_leaves(loss.input_tree[0][0])) & batched
    taken = 0
    for drawing, is_changed in _DRAWS:
        values = {
            name: _drawn(given[name], samples, generator, drawing if name in of_outputs else "", is_changed)
            if name in batched
            else cast_to_double(given[name])
            for name in piece.inputs
        }
        whole = _run(piece, values, of_outputs, samples)
        if whole is None:
            continue
        for sizes in splits:
            order = iter(torch.randperm(samples, generator=generator).tolist())
            shares = [list(islice(order, size)) for size in sizes]
            if not _adds_up(piece, claim, values, of_outputs, whole, shares):
                return False
        taken += 1
        if is_large:
            break
    return taken > 0


@dataclass(frozen=True)
class _Result:
    value: float
    gradients: dict[str, torch.Tensor]


def _adds_up(
    piece: Piece,
    claim: LossCombination,
    values: Mapping[str, torch.Tensor],
    of_outputs: set[str],
    whole: _Result,
    shares: list[list[int]],
) -> bool:
    samples = sum(len(rows) for rows in shares)
    total, size = 0.0, abs(whole.value)
    for rows in shares:
        own = {
            name: tensor if piece.specs[name].batch_axis is None else tensor[rows] for name, tensor in values.items()
        }
        result = _run(piece, own, of_outputs, len(rows))
        if result is None:
            return False
        factor = len(rows) / samples if claim == "mean" else 1.0
        total += factor * result.value
        size = max(size, abs(factor * result.value))
        for name, gradient in result.gradients.items():
            wanted = whole.gradients[name][rows]
            # A gradient that is 0 but for rounding is measured by the loss.
            limit = _TOLERANCE * float(wanted.abs().max()) + 1e-13 * abs(whole.value) if wanted.numel() else 0.0
            if wanted.numel() and float((wanted - factor * gradient).abs().max()) > limit:
                return False
    return abs(total - whole.value) <= _TOLERANCE * size


def _run(piece: Piece, values: Mapping[str, torch.Tensor], of_outputs: set[str], samples: int) -> _Result | None:
    """The loss and its gradients for the outputs; None where it raises or is no number."""
    entered = {name: tensor.detach() for name, tensor in values.items()}
    asked = {name: t.requires_grad_() for name, t in entered.items() if name in of_outputs and t.is_floating_point()}
    try:
        with torch.enable_grad():
            value = piece(entered, Context(samples=samples))[piece.graph.outputs[0]]
            found: Sequence[torch.Tensor | None] = [None] * len(asked)
            if value.requires_grad and asked:
                found = torch.autograd.grad(value, list(asked.values()), allow_unused=True)
    except Exception:  # the loss is the user's: it may refuse drawn numbers, or a share of one sample, in any way
        return None
    gradients = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(asked.items(), found, strict=True)}
    number = float(value.detach())
    totals = [float(gradient.sum()) for gradient in gradients.values()]  # of which one is no number if any element is
    return _Result(number, gradients) if all(map(math.isfinite, (number, *totals))) else None


def _drawn(
    example: torch.Tensor, samples: int, generator: torch.Generator, drawing: str, is_changed: bool
) -> torch.Tensor:
    """As many samples like the example: an output drawn anew, a target's rows taken again."""
    example = torch.zeros(example.shape, dtype=example.dtype) if example.is_meta else example.detach().cpu()
    rows = torch.randint(example.shape[0], (samples,), generator=generator)
    taken = cast_to_double(example[rows])
    if not taken.is_floating_point():
        return taken  # class numbers stay valid
    if not drawing:
        return taken * (0.5 + _uniform(taken, generator)) if is_changed else taken
    if drawing == "between 0 and 1":
        return 0.05 + 0.9 * _uniform(taken, generator)
    normal = torch.randn(taken.shape, generator=generator, dtype=torch.float64)
    if drawing == "probabilities":
        return normal.softmax(1) if taken.dim() > 1 else normal.sigmoid()
    return taken + normal


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(like.shape, generator=generator, dtype=torch.float64)


def cast_to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


_ROUNDED = frozenset({"float32", "float16", "bfloat16"})


def in_double(graph: Graph) -> Graph:
    """The same graph, and its loss, computing in float64 throughout, so that rounding is no doubt."""
    return msgspec.structs.replace(
        graph,
        inputs=tuple(_double_spec(spec) for spec in graph.inputs),
        nodes=tuple(_double_node(node) for node in graph.nodes),
        state={name: cast_to_double(tensor) for name, tensor in graph.state.items()},
        loss=in_double(graph.loss) if graph.loss is not None else None,
    )


def _double_spec(spec: TensorSpec) -> TensorSpec:
    return msgspec.structs.replace(spec, dtype="float64") if spec.dtype in _ROUNDED else spec


def _double_node(node: Node) -> Node:
    options = {key: _double_argument(argument) for key, argument in node.options.items()}
    makes = node.target in ops.CREATION and node.outputs[0].dtype in _ROUNDED
    if makes and any(argument.name == "dtype" for argument in ops.resolve(node.target)._schema.arguments):
        options["dtype"] = Enum("float64")
    return msgspec.structs.replace(
        node,
        arguments=tuple(_double_argument(argument) for argument in node.arguments),
        options=options,
        outputs=tuple(_double_spec(spec) for spec in node.outputs),
    )


def _double_argument(argument: Argument) -> Argument:
    if isinstance(argument, (list, tuple)):
        return tuple(_double_argument(item) for item in argument)
    return Enum("float64") if isinstance(argument, Enum) and argument.name in _ROUNDED else argument
