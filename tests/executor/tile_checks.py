"""Operators on boxes against the whole operator: values, gradients of inputs, gradients of weights.

Every box is made from buffers that hold NaN wherever the box does not demand anything, and a NaN spreads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.executor.tile_base import TileOperator
from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall, WeightGradientCall
from manyhands.executor.tile_operators import tile_operator
from manyhands.executor.tile_statistics import StatisticsOperator
from manyhands.facts.boxes import Box
from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights

SAMPLES = 2
CONTEXT = Context(seed=3, step=5, first_sample=4)
NAN = float("nan")


class Under(nn.Module):
    """A function (or module) of tensors through which gradients flow."""

    def __init__(self, function: Callable[..., Tensor], count: int) -> None:
        super().__init__()
        self.function = function
        self.factors = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in range(count))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*(x * factor for x, factor in zip(inputs, self.factors)))


@dataclass
class Case:
    """One operator, the whole of its inputs and its output, the output's gradient and what follows from it."""

    graph: Graph
    index: int
    inputs: dict[str, Tensor]
    made: Tensor
    gradient: Tensor
    input_gradients: dict[str, Tensor]
    weight_gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        function: Callable[..., Tensor],
        *shapes: tuple[int, ...],
        context: Context = CONTEXT,
        dtype: torch.dtype = torch.float64,
    ) -> Case:
        torch.manual_seed(1)
        module = Under(function, len(shapes)).to(dtype)
        for name, parameter in module.named_parameters():
            if "factors" not in name:
                nn.init.uniform_(parameter, -1.0, 1.0)
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 2.0)
        graph = capture(module, tuple(torch.randn(SAMPLES, *shape, dtype=dtype) for shape in shapes))
        index = max(i for i, node in enumerate(graph.nodes) if not node.updates)
        weights = Weights.copied(graph)
        piece = Piece(graph, weights, index, index + 1)
        specs = graph.network.tensors
        inputs = {n: torch.randn(specs[n].shape_for(SAMPLES), dtype=dtype) for n in graph.network.ops[index].inputs}
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        made = piece(leaves, context)[graph.nodes[index].outputs[0].name]
        gradient = torch.randn(made.shape, dtype=dtype)
        if made.requires_grad:
            made.backward(gradient)  # type: ignore[no-untyped-call]
        return cls(
            graph, index, inputs, made.detach(), gradient,
            {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()},
            {name: tensor.grad for name, tensor in weights.tensors.items() if tensor.grad is not None},
            {spec.name: weights.tensors[spec.name] for spec in graph.weights if spec.buffer},
        )  # fmt: skip

    def spatial(self, name: str) -> tuple[int, ...]:
        return self.graph.network.spatial.get(name, ())

    def operator(self, kernel: Kernel | None = None) -> TileOperator:
        weights = Weights.copied(self.graph, device=self.made.device)
        return tile_operator(self.graph, self.index, weights, kernel)

    def on(self, device: str) -> Case:
        """The same on another device."""
        tables = ("inputs", "input_gradients", "weight_gradients", "buffers")
        moved: dict[str, Any] = {t: {n: v.to(device) for n, v in getattr(self, t).items()} for t in tables}
        return replace(self, made=self.made.to(device), gradient=self.gradient.to(device), **moved)


def partition(data: st.DataObject, shape: Sequence[int], axes: Sequence[int]) -> list[Box]:
    """Uneven tiles of a map, cut along its spatial axes."""
    tiles = [Box.whole(tuple(shape))]
    for axis in axes:
        inner = data.draw(st.lists(st.integers(0, shape[axis]), max_size=3 if len(axes) < 3 else 1))
        parts = list(pairwise(sorted({0, shape[axis], *inner})))
        tiles = [tile.replace(axis, part) for tile in tiles for part in parts]
    return tiles


def grown(data: st.DataObject, box: Box, shape: Sequence[int], axes: Sequence[int]) -> Box:
    """A box with some more around it, inside the map."""
    extra = st.integers(0, 2)
    for axis in axes:
        low, high = box.intervals[axis]
        box = box.replace(axis, (max(0, low - data.draw(extra)), min(shape[axis], high + data.draw(extra))))
    return box


def held(tensor: Tensor, box: Box, demand: Box) -> BoxTensor:
    """A buffer of `box`: values over the demand, zeros beyond the border, NaN elsewhere."""
    whole = Box.whole(tensor.shape)
    buffer = BoxTensor(box, tensor.new_zeros(box.shape))
    inside = box.intersect(whole)
    if not inside.is_empty:
        buffer.view(inside).fill_(NAN)
    if not demand.is_empty:
        buffer.view(demand).copy_(tensor[demand.slices()])
    return buffer


