"""The self-check, which compares how a captured graph trains with how the module itself does. Both run the same
operators in the same order, so they differ by rounding at most; whatever torch.export did not see (a hook, a tensor
from elsewhere, a value that Python decided) shows here, before the first step. Inside torch.autocast the module runs
under it, and the graph by its own casts.

A random operator draws by its name in the graph (random.py); the module is made to draw the same numbers.

Of weights that are mapped from a file, both have the pages of one layer in memory at a time, forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.utils._pytree
from torch import nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.alike_draws import AlikeDraws, OtherDraws
from manyhands.graph.arguments import in_training_mode
from manyhands.graph.double_precision import cast_to_double, in_double
from manyhands.graph.graph import Graph
from manyhands.graph.own_loss import module_loss
from manyhands.graph.piece import Context, Piece, run_steps
from manyhands.graph.precision import left, surrounding
from manyhands.graph.sizes import at
from manyhands.graph.tape import bind_inputs
from manyhands.graph.trees import tree_map
from manyhands.graph.weights import Weights
from manyhands.weights.mapped import give_back_pages, is_mapped

_ROUNDINGS = 64
"""Difference, in roundings of the type computed in, above which the comparison is repeated in float64."""
_IN_DOUBLE = 1e-9
"""Relative difference in float64 beyond which two gradients are not the same. Where the module itself rounds to a
smaller type, repeating it in float64 proves nothing, and where weights are mapped from a file it would need memory for
all of them: there `_ROUNDED` holds."""
_ROUNDED = 1e-3
_LOWER_ROUNDINGS = 16
"""Difference under torch.autocast, in roundings of the lower type, that is never taken for rounding. Both are compared
in float64 too, without autocast: a graph's casts are then none."""
_NEGLIGIBLE = 1e-3
"""A gradient below this part of the largest of all is measured by that part: it is zero but for rounding."""


@dataclass(frozen=True)
class Verified:
    """The outcome of the self-check."""

    samples: int
    seconds: float
    difference: float
    """The largest relative difference between a gradient of the graph and the module's own."""
    note: str = ""
    """The reason why nothing was compared; "" if it was."""


