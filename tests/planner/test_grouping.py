"""The paper's cost model and Algorithm 2: its worked example, its facts of YOLOv2, and exhaustive search."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_made import chain
from manyhands.facts.errors import BadValue
from manyhands.facts.network import Network
from manyhands.facts.reads import Blocks, Read, Whole, Window
from manyhands.planner.grouping import (
    Costs,
    Direction,
    InteriorTile,
    KernelLayer,
    cheapest_groups,
    group_tiles,
    kernel_layers,
    plan_groups,
)
from manyhands.plans.networks import load_network

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def layers_of(size: int, *kinds: tuple[int, int, bool], channels: tuple[int, ...] = ()) -> tuple[KernelLayer, ...]:
    """Square layers of (kernel, stride, is_pool) over maps of `size` and what the strides leave of it."""
    depths = channels or (1,) * (len(kinds) + 1)
    made = []
    for number, (kernel, stride, is_pool) in enumerate(kinds):
        after = -(-size // stride)
        made.append(
            KernelLayer(
                f"l+{number}", (kernel, kernel), (stride, stride), depths[number], depths[number + 1],
                (size, size), (after, after), is_pool,
            )
        )  # fmt: skip
        size = after
    return tuple(made)


FIGURE = layers_of(16, (3, 2, False), (3, 1, False), (2, 2, True))
"""Fig. 4.4: a 16x16 map at layer l; convolutions of stride 2 and 1, a pooling; 2x2 tiles."""


def test_figure_5_1() -> None:
    cheap = group_tiles(FIGURE, (2, 2), Costs(0.1, 2)).backward
    assert cheap.one_group == 60.90
    assert cheap.best.starts == (0,)
    assert cheap.best.cost == 60.90
    assert cheap.exchanges == (3,)
    dear = group_tiles(FIGURE, (2, 2), Costs(0.5, 2)).backward
    assert dear.exchanges == (3, 1)
    assert dear.best.starts == (0, 1)
    assert dear.best.cost < min(dear.one_group, dear.every_layer)


def test_figure_5_1_in_its_parts() -> None:
    tile = InteriorTile(FIGURE, (2, 2))
    assert tile.tiles == ((8, 8), (4, 4), (4, 4), (2, 2))
    assert tile.group("backward", 0, 3) == (225 + 144, 12)
    assert tile.group("backward", 1, 3) == (4 * 4 * 9, 12)
    assert tile.group("backward", 0, 1) == (144, 5 * 5 - 4 * 4)


def test_figure_4_4_forward() -> None:
    """The 2x2 tile of the last map reads 4x4, 6x6 and 14x14 of the maps before it."""
    tile = InteriorTile(FIGURE, (2, 2))
    assert tile.group("forward", 2, 3) == (0, 0)
    assert tile.group("forward", 1, 3) == (6 * 6 * 9, 6 * 6 - 4 * 4)
    assert tile.group("forward", 0, 3) == (6 * 6 * 9 + Fraction(14 * 14 * 9, 4), 14 * 14 - 8 * 8)


@pytest.fixture(scope="module")
def yolo() -> Network:
    return load_network("yolov2-16", (3, 608, 608))


def test_the_papers_layers(yolo: Network) -> None:
    layers = kernel_layers(yolo)
    assert len(layers) == 16
    assert [number for number, layer in enumerate(layers) if layer.is_pool] == [1, 3, 7, 11]
    bounds = [layer.operators for layer in layers]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(yolo.ops)
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(before.channels_out == after.channels_in for before, after in pairwise(layers))
    whole = sum(layer.macs_per_place * layer.input_size[0] * layer.input_size[1] for layer in layers)
    assert whole == yolo.macs
    assert all(layer.channel_groups == 1 for layer in layers)


def test_five_groups_exchange_least(yolo: Network) -> None:
    """§5.3: five forward groups; one forward group is worse than all layers, backward it is the reverse."""
    found = group_tiles(kernel_layers(yolo), (3, 3), Costs(0, 1, 0))
    assert found.forward.best.starts == (0, 8, 10, 12, 14)
    assert (found.forward.best.cost, found.forward.one_group, found.forward.every_layer) == (85_228, 189_036, 99_404)
    assert found.backward.best.starts == (0, 12, 14)
    assert (found.backward.best.cost, found.backward.one_group, found.backward.every_layer) == (59_392, 69_632, 220_544)
    assert found.tiles[0] == (208, 208)
    assert found.tiles[-1] == (13, 13)


def test_every_layer_computes_least(yolo: Network) -> None:
    found = group_tiles(kernel_layers(yolo), (3, 3), Costs(1, 0, 0))
    for way in (found.forward, found.backward):
        assert way.best.cost == way.every_layer < way.one_group
        assert len(way.best.starts) < 16  # ties go to fewer groups


def test_a_dear_exchange_makes_one_group(yolo: Network) -> None:
    found = group_tiles(kernel_layers(yolo), (3, 3), Costs(1, 1, 1e12))
    assert found.forward.best.starts == found.backward.best.starts == (0,)
    assert found.forward.best.cost == found.forward.one_group


@pytest.mark.slow
def test_groups_as_a_plan_names_them(yolo: Network) -> None:
    """A layer's number where one begins; a pooling inside a block is named by its operator."""
    layers = kernel_layers(yolo)
    assert plan_groups(yolo, layers, (0, 8, 10, 12, 14)) == (0, 5, 7, 8, 10)
    assert plan_groups(yolo, layers, (0, 1, 2)) == (0, "max_pool2d", 1)
    finer = load_network("yolov2-16", (3, 608, 608), "operators")
    assert kernel_layers(finer) == layers
    numbers = plan_groups(finer, layers, range(16))
    assert all(isinstance(number, int) for number in numbers)
    assert [finer.layers[number].name for number in numbers if isinstance(number, int)] == [one.name for one in layers]