def buffers(data: st.DataObject, case: Case, operator: TileOperator, out: Box) -> list[BoxTensor]:
    """All inputs of a box, each with or without its padding in place, or with more around it."""
    found = []
    for number, read in enumerate(operator.op.reads):
        tensor, demand = case.inputs[read.tensor], operator.demand(number, out)
        assert operator.raw_demand(number, out).contains(demand)
        kinds = [demand if not demand.is_empty else Box.whole(tensor.shape), operator.raw_demand(number, out)]
        if not demand.is_empty and (axes := case.spatial(read.tensor)):
            kinds.append(grown(data, demand, tensor.shape, axes))
        found.append(held(tensor, data.draw(st.sampled_from(kinds)), demand))
    return found


def empty_view(box: Box, like: Tensor) -> Tensor:
    """Somewhere inside a larger tensor."""
    *outer, rows, columns = box.shape
    return like.new_full((*outer, rows + 3, columns + 5), NAN)[..., 2:-1, 1:-4]


def added(target: Tensor, part: BoxTensor | None) -> None:
    """Add a gradient to the whole one; beyond the border nothing counts."""
    if part is not None:
        common = part.box.intersect(Box.whole(target.shape))
        target[common.slices()] += part.view(common)


def assert_equal(found: Tensor, wanted: Tensor, what: str, tolerance: float) -> None:
    assert found.shape == wanted.shape, what
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    error = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * scale, f"{what}: off by {error}"


@torch.no_grad()
def check_local(
    case: Case,
    data: st.DataObject,
    *,
    kernel: Kernel | None = None,
    context: Context = CONTEXT,
    tolerance: float = 1e-12,
    tiling: str = "local",
) -> None:
    """Forward over any boxes; gradients over a partition add up to those of the whole operator."""
    operator = case.operator(kernel)
    assert operator.op.tiling == tiling
    op = operator.op
    gradients = {name: torch.zeros_like(tensor) for name, tensor in case.inputs.items()}
    axes = case.spatial(op.outputs[0])
    for tile in partition(data, case.made.shape, axes):
        for out in (tile, grown(data, tile, case.made.shape, axes)):
            inputs, into = buffers(data, case, operator, out), empty_view(out, case.made)
            wanted = case.made[out.slices()]
            assert_equal(operator.forward(ForwardCall(inputs, out, context)), wanted, f"{op.name}{out}", tolerance)
            assert operator.forward(ForwardCall(inputs, out, context, into)) is into
            assert_equal(into, wanted, f"{op.name}{out} in place", tolerance)
        inputs = buffers(data, case, operator, tile)
        sources = [given if read.tensor in op.derives_from else None for read, given in zip(op.reads, inputs)]
        output = BoxTensor(tile, case.made[tile.slices()]) if op.outputs[0] in op.derives_from else None
        gradient = empty_view(tile, case.made).copy_(case.gradient[tile.slices()])
        wanted_inputs = [True for _ in op.reads]
        found = operator.input_gradients(InputGradientCall(sources, output, gradient, tile, wanted_inputs, context))
        for number, read in enumerate(op.reads):
            part = found[number]
            assert part is None or part.box.contains(operator.demand(number, tile))
            added(gradients[read.tensor], part)
        operator.weight_gradients(WeightGradientCall(inputs, gradient, tile, context))
        nothing = operator.input_gradients(
            InputGradientCall(sources, output, gradient, tile, [False for _ in op.reads], context)
        )
        assert all(part is None for part in nothing)
    for name, wanted in case.input_gradients.items():
        assert_equal(gradients[name], wanted, f"gradient of {name}", tolerance)
    check_weights(case, [operator], tolerance)


def check_weights(case: Case, operators: Sequence[TileOperator], tolerance: float) -> None:
    for name, wanted in case.weight_gradients.items():
        parts = [operator.weights.tensors[name].grad for operator in operators]
        total = sum((part for part in parts if part is not None), torch.zeros_like(wanted))
        assert_equal(total, wanted, f"gradient of {name}", tolerance)


def sums_operator(case: Case) -> StatisticsOperator:
    operator = case.operator()
    assert isinstance(operator, StatisticsOperator)
    return operator


