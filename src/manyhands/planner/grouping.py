"""The maps at which tiles exchange boundary data: TILE's cost model and Algorithm 2 (chapter 5), for an interior tile.

    map      0 ──layer 0── 1 ──layer 1── 2 ──layer 2── 3        a group (s, e): layers s to e-1
    forward  [═══════ group ═══════][═ group ═]                 exchanges at map s, computes on towards e
    backward [═ group ═][═══════ group ═══════]                 exchanges at map e, computes back towards s

A layer is a convolution or a pooling, with the element-wise operators that follow it. All tiles have the size of the
largest: at the last map the extent over the tiles, rounded up; at every map before it, that times the stride. A grown
tile extends beyond the device's own one as equations 4.1 to 4.4 of the paper say: by half a kernel on both sides,
whatever the padding; a pooling whose windows do not overlap needs nothing. An axis that is not cut has no boundary.
Multiply-accumulates are counted on the grown input tile of a layer, over the stride, in both directions (§5.1).

The model follows the paper to the letter. It prices an interior tile in abstract units and leaves out what backward
groups must fetch to be exact (docs/explanation/tiles.md); the cost of a real plan is left to the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Literal

from manyhands.facts.errors import BadValue
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import LayerName
from manyhands.facts.reads import Whole, Window

Direction = Literal["forward", "backward"]
Size = tuple[int, int]
"""Rows and columns."""
MOST_COST = 1e30


@dataclass(frozen=True)
class Costs:
    """c_p, c_c and c_f: the price of a multiply-accumulate, of a boundary element, of an exchange."""

    computation: float
    communication: float
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= MOST_COST:
                raise BadValue(f"The {field.name} cost is {value}; it must be a number between 0 and {MOST_COST:g}.")

    def of(self, macs: Fraction, boundary: int, groups: int = 1) -> Fraction:
        """Return the exact cost of groups, so that a tie is a tie; 0.1 is taken as exactly a tenth."""
        rates = [Fraction(str(rate)) for rate in (self.computation, self.communication, self.fixed)]
        return rates[0] * macs + rates[1] * boundary + rates[2] * groups


@dataclass(frozen=True)
class KernelLayer:
    """A layer in the paper's sense: a convolution or a pooling. Pairs are rows and columns."""

    name: str
    kernel: Size
    stride: Size
    channels_in: int
    channels_out: int
    input_size: Size
    output_size: Size
    is_pool: bool = False
    dilation: Size = (1, 1)
    channel_groups: int = 1
    operators: tuple[int, int] = (0, 0)
    """Its operators in the network, [first, last)."""

    def reach(self, axis: int) -> int:
        """Return how far the layer reads beyond the edge of a tile."""
        span = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return 0 if self.is_pool and span <= self.stride[axis] else span // 2

    @property
    def macs_per_place(self) -> Fraction:
        """Multiply-accumulates per place of its input map, over all channels; poolings have none worth counting."""
        if self.is_pool:
            return Fraction(0)
        filters = self.kernel[0] * self.kernel[1] * self.channels_in * self.channels_out
        return Fraction(filters, self.channel_groups * self.stride[0] * self.stride[1])


@dataclass(frozen=True)
class Grouping:
    """The layers at which groups start, and the groups' total cost."""

    starts: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class Compared:
    """The cheapest grouping of one direction, beside the two extremes."""

    best: Grouping
    one_group: float
    every_layer: float
    exchanges: tuple[int, ...]
    """The maps at which the best grouping exchanges boundary data, in order of time."""


@dataclass(frozen=True)
class TileGroups:
    """The result of Algorithm 2 for a chain of layers."""

    layers: tuple[KernelLayer, ...]
    grid: Size
    costs: Costs
    tiles: tuple[Size, ...]
    """A device's own tile at every map, from the input to the last output."""
    forward: Compared
    backward: Compared