@dataclass
class _Step:
    """The results of one forward and backward pass."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def verify(
    graph: Graph,
    module: nn.Module,
    loss: Callable[..., torch.Tensor] | Literal["own"],
    example_batch: Any,
    target: Any,
) -> Verified:
    """Compare `graph`, captured from `module` with `loss`, with the module itself on one small batch.

    Raises CaptureFailed, which names the first layer that differs. The module, its buffers and torch's random numbers
    are left as they were.
    """
    start = time.perf_counter()
    check = _Given(graph, module, loss, example_batch, target)
    try:
        difference = _difference(check, check.by_module(), check.by_graph())
        if not difference.is_within(_ROUNDINGS * torch.finfo(check.dtype).eps):
            difference = _checked_further(check, difference)
    except OtherDraws:
        note = "the module draws random numbers in another order than its captured graph"
        return Verified(check.samples, time.perf_counter() - start, 0.0, note)
    return Verified(check.samples, time.perf_counter() - start, difference.largest)


def _checked_further(check: _Given, difference: _Difference) -> _Difference:
    """Return the difference in float64, where that shows more than a larger one in a smaller type; too large a one is a
    CaptureFailed."""
    region = check.region
    if region is not None:
        if not difference.is_within(_LOWER_ROUNDINGS * torch.finfo(region.dtype).eps):
            raise _differs(check, difference)
        if check.gives_back:
            return difference
    elif _rounds_itself(check.graph) or check.gives_back:
        if not difference.is_within(_ROUNDED):
            raise _differs(check, difference)
        return difference
    with left(), check.in_float64():
        difference = _difference(check, check.by_module(), check.by_graph())
        if not difference.is_within(_IN_DOUBLE if region is None else _ROUNDED):
            raise _differs(check, difference)
    return difference


class _Given:
    """The module, its graph, and the batch on which both are run."""

    def __init__(
        self,
        graph: Graph,
        module: nn.Module,
        loss: Callable[..., torch.Tensor] | Literal["own"],
        batch: Any,
        target: Any,
    ) -> None:
        assert graph.loss is not None, "the graph was captured without a loss"
        self.graph, self.module, self.loss, self.batch, self.target = graph, module, loss, batch, target
        self.network = graph.network
        self.region = surrounding()
        """Where the module computes under torch.autocast; None: it does not."""
        self.parameters = {
            name: parameter
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad and name not in graph.aliases
        }
        floats = [p.dtype for p in self.parameters.values() if p.is_floating_point()]
        self.dtype = floats[0] if floats else torch.get_default_dtype()
        leaves = bind_inputs(graph, batch)
        self.gives_back = any(map(is_mapped, graph.state.values()))
        """Whether weights leave memory once a layer has read them."""
        self.samples = next((len(leaves[spec.name]) for spec in graph.inputs if spec.batch_axis == 0), 0)

    def by_module(self, watch: Callable[[str, torch.Tensor], None] | None = None) -> _Step:
        """Run the module's own step. `watch` is called with what each child returns."""
        if watch is None and self.gives_back:
            watch = _give_back
        with _restored(self.module), in_training_mode(self.module), torch.enable_grad(), _watched(self.module, watch):
            with AlikeDraws(self.graph) as draws:
                value = module_loss(self.module, self.loss, self.batch, self.target)
            draws.check_all_drawn()
            results = torch.autograd.grad(value, list(self.parameters.values()), allow_unused=True)
            buffers = {name: tensor.detach().clone() for name, tensor in self.module.named_buffers()}
        gradients = {name: g for name, g in zip(self.parameters, results, strict=True) if g is not None}
        return _Step(value.detach(), gradients, buffers)

    def by_graph(self) -> _Step:
        """Run the graph's step. It reads the module's own parameters, and writes to copies of its buffers."""
        graph = self.graph
        with left():
            return self._by_graph(graph)

    def _by_graph(self, graph: Graph) -> _Step:
        assert graph.loss is not None
        tensors = {
            s.name: weight.clone() if s.buffer else weight.detach().requires_grad_(s.trainable)
            for s in graph.weights
            for weight in [graph.state[s.name]]
        }
        with torch.enable_grad():
            values = dict(bind_inputs(graph, self.batch))
            cuts = [layer.last for layer in self.network.layers] if self.gives_back else [len(graph.nodes)]
            for first, last in pairwise([0, *cuts]):
                made = Piece(graph, Weights(tensors), first, last)(values, Context(samples=self.samples))
                values.update(made)
                for name, tensor in made.items() if self.gives_back else ():
                    _give_back(name, tensor)
            returned = bind_inputs(graph.loss, (tree_map(values.__getitem__, graph.loss_tree), self.target))
            value = Piece(graph.loss, Weights.copied(graph.loss))(returned, Context(samples=self.samples))
            number = value[graph.loss.outputs[0]]
            trained = [s.name for s in graph.weights if s.trainable]
            results: tuple[torch.Tensor | None, ...] = (None,) * len(trained)
            if number.requires_grad and trained:
                results = torch.autograd.grad(number, [tensors[name] for name in trained], allow_unused=True)
        gradients = {name: g for name, g in zip(trained, results, strict=True) if g is not None}
        buffers = {s.name: tensors[s.name] for s in graph.weights if s.buffer}
        return _Step(number.detach(), gradients, buffers)

    @contextmanager
    def in_float64(self) -> Iterator[None]:
        """Make module, graph and batch compute in float64, within this context. The parameters stay the same objects: a
        loss may refer to them."""
        before = self.graph, self.batch, self.target
        tensors = [*self.module.parameters(), *self.module.buffers()]
        data = [tensor.data for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.data = cast_to_double(tensor.data)
            self.graph = in_double(self.graph)
            self.batch, self.target = _every_tensor(cast_to_double, (self.batch, self.target))
            yield
        finally:
            self.graph, self.batch, self.target = before
            for tensor, original in zip(tensors, data, strict=True):
                tensor.data = original


def _give_back(_: str, tensor: torch.Tensor) -> None:
    """Give the pages of weights back now, and again once the gradient of a tensor that was just made is there."""
    give_back_pages()
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: give_back_pages())  # type: ignore[no-untyped-call]