@torch.no_grad()
def check_sums(case: Case, data: st.DataObject, *, adjoint: bool, tolerance: float = 1e-12) -> None:
    """A normalisation or a pool whose sums are over tiles, with an operator of its own for every tile.

    adjoint: what a tile computed beyond its own has a part of the gradient there, and the correction goes to the owner;
    otherwise every tile has the whole gradient over a grown box, and corrects all of it.
    """
    (name,) = case.inputs
    whole = case.inputs[name]
    axes = case.spatial(name)
    tiles = partition(data, whole.shape, axes)
    tiles.append(tiles[-1].replace(axes[0], (0, 0)))  # one that owns nothing
    operators = [sums_operator(case) for _ in tiles]
    is_pool = operators[0].op.tiling == "pool"
    large = [tile if tile.is_empty else grown(data, tile, whole.shape, axes) for tile in tiles]
    inputs = [[held(whole, box, box)] for box in large]
    rows = [operator.local_statistics(given, tile) for operator, given, tile in zip(operators, inputs, tiles)]
    shares = [prod(tile.shape[axis] for axis in axes) for tile in tiles]
    states = [operator.combine(rows, shares) for operator in operators]
    if is_pool:
        _check_pool(case, operators, tiles, rows, shares, tolerance)
        return
    gradients = {True: _split(case.gradient, large), False: [case.gradient[box.slices()] for box in large]}[adjoint]
    backward_rows = []
    for operator, tile, box, given, state, gradient in zip(operators, tiles, large, inputs, states, gradients):
        if not box.is_empty:
            wanted = case.made[box.slices()]
            assert_equal(
                operator.forward(ForwardCall(given, box, CONTEXT, statistics=state)), wanted, "output", tolerance
            )
            into = empty_view(box, wanted)
            assert operator.forward(ForwardCall(given, box, CONTEXT, into, statistics=state)) is into
            assert_equal(into, wanted, "output in place", tolerance)
        over = box if adjoint else tile
        backward_rows.append(operator.local_backward_statistics(given, BoxTensor(box, gradient), over, state))
        if not over.is_empty:
            operator.weight_gradients(
                WeightGradientCall(given, BoxTensor(box, gradient).view(over), over, CONTEXT, statistics=state)
            )
    total = torch.stack(backward_rows).sum(0)
    found = torch.zeros_like(whole)
    for operator, tile, box, given, state, gradient in zip(operators, tiles, large, inputs, states, gradients):
        if box.is_empty:
            continue
        (part,) = operator.input_gradients(
            InputGradientCall(
                given,
                None,
                gradient,
                box,
                [True],
                CONTEXT,
                statistics=state,
                total=total,
                corrected=tile if adjoint else box,
            )
        )
        assert part is not None
        if adjoint:
            added(found, part)
        else:
            assert_equal(part.view(box), case.input_gradients[name][box.slices()], "input gradient", tolerance)
            added(found, BoxTensor(tile, part.view(tile)))
    assert_equal(found, case.input_gradients[name], "input gradient", tolerance)
    check_weights(case, operators, tolerance)
    for operator in operators:
        for buffer, wanted in case.buffers.items():
            if "running" in buffer:
                assert_equal(operator.weights.tensors[buffer], wanted, buffer, tolerance)


def _split(gradient: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """Parts over overlapping boxes that add up to a gradient."""
    owners = torch.zeros_like(gradient)
    for box in boxes:
        owners[box.slices()] += 1
    return [gradient[box.slices()] / owners[box.slices()] for box in boxes]


def _check_pool(
    case: Case,
    operators: Sequence[StatisticsOperator],
    tiles: Sequence[Box],
    rows: Sequence[Tensor],
    shares: Sequence[int],
    tolerance: float,
) -> None:
    """Every tile has the result; each has a part of its gradient, and gets the input's over its own box."""
    (name,) = case.inputs
    out = Box.whole(case.made.shape)
    parts = [case.gradient * (number + 1) for number in range(len(tiles))]
    parts[-1] = case.gradient - sum(parts[:-1], torch.zeros_like(case.gradient))
    found = torch.full_like(case.inputs[name], NAN)
    backward_rows = []
    for operator, part in zip(operators, parts):
        state = operator.combine(rows, shares)
        assert_equal(operator.forward(ForwardCall([], out, CONTEXT, statistics=state)), case.made, "output", tolerance)
        backward_rows.append(operator.local_backward_statistics([None], BoxTensor(out, part), out, state))
    total = torch.stack(backward_rows).sum(0)
    for operator, tile, part in zip(operators, tiles, parts):
        (made,) = operator.input_gradients(
            InputGradientCall([None], None, part, out, [True], CONTEXT, total=total, corrected=tile)
        )
        if made is not None:
            found[tile.slices()] = made.view(tile)
    assert_equal(found, case.input_gradients[name], "input gradient", tolerance)