class InteriorTile:
    """A tile with neighbours on all sides (where the grid cuts at all), through a chain of layers."""

    def __init__(self, layers: Sequence[KernelLayer], grid: Size) -> None:
        if not layers:
            raise BadValue("There is no convolution and no pooling to group.")
        last, image = layers[-1].output_size, layers[0].input_size
        for axis, noun in enumerate(("rows", "columns")):
            if not 1 <= grid[axis] <= last[axis]:
                raise BadValue(
                    f"The grid is {grid[0]}x{grid[1]}: {grid[axis]} {noun} of tiles; the last map (layer "
                    f"{layers[-1].name}) has {last[axis]} {noun}, the image {image[axis]}, and a tile at least one."
                )
        self.layers, self.grid = tuple(layers), grid
        rows, columns = (-(-extent // count) for extent, count in zip(last, grid, strict=True))
        tiles = [(rows, columns)]
        for layer in reversed(self.layers):
            tiles.append((tiles[-1][0] * layer.stride[0], tiles[-1][1] * layer.stride[1]))
        self.tiles = tuple(reversed(tiles))
        self.channels = (*(layer.channels_in for layer in self.layers), self.layers[-1].channels_out)

    @cached_property
    def _forward(self) -> dict[tuple[int, int], tuple[Fraction, int]]:
        """The multiply-accumulates and boundary elements of every group, from its output tile backwards."""
        groups = {}
        for end in range(1, len(self.layers) + 1):
            grown, macs = self._whole(end), Fraction(0)
            for start in range(end - 1, -1, -1):
                layer = self.layers[start]
                grown = [self._demand(layer, axis, *grown[axis]) for axis in (0, 1)]
                macs += layer.macs_per_place * _area(grown)
                groups[start, end] = (macs, self._boundary(start, grown))
        return groups

    @cached_property
    def _backward(self) -> dict[tuple[int, int], tuple[Fraction, int]]:
        """The same for delta maps, from the tile at the group's input side forwards."""
        groups = {}
        for start in range(len(self.layers)):
            grown, macs = self._whole(start), Fraction(0)
            for end in range(start + 1, len(self.layers) + 1):
                layer = self.layers[end - 1]
                macs += layer.macs_per_place * _area(grown)
                grown = [self._touched(layer, axis, *grown[axis]) for axis in (0, 1)]
                groups[start, end] = (macs, self._boundary(end, grown))
        return groups

    def _whole(self, place: int) -> list[tuple[int, int]]:
        """Return the device's own tile at a map: first and last row, first and last column."""
        rows, columns = self.tiles[place]
        return [(0, rows - 1), (0, columns - 1)]

    def _demand(self, layer: KernelLayer, axis: int, first: int, last: int) -> tuple[int, int]:
        """Return the part of the input that makes [first, last] of the output (equations 4.1 and 4.2)."""
        stride, reach = layer.stride[axis], self._reach(layer, axis)
        return first * stride - reach, last * stride + reach + stride - 1

    def _touched(self, layer: KernelLayer, axis: int, first: int, last: int) -> tuple[int, int]:
        """Return the deltas of the output that make [first, last] of the input's (equations 4.3 and 4.4)."""
        stride, reach = layer.stride[axis], self._reach(layer, axis)
        if layer.is_pool and not reach:
            return first // stride, last // stride
        return -((reach - first) // stride), (last + reach) // stride

    def _reach(self, layer: KernelLayer, axis: int) -> int:
        return layer.reach(axis) if self.grid[axis] > 1 else 0

    def _boundary(self, place: int, grown: list[tuple[int, int]]) -> int:
        rows, columns = self.tiles[place]
        return self.channels[place] * (_area(grown) - rows * columns)

    def group(self, direction: Direction, start: int, end: int) -> tuple[Fraction, int]:
        """Return the multiply-accumulates of a group, and the elements that it fetches from other tiles."""
        return (self._forward if direction == "forward" else self._backward)[start, end]

    def cost(self, direction: Direction, starts: Sequence[int], costs: Costs) -> float:
        """Return the cost of a grouping (Equation 5.1)."""
        bounds = pairwise((*starts, len(self.layers)))
        return float(sum(costs.of(*self.group(direction, start, end)) for start, end in bounds))

    def boundary(self, direction: Direction, starts: Sequence[int]) -> int:
        """Return the elements that a grouping fetches from other tiles, for one sample."""
        return sum(self.group(direction, start, end)[1] for start, end in pairwise((*starts, len(self.layers))))

    def best(self, direction: Direction, costs: Costs) -> Grouping:
        """Return the cheapest grouping; among equally cheap ones, one with the fewest groups."""
        starts = cheapest_groups(len(self.layers), lambda s, e: costs.of(*self.group(direction, s, e)))
        return Grouping(starts, self.cost(direction, starts, costs))

    def compare(self, direction: Direction, costs: Costs) -> Compared:
        """Return the cheapest grouping beside one group and an exchange at every layer."""
        best, count = self.best(direction, costs), len(self.layers)
        return Compared(
            best=best,
            one_group=self.cost(direction, (0,), costs),
            every_layer=self.cost(direction, range(count), costs),
            exchanges=best.starts if direction == "forward" else (*best.starts, count)[:0:-1],
        )


def _area(grown: list[tuple[int, int]]) -> int:
    (top, bottom), (left, right) = grown
    return (bottom - top + 1) * (right - left + 1)


def cheapest_groups(count: int, cost: Callable[[int, int], Fraction], longest: int | None = None) -> tuple[int, ...]:
    """Return where groups start, by Algorithm 2: the shortest path over maps 0 to `count`, where the step from s to e
    costs `cost(s, e)`.

    Ties go to fewer groups, then to the earliest starts. `longest`: the most layers of a group that is considered.
    """
    best: list[tuple[Fraction, int, tuple[int, ...]]] = [(Fraction(0), 0, ())]
    for end in range(1, count + 1):
        ways = [
            (so_far + cost(start, end), groups + 1, (*starts, start))
            for start, (so_far, groups, starts) in enumerate(best)
            if longest is None or end - start <= longest
        ]
        best.append(min(ways))
    return best[-1][2]


def group_tiles(layers: Sequence[KernelLayer], grid: Size, costs: Costs) -> TileGroups:
    """Return the cheapest forward and backward groups of an interior tile."""
    tile = InteriorTile(layers, grid)
    forward, backward = tile.compare("forward", costs), tile.compare("backward", costs)
    return TileGroups(tile.layers, grid, costs, tile.tiles, forward, backward)


def kernel_layers(network: Network) -> tuple[KernelLayer, ...]:
    """Return the paper's layers of a network, up to where its maps end (global or adaptive pooling, a flattening).

    The paper's model covers chains only: a network whose maps branch or join, or are enlarged, is refused.
    """
    chain = list(_chain(network))
    marks = [index for index, op in enumerate(chain) if _is_kernel(network.ops[op])]
    if not marks:
        raise BadValue(
            f"{network.name} has no convolution or pooling over maps with rows and columns; nothing to tile."
        )
    starts = [0, *(chain[mark] for mark in marks[1:])]
    ends = [*starts[1:], chain[-1] + 1]
    return tuple(
        _kernel_layer(network, chain[mark], start, end) for mark, start, end in zip(marks, starts, ends, strict=True)
    )


def _chain(network: Network) -> Iterator[int]:
    """Yield the operators, one after another, that make maps from the network's input."""
    current = network.inputs[0]
    if len(network.inputs) > 1 or len(network.tensors[current].shape) != 4:
        return
    while True:
        readers = network.readers.get(current, ())
        if not readers:
            return
        op = network.ops[readers[0]]
        if len(readers) > 1:
            names = " and ".join(network.ops[index].name for index in readers[:2])
            raise _no_chain(network, f"{current} is read by {names}")
        if op.inputs != (current,) or not op.outputs:
            raise _no_chain(network, f"{op.name} ({op.target}) reads {len(op.inputs)} tensors")
        output, rules = network.tensors[op.outputs[0]], op.reads[0].rules[2:]
        if len(output.shape) != 4 or any(isinstance(rule, Whole) for rule in rules):
            return
        if not all(isinstance(rule, Window) and rule.axis == axis for axis, rule in enumerate(rules, start=2)):
            if output.elements < network.tensors[current].elements:  # adaptive pooling
                return
            raise _no_chain(network, f"{op.name} ({op.target}) is no convolution, pooling or element-wise operator")
        yield readers[0]
        current = op.outputs[0]


def _no_chain(network: Network, reason: str) -> BadValue:
    return BadValue(
        f"The paper's cost model is one of chains of convolutions and poolings; in {network.name} {reason}.",
        hint="Leave the costs out (--costs): real plans are priced for any network.",
    )


def _windows(op: Op) -> tuple[Window, Window]:
    rows, columns = op.reads[0].rules[2:]
    assert isinstance(rows, Window)
    assert isinstance(columns, Window)
    return rows, columns


def _is_kernel(op: Op) -> bool:
    return op.macs > 0 or any(window.kernel > 1 or window.stride > 1 for window in _windows(op))


def _kernel_layer(network: Network, index: int, first: int, last: int) -> KernelLayer:
    op = network.ops[index]
    rows, columns = _windows(op)
    _, channels_in, *input_size = network.tensors[op.inputs[0]].shape
    _, channels_out, *output_size = network.tensors[op.outputs[0]].shape
    dense = rows.kernel * columns.kernel * channels_in * channels_out * output_size[0] * output_size[1]
    return KernelLayer(
        name=op.module or op.name, kernel=(rows.kernel, columns.kernel), stride=(rows.stride, columns.stride),
        channels_in=channels_in, channels_out=channels_out,
        input_size=(input_size[0], input_size[1]), output_size=(output_size[0], output_size[1]),
        is_pool=not op.macs, dilation=(rows.dilation, columns.dilation),
        channel_groups=dense // op.macs if op.macs else 1, operators=(first, last),
    )  # fmt: skip


def plan_groups(network: Network, layers: Sequence[KernelLayer], starts: Sequence[int]) -> tuple[LayerName, ...]:
    """Return group starts as a plan writes them: the network's own layer where one begins there, else the operator's
    name."""
    ops = [layers[start].operators[0] for start in starts]
    first = {layer.first: number for number, layer in enumerate(network.layers)}
    return tuple(first.get(op, network.ops[op].name) for op in ops)