def _every_tensor(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the same structure with every tensor in it changed."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, change, value)


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers afterwards, whatever was written to them or put in their place."""
    before = [(child, dict(child._buffers)) for child in module.modules()]
    copies = [(tensor, tensor.clone()) for tensor in module.buffers()]
    try:
        yield
    finally:
        for child, buffers in before:
            child._buffers.clear()
            child._buffers.update(buffers)
        for tensor, copy in copies:
            tensor.data.copy_(copy)


@contextmanager
def _watched(module: nn.Module, watch: Callable[[str, torch.Tensor], None] | None) -> Iterator[None]:
    """Call `watch` with the path of every child and the tensor that it returns, if that is one."""
    handles = []
    for path, child in module.named_modules() if watch is not None else ():

        def returned(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
            if isinstance(output, torch.Tensor) and watch is not None:
                watch(path, output)

        handles.append(child.register_forward_hook(returned))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# The comparison


@dataclass(frozen=True)
class _Difference:
    """The distance between two steps, relative to their size."""

    loss: float
    gradients: dict[str, float]
    buffers: dict[str, float]

    def is_within(self, limit: float) -> bool:
        return self.largest <= limit  # false for nan

    @property
    def largest(self) -> float:
        numbers = [self.loss, *self.gradients.values(), *self.buffers.values()]
        return next((n for n in numbers if n != n), max(numbers))


def _difference(check: _Given, module: _Step, graph: _Step) -> _Difference:
    names = list(dict.fromkeys((*module.gradients, *graph.gradients)))
    largest = max((float(g.abs().max()) for g in module.gradients.values() if g.numel()), default=0.0)
    gradients = {
        name: _apart(module.gradients.get(name), graph.gradients.get(name), _NEGLIGIBLE * largest) for name in names
    }
    written = {name for op in check.network.ops for name in op.writes}
    buffers = {name: _apart(module.buffers[name], graph.buffers[name], 0.0) for name in written & set(module.buffers)}
    return _Difference(_apart(module.loss, graph.loss, 0.0), gradients, buffers)


def _apart(first: torch.Tensor | None, second: torch.Tensor | None, least: float) -> float:
    """Return the largest difference between two tensors over their largest element, or over `least`; None is all
    zeros."""
    if first is None or second is None:
        present = first if second is None else second
        first, second = (torch.zeros(()), torch.zeros(())) if present is None else (present, torch.zeros_like(present))
    if not first.numel() or torch.equal(first, second):
        return 0.0
    if bool((torch.isnan(first) == torch.isnan(second)).all()):  # both are NaN at the same places
        first, second = first.nan_to_num(), second.nan_to_num()
    size = max(float(first.abs().max()), float(second.abs().max()), least)
    return float((first.double() - second.double()).abs().max()) / size if size else 0.0


def _rounds_itself(graph: Graph) -> bool:
    """Return whether the module casts to a smaller type by itself, as float64 cannot show."""
    names = {name for node in graph.nodes for spec in node.outputs for name in (spec.dtype,)}
    return len(names & {"float32", "float16", "bfloat16"}) > 1 or len(names & {"float64", "float32"}) > 1


# What differs first


def _differs(check: _Given, difference: _Difference) -> CaptureFailed:
    limit = _ROUNDED if check.region is not None or _rounds_itself(check.graph) or check.gives_back else _IN_DOUBLE
    hint = (
        "torch.export did not see all that the module does: look there for state that changes from call to call, "
        "values that Python decides, or gradients that are changed by hand.\nverify=False trains the captured graph "
        "as it is."
    )
    if not difference.loss <= limit:
        place = _first_value_apart(check)
        text = f"first in {place}" if place else "in the loss function"
        return CaptureFailed(
            f"The captured graph of {check.graph.name} does not compute what the module does: on {check.samples} "
            f"samples the loss differs by {difference.loss:.2g} of itself, {text}.",
            hint=hint,
        )
    network = check.network
    for layer in reversed(network.layers):
        for name in layer.weights:
            if not difference.gradients.get(name, 0.0) <= limit:
                where = next((op.where for op in network.ops[layer.first : layer.last] if name in op.weights), "")
                return CaptureFailed(
                    f"The captured graph of {check.graph.name} does not train as the module does: going back from the "
                    f"loss, the first layer with another gradient is {layer.name} ({name} differs by "
                    f"{difference.gradients[name]:.2g} of its largest element, on {check.samples} samples).{at(where)}",
                    hint=hint,
                )
    kind, name, apart = next(
        (kind, name, apart)
        for kind, numbers in (("parameter", difference.gradients), ("buffer", difference.buffers))
        for name, apart in numbers.items()
        if not apart <= limit
    )
    change = "gets another gradient" if kind == "parameter" else "is written otherwise"
    return CaptureFailed(
        f"The captured graph of {check.graph.name} does not train as the module does: the {kind} {name} {change} "
        f"(differs by {apart:.2g} of its largest element, on {check.samples} samples).",
        hint=hint,
    )


def _first_value_apart(check: _Given) -> str:
    """Return the first child of the module that returns something else than the graph's nodes of it; '' if none
    does."""
    with left():
        values = _every_value(check)
    made_last = {node.module: node for node in check.graph.nodes if not node.updates}
    apart: list[str] = []
    calls: dict[str, int] = {}

    def watch(path: str, output: torch.Tensor) -> None:
        calls[path] = calls.get(path, 0) + 1
        node = made_last.get(path)
        if apart or node is None or calls[path] > 1:
            return
        graph_value = values.get(node.outputs[0].name)
        if (
            graph_value is not None
            and graph_value.shape == output.shape
            and not _apart(output.detach(), graph_value, 0.0) <= _ROUNDED
        ):
            apart.append(f"{path or type(check.module).__name__} ({node.where})" if node.where else path)

    check.by_module(watch)
    return apart[0] if apart else ""


def _every_value(check: _Given) -> dict[str, torch.Tensor]:
    """Return copies of all that the graph's nodes make: some overwrite what others made."""
    graph, inputs = check.graph, bind_inputs(check.graph, check.batch)
    piece = Piece(graph, Weights.copied(graph))
    steps = piece.steps(training=True)
    slots, values = piece.fresh_slots(), dict(inputs)
    for place, name in enumerate(piece.inputs):
        slots[place] = inputs[name]
    context = Context(samples=check.samples)
    for step in steps:
        run_steps([replace(step, frees=())], slots, check.samples, context)
        made = zip(step.node.outputs, step.outputs, strict=True)
        values.update((spec.name, slots[place].detach().clone()) for spec, place in made)
    return values