KIND = st.tuples(st.integers(1, 5), st.integers(1, 3), st.booleans())


@st.composite
def drawn_chains(draw: st.DrawFn) -> tuple[KernelLayer, ...]:
    kinds = draw(st.lists(KIND, min_size=1, max_size=8))
    channels = draw(st.lists(st.integers(1, 8), min_size=len(kinds) + 1, max_size=len(kinds) + 1))
    return layers_of(draw(st.integers(4, 20)) * 3 ** len(kinds), *kinds, channels=tuple(channels))


PRICE = st.sampled_from((0.0, 0.1, 1.0, 2.5, 100.0))


@pytest.mark.slow
@given(drawn_chains(), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.builds(Costs, PRICE, PRICE, PRICE))
def test_no_grouping_is_cheaper(layers: tuple[KernelLayer, ...], grid: tuple[int, int], costs: Costs) -> None:
    """The shortest path against every grouping there is; of the cheapest it has the fewest groups."""
    tile = InteriorTile(layers, grid)
    later = range(1, len(layers))
    every = [(0, *rest) for count in range(len(layers)) for rest in combinations(later, count)]
    for way in DIRECTIONS:
        prices = {
            starts: sum(costs.of(*tile.group(way, s, e)) for s, e in pairwise((*starts, len(layers))))
            for starts in every
        }
        cheapest = min(prices.values())
        best = tile.best(way, costs)
        assert best.cost == float(cheapest)
        assert best.starts == min((one for one in every if prices[one] == cheapest), key=lambda one: (len(one), one))


@pytest.mark.slow
@given(drawn_chains(), st.integers(1, 3))
def test_longer_groups_compute_more_and_boundaries_are_never_negative(
    layers: tuple[KernelLayer, ...], cut: int
) -> None:
    tile = InteriorTile(layers, (cut, cut))
    for way in DIRECTIONS:
        whole, boundary = tile.group(way, 0, len(layers))
        parts = [tile.group(way, place, place + 1) for place in range(len(layers))]
        assert whole >= sum(macs for macs, _ in parts)
        assert min(boundary, *(count for _, count in parts)) >= 0
        if cut == 1:
            assert whole == sum(macs for macs, _ in parts)
            assert boundary == 0


def test_ties_go_to_fewer_groups_then_to_the_earliest() -> None:
    assert cheapest_groups(5, lambda start, end: Fraction(end - start)) == (0,)
    assert cheapest_groups(3, lambda start, end: Fraction(9 if end - start == 3 else 1)) == (0, 1)


def test_an_axis_that_is_not_cut_has_no_boundary() -> None:
    tile = InteriorTile(layers_of(12, (3, 1, False), channels=(2, 1)), (1, 3))
    assert tile.tiles == ((12, 4), (12, 4))
    assert tile.group("forward", 0, 1) == (12 * 6 * 9 * 2, 2 * 12 * 2)
    assert tile.group("backward", 0, 1) == (12 * 4 * 9 * 2, 12 * 2)


def test_an_overlapping_pooling_reads_over_the_edge() -> None:
    tile = InteriorTile(layers_of(12, (3, 2, True)), (2, 2))
    assert tile.group("forward", 0, 1) == (0, 8 * 8 - 6 * 6)


def test_windows_of_all_kinds() -> None:
    """Dilation widens a kernel; channel groups divide the work; what comes before the first kernel belongs to it."""
    network = chain(2, kernel=3)
    wide = (Window(0), Blocks(1, 2, 2), Window(2, 3, 1, 2, 2), Window(3, 1, 2))
    tensors = dict(network.tensors)
    tensors["t1"] = msgspec.structs.replace(tensors["t1"], shape=(1, 4, 8, 3))
    one = tuple(Window(axis) for axis in range(4))
    ops = (
        msgspec.structs.replace(network.ops[0], macs=0, reads=(Read("x", one),)),
        msgspec.structs.replace(network.ops[1], macs=3 * 4 * 2 * 8 * 3, reads=(Read("t0", wide),)),
    )
    network = msgspec.structs.replace(network, ops=ops, tensors=tensors)
    (layer,) = kernel_layers(network)
    assert (layer.kernel, layer.stride, layer.dilation) == ((3, 1), (1, 2), (2, 1))
    assert (layer.reach(0), layer.reach(1)) == (2, 0)
    assert layer.operators == (0, 2)
    assert layer.channel_groups == 2
    assert layer.macs_per_place * 8 * 6 == ops[1].macs


@pytest.mark.parametrize(("model", "count"), [pytest.param("vgg16", 18, marks=pytest.mark.slow), ("tiny", 5)])
def test_maps_end_where_the_classifier_begins(model: str, count: int) -> None:
    layers = kernel_layers(load_network(model))
    assert len(layers) == count
    assert group_tiles(layers, (2, 2), Costs(0, 1)).forward.best.starts[0] == 0


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("resnet18", "is read by"),
        ("unet", "is read by"),
        pytest.param("bert-small", "no convolution", marks=pytest.mark.slow),
    ],
)
def test_networks_the_model_does_not_know(model: str, said: str) -> None:
    with pytest.raises(BadValue, match=said):
        kernel_layers(load_network(model))


def test_maps_end_at_a_flattening() -> None:
    network = chain(2)
    flat = msgspec.structs.replace(network.tensors["t1"], shape=(1, 4 * 8 * 6))
    (layer,) = kernel_layers(msgspec.structs.replace(network, tensors=network.tensors | {"t1": flat}))
    assert layer.operators == (0, 1)


@pytest.mark.parametrize("rules", [(Blocks(2, 1, 2), Blocks(3, 1, 2)), (Window(3), Window(2))])
def test_chains_the_model_does_not_know(rules: tuple[Blocks | Window, ...]) -> None:
    """Maps that are enlarged, or turned."""
    network = chain(2)
    read = Read("t0", (Window(0), Whole(), *rules))
    ops = (network.ops[0], msgspec.structs.replace(network.ops[1], reads=(read,)))
    with pytest.raises(BadValue, match=r"conv1 \(aten.conv2d.default\) is no convolution"):
        kernel_layers(msgspec.structs.replace(network, ops=ops))


@pytest.mark.parametrize("grid", [(5, 2), (2, 5), (0, 1)])
def test_a_grid_finer_than_the_last_map(grid: tuple[int, int]) -> None:
    with pytest.raises(BadValue, match=f"{grid[0]}x{grid[1]}.* has 4 .* the image 16"):
        InteriorTile(FIGURE, grid)


def test_bad_costs() -> None:
    for costs in ((-1.0, 0.0, 0.0), (0.0, float("nan"), 0.0), (0.0, 0.0, float("inf"))):
        with pytest.raises(BadValue, match="must be a number between 0 and 1e"):
            Costs(*costs)


def test_nothing_to_group() -> None:
    with pytest.raises(BadValue, match="no convolution and no pooling"):
        InteriorTile((), (2, 2))
