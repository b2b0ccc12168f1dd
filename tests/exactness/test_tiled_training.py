"""Training by tiles is training on one device: same losses, weights and buffers to 1e-10, done as planned.

Memory that nobody has written yet is no number here, and what a tile holds of a map beside what it was given is filled
with numbers that would be noticed: a device that reads what it was never sent cannot come out right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from drawn_plans import drawn_tiles, plans
from groups import by_name, slow_if
from harness import relative, run, schedule_of
from manyhands.executor.messages import plan_bytes
from manyhands.executor.tile_base import formatted_like
from manyhands.executor.tile_call import BoxTensor
from manyhands.facts.boxes import Box, Layout
from manyhands.facts.errors import BadPlan
from manyhands.facts.moves import Move
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Codec, Order, Plan, Single, Stage
from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.kernels import takes_product
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Receive, Reduce
from manyhands.schedule.checker import check
from manyhands.schedule.reduction import pair_bytes
from manyhands.schedule.tiles import TileGeometry
from tiled_cases import (
    DRAWN,
    PICTURES,
    Case,
    case_of,
    small_case,
    tail_of,
    tiled,
    unwritten_memory_noticed,
    zoo_case,
)
from tiled_networks import ZOO, LinearExcite, Residual, networks, same


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory() -> Iterator[None]:
    with unwritten_memory_noticed():
        yield


def test_unwritten_memory_is_no_number() -> None:
    assert torch.empty(3, dtype=torch.float64).isnan().all()


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("what", ["fetches", "deltas", "values", "entering"])
def test_a_box_that_is_too_small_would_be_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of the trick above: one column less of one exchange, and the run is not exact."""
    torch.manual_seed(0)
    case = case_of(nn.Sequential(same(2, 3), nn.SiLU(), same(3, 3), nn.SiLU(), same(3, 2)), (2, 8, 6))
    if what == "entering":
        original = TileGeometry.entering

        def entering(self: TileGeometry, tensor: str) -> Layout:
            found = original(self, tensor)
            return Layout.of({d: [less(box) if d == "t1" else box] for d, box in found.pieces()})

        monkeypatch.setattr(TileGeometry, "entering", entering)
    else:
        found = TileGeometry.groups if what == "fetches" else TileGeometry.backward_groups

        def groups(self: TileGeometry) -> Any:
            made = found.func(self)
            for group in made:
                for moves in (own := getattr(group, what)):
                    first, *others = own[moves]
                    own[moves] = (Move(first.source, first.target, less(first.box)), *others)
            return made

        changed = cached_property(groups)
        changed.__set_name__(TileGeometry, found.attrname)  # type: ignore[arg-type]
        monkeypatch.setattr(TileGeometry, found.attrname, changed)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"'t\d', '\d.(weight|bias)'"):
        case.check(case.plan(case.tiled(ByTiles((1, 1), (1,), None, (0,)))))


def less(box: Box) -> Box:
    start, stop = box.intervals[3]
    return box.replace(3, (start, stop - 1))


# Drawn networks, drawn groups


@pytest.mark.slow
@settings(DRAWN, max_examples=8)
@given(st.data())
def test_any_network_by_any_tiles(data: st.DataObject) -> None:
    """The whole network tiled, its loss on maps; three plans for each drawn network."""
    shape = (2, *data.draw(st.sampled_from(PICTURES)))
    case = case_of(data.draw(networks(shape)), shape, samples=4, seed=data.draw(st.integers(0, 99)))
    for _ in range(3):
        share = data.draw(drawn_tiles(case.network, 0, case.count))
        micro_batches = data.draw(st.sampled_from((1, 2)))
        stage = case.tiled(share, reduce=data.draw(st.sampled_from(("allreduce", "gateway"))))
        order = data.draw(st.sampled_from(("sequential", "1f1b", "gpipe")))
        size = data.draw(st.sampled_from((1, 10**6)))
        case.check(case.plan(stage, micro_batches=micro_batches, order=order, bucket_bytes=size))


@pytest.mark.slow
@settings(DRAWN, max_examples=8)
@given(st.data())
def test_tiles_among_other_stages(data: st.DataObject) -> None:
    """Before the tiles one device or shares by samples, after them too; some device may work in both."""
    shape = (2, *data.draw(st.sampled_from(PICTURES)))
    case = case_of(data.draw(networks(shape)), shape, samples=4, seed=data.draw(st.integers(0, 99)))
    first = data.draw(st.integers(0, min(3, case.count - 1)))
    last = data.draw(st.integers(first + 1, case.count))
    micro_batches = data.draw(st.sampled_from((1, 2)))
    repeats = data.draw(st.booleans())
    order = "sequential" if repeats else data.draw(st.sampled_from(("sequential", "1f1b", "gpipe")))
    stages = [case.tiled(data.draw(drawn_tiles(case.network, first, last)), first, last)]
    for low, high, name in ((0, first, "before"), (last, case.count, "after")):
        if low < high:
            one = "t0" if repeats else name
            by_samples = data.draw(st.booleans())
            samples = 4 // micro_batches
            share: Any = BySamples((1, samples - 1)) if by_samples else Single()
            stages.append(Stage((low, high), (one, f"{name}-2") if by_samples else (one,), share))
    stages.sort(key=lambda stage: stage.layers[0])  # type: ignore[arg-type, return-value]
    try:
        case.check(case.plan(*stages, micro_batches=micro_batches, order=order))
    except BadPlan as error:  # tiles that begin between two small layers of a squeeze-and-excitation have no maps
        assume("cannot be cut into rows and columns" not in error.message)
        raise


def any_plan(data: st.DataObject, network: Network, **options: Any) -> Plan:
    """Shares of every kind that runs, devices in several stages, homes anywhere."""
    plan: Plan = data.draw(plans(network, kinds=("single", "samples", "tiles", "tiles"), repeats=True, **options))
    stages = tuple(msgspec.structs.replace(stage, codec=Codec()) for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages, batch_norm="synchronised")


@pytest.mark.slow
@tiled("yolov2")
@settings(DRAWN, max_examples=6)
@given(st.data())
def test_any_plan_of_a_network_with_a_passthrough(data: st.DataObject) -> None:
    graph = zoo_case("yolov2").graph
    plan = any_plan(data, graph.network, orders=("sequential", "gpipe", "1f1b"))
    shape, made = ((plan.batch_size, *graph.network.tensors[name].shape[1:]) for name in
                   (graph.network.inputs[0], graph.network.outputs[0]))  # fmt: skip
    batches = [(torch.randn(shape, dtype=torch.float64), torch.randn(made, dtype=torch.float64)) for _ in range(2)]
    Case(graph, batches).check(plan)


@pytest.mark.slow
@tiled("yolov2")
@settings(DRAWN, max_examples=12)
@given(st.data())
def test_messages_have_names_of_their_own_and_are_counted(data: st.DataObject) -> None:
    """No two messages of a round have one name, and bytes are counted alike by checker and receiver."""
    graph = zoo_case("yolov2").graph
    schedule = schedule_of(graph, any_plan(data, graph.network))
    expected = Counter(check(schedule).bytes_between)
    for reduce in {a.key: a for own in schedule.actions.values() for a in own if isinstance(a, Reduce)}.values():
        expected.update(pair_bytes(reduce, graph.network))
    found = plan_bytes(schedule.actions, graph.network)
    assert {pair: size for pair, size in found.items() if size} == {p: size for p, size in expected.items() if size}
    for device, actions in schedule.actions.items():
        names = [(a.source, a.message.topic) for a in actions if isinstance(a, Receive)]
        assert len(set(names)) == len(names), device
        sums = [a.key for a in actions if isinstance(a, Reduce)]
        assert len(set(sums)) == len(sums), device


@pytest.mark.slow
@settings(DRAWN, max_examples=5)
@given(st.data())
def test_a_stream_gives_what_the_whole_network_gives(data: st.DataObject) -> None:
    shape = (2, *data.draw(st.sampled_from(PICTURES)))
    case = case_of(data.draw(networks(shape)), shape, samples=4)
    share = data.draw(drawn_tiles(case.network, 0, case.count))
    assert_streams(case, case.plan(case.tiled(share), order="stream", micro_batches=data.draw(st.sampled_from((1, 2)))))


def assert_streams(case: Case, plan: Plan) -> None:
    ran = run(case.graph, plan, case.batches, seed=7)
    ran.assert_as_planned(len(case.batches))
    piece = Piece(case.graph, Weights.copied(case.graph))
    size = plan.micro_batch_size
    for step, (outputs, (x, _)) in enumerate(zip(ran.outputs, case.batches, strict=True)):
        for place in range(0, plan.batch_size, size):
            rows = x[place : place + size]
            with torch.no_grad():
                whole = piece(bind_inputs(case.graph, rows), Context(False, 7, step, place, size))
            for name in case.graph.outputs:
                assert relative(outputs[name][place : place + size], whole[name]) <= 1e-10, name


# Small versions of the zoo's


WAYS: dict[str, ByTiles] = {
    "2x2": ByTiles((1, 1), (1, 1)),
    "3x2 uneven": ByTiles((1, 2, 1), (2, 1), None, (0,)),
    "1x2 one group": ByTiles((1,), (1, 1), (0,), (0,)),
    "2x2 interior": ByTiles((1, 1), (1, 1), interior_first=tuple(range(4))),
}


def some_of(*rows: tuple[str, str]) -> list[Any]:
    """Every network in every way; those that are not named here are slow tests."""
    ways = {way for _, way in rows}
    names = dict.fromkeys(name for name, _ in rows)
    return [
        pytest.param(name, way, id=f"{name}-{way}", marks=[tiled(name), *slow_if((name, way) not in rows)])
        for name in names
        for way in sorted(ways)
    ]


@pytest.mark.quick("resnet-2x2")
@pytest.mark.parametrize(
    ("name", "way"),
    some_of(
        ("resnet", "2x2"), ("resnet", "3x2 uneven"), ("resnet", "2x2 interior"),
        ("mobilenetv2", "1x2 one group"), ("mobilenetv2", "2x2 interior"),
        ("mobilenetv3", "2x2"), ("mobilenetv3", "3x2 uneven"),
        ("efficientnet", "1x2 one group"), ("efficientnet", "2x2 interior"),
        ("vgg", "2x2"), ("vgg", "1x2 one group"),
        ("yolov2", "3x2 uneven"), ("yolov2", "2x2 interior"), ("yolov2", "1x2 one group"),
        ("unet", "2x2"), ("unet", "3x2 uneven"), ("unet", "1x2 one group"),
    ),
)  # fmt: skip
def test_the_zoo_whole(name: str, way: str) -> None:
    """Everything tiled, the tail on every tile too: what follows global pooling is replicated."""
    case = zoo_case(name)
    case.check(case.plan(case.tiled(WAYS[way])))


@pytest.mark.quick("resnet-other")
@pytest.mark.parametrize(
    ("name", "where"),
    some_of(
        ("resnet", "t1"), ("resnet", "other"), ("mobilenetv2", "t0"), ("mobilenetv2", "other"), ("mobilenetv3", "t1"),
        ("efficientnet", "t0"), ("efficientnet", "t1"), ("vgg", "t1"), ("vgg", "other"),
    ),
)  # fmt: skip
def test_a_tail_on_a_tile_or_another_device(name: str, where: str) -> None:
    case = zoo_case(name)
    end = tail_of(case)
    share = ByTiles((1, 1), (1, 1), None, (0, end // 2) if where == "t1" else None)
    stages = (case.tiled(share, 0, end), Stage((end, case.count), (where,)))
    ran = case.check(case.plan(*stages, micro_batches=1 if name == "resnet" else 2))
    assert [geometry.index for geometry in ran.schedule.lowering.work[where].geometries][-1] == 1


@pytest.mark.quick(every=3)
@tiled("vgg")
@pytest.mark.parametrize("order", ["sequential", "gpipe", "1f1b"])
def test_orders_of_a_tiled_stage_and_its_tail(order: Order) -> None:
    case = zoo_case("vgg")
    end = tail_of(case)
    share, home = ByTiles((1, 2), (1, 1), (0, 7), (0, 9)), "t0" if order != "1f1b" else "other"
    case.check(case.plan(case.tiled(share, 0, end), Stage((end, case.count), (home,)), micro_batches=2, order=order))


@pytest.mark.slow
@tiled("mobilenetv3")
def test_one_micro_batch_by_turns_on_a_device_of_two_stages() -> None:
    case = zoo_case("mobilenetv3")
    end = tail_of(case)
    case.check(case.plan(case.tiled(ByTiles((1, 1)), 0, end), Stage((end, case.count), ("t0",)), order="1f1b"))


@pytest.mark.quick(every=3)
@tiled("resnet")
@pytest.mark.parametrize("tail", ["t0", "t2", "other"])
def test_a_gateway(tail: str) -> None:
    """TILE Algorithm 1: partial weight gradients to the first tile, which steps, and weights back."""
    case = zoo_case("resnet")
    end = tail_of(case)
    stages = (case.tiled(ByTiles((1, 1), (1, 1)), 0, end, reduce="gateway"), Stage((end, case.count), (tail,)))
    ran = case.check(case.plan(*stages))
    assert not any("reduce s0 gradients" in text for log in ran.logs.values() for text in log.actions)
    assert ("step s0" in ran.logs["t0"].actions, "step s0" in ran.logs["t1"].actions) == (True, False)


@tiled("yolov2")
def test_gateways_of_two_stages_that_each_serve_the_other() -> None:
    case = zoo_case("yolov2")
    half = case.count // 3
    one = case.tiled(ByTiles((1, 1)), 0, half, reduce="gateway")
    two = Stage((half, case.count), ("t1", "t0"), ByTiles((1,), (1, 1), None, (half,)), reduce="gateway")
    case.check(case.plan(one, two, micro_batches=2))


# Devices in several stages


def two_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 5, padding=2))


def five_convolutions() -> nn.Module:
    return nn.Sequential(*(same(3, 3, 3) for _ in range(5)))


@pytest.mark.quick(every=9)
@tiled("small")
@pytest.mark.parametrize("groups", [None, (1,), (1, 2)])
@pytest.mark.parametrize("device", ["t0", "t1", "other"])
def test_a_device_before_and_in_a_tiled_stage(device: str, groups: tuple[int, ...] | None) -> None:
    case = small_case(two_convolutions, (2, 8, 6), 4)
    tiles = case.tiled(ByTiles((1, 1), (1,), None, groups), 1)
    case.check(case.plan(Stage((0, 1), (device,)), tiles, micro_batches=2))


@pytest.mark.quick(every=4)
@tiled("small")
@pytest.mark.parametrize("groups", [(None, None), ((0,), None), (None, (2,)), ((0, 1), (2, 3))])
def test_tiles_after_tiles_on_the_same_devices(groups: tuple[tuple[int, ...] | None, tuple[int, ...] | None]) -> None:
    """Two stages with other grids: most of a map is handed over where it is, the rest travels."""
    case = small_case(five_convolutions, (3, 12, 10))
    one = case.tiled(ByTiles((1, 1), (1, 1), None, groups[0]), 0, 2)
    two = Stage((2, 5), ("t3", "t0", "t1"), ByTiles((2, 1, 1), (1,), None, groups[1]))
    case.check(case.plan(one, two))


class Skip(nn.Module):
    """Made first, read first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = same(2, 2), same(2, 2), same(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        out: Tensor = self.c(torch.tanh(self.b(first))) * first
        return out


@pytest.mark.quick(every=12)
@tiled("small")
@pytest.mark.parametrize("order", ["sequential", "gpipe", "stream"])
@pytest.mark.parametrize("in_tiles", [(), (1,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_skip_over_a_stage_of_the_same_device(order: Order, in_tiles: tuple[int, ...], grouped: bool) -> None:
    case = small_case(Skip, (2, 8, 6), 4)
    stages = []
    for index in range(3):
        first, last = 2 * index, 2 * index + 2
        share = ByTiles((1, 1), (1,), None, (first,) if grouped else None)
        stages.append(case.tiled(share, first, last) if index in in_tiles else Stage((first, last), ("t0",)))
    plan = case.plan(*stages, micro_batches=2, order=order)
    if order == "stream":
        assert_streams(case, plan)
    else:
        case.check(plan)


def two_norms() -> nn.Module:
    return nn.Sequential(same(2, 3), nn.BatchNorm2d(3), nn.ReLU(), same(3, 3), nn.GroupNorm(1, 3), same(3, 2))


@pytest.mark.quick(every=2)
@tiled("small")
@pytest.mark.parametrize("back", [None, (1,)])
def test_norms_at_both_ends_of_a_stage_on_a_device_of_others(back: tuple[int, ...] | None) -> None:
    """Their sums are the first thing that a stage does, forward and backward: what it was handed must be there."""
    case = small_case(two_norms, (2, 9, 8), 4)
    tiles = case.tiled(ByTiles((1, 1), (1,), None, back), 1, case.count - 1)
    stages = (Stage((0, 1), ("t0",)), tiles, Stage((case.count - 1, case.count), ("t0",)))
    case.check(case.plan(*stages, micro_batches=2))


# Places where something special happens


def wide_kernels() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 9, padding=4), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 3, (7, 5), padding=(6, 4), dilation=2), nn.Tanh(), nn.Conv2d(3, 2, 11, padding=5),
    )  # fmt: skip


@pytest.mark.quick(every=12)
@tiled("small")
@pytest.mark.parametrize("groups", [(None, None), ((0,), None), (None, (0,)), ((0, 2), (0, 1, 3))])
@pytest.mark.parametrize("grid", [((1, 1, 1, 1), (1,)), ((1, 1), (1, 1, 1)), ((5, 1, 1), (1,))], ids=str)
def test_halos_wider_than_a_neighbours_tile(grid: Any, groups: Any) -> None:
    case = small_case(wide_kernels, (2, 9, 8))
    case.check(case.plan(case.tiled(ByTiles(*grid, *groups))))


def shrinking() -> nn.Module:
    return nn.Sequential(
        same(2, 4), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.SiLU(), same(4, 4), nn.MaxPool2d(3, 2, 1), same(4, 4),
        nn.GroupNorm(2, 4), nn.AvgPool2d((1, 2)), Residual(same(4, 4)), LinearExcite(4), same(4, 3),
    )  # fmt: skip


@pytest.mark.quick(every=5)
@tiled("small")
@pytest.mark.parametrize("groups", [(None, None), ((0,), (0,)), (None, (0,)), ((0,), None), ((0, 3), (0, 5))])
def test_tiles_that_own_nothing_of_a_small_map(groups: Any) -> None:
    """Six tiles, and maps that shrink to 2 x 1: some devices compute nothing at the end, and wait for nobody."""
    case = small_case(shrinking, (2, 9, 10))
    case.check(case.plan(case.tiled(ByTiles((1, 1, 1), (1, 1), *groups))))


def much_padding() -> nn.Module:
    return nn.Sequential(same(2, 4), nn.Conv2d(4, 2, (4, 2), 3, (4, 0)), nn.InstanceNorm2d(2), nn.Tanh())


@pytest.mark.quick(every=4)
@tiled("small")
@pytest.mark.parametrize("forward", [None, (0,)])
@pytest.mark.parametrize("back", [None, (0,)])
def test_rows_made_of_padding_alone(forward: tuple[int, ...] | None, back: tuple[int, ...] | None) -> None:
    """The first tile's part of the second map reads no part of the first: in one group it computes none of it."""
    case = small_case(much_padding, (2, 13, 14))
    case.check(case.plan(case.tiled(ByTiles((1, 3, 1), (1,), forward, back))))


def test_a_weight_gradient_fetches_what_forward_did_not_compute() -> None:
    """In one forward group a device may not compute all it owns of a map; its weight gradient needs those inputs."""
    torch.manual_seed(0)
    module = nn.Sequential(same(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, 3), nn.ReLU(), same(4, 3), nn.Conv2d(3, 2, 2))
    case = case_of(module, (2, 16, 9))
    share = ByTiles((1,), (1, 1, 2), (0,), tuple(range(case.count)))
    ran = case.check(case.plan(case.tiled(share)))
    geometry = ran.schedule.lowering.geometries[0]
    assert any(
        not geometry.computed[device][name].contains(geometry.owned(name).hull(device))
        for device in geometry.devices
        for name in geometry.computed[device]
    )


class Inception(nn.Module):
    """Branches that read different surroundings, one of them pooled, joined; an in-place activation on a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = same(3, 2, 1), same(3, 2, 5), nn.Conv2d(3, 2, 1)
        self.d, self.act = same(6, 6), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        joined = torch.cat([self.a(x), self.b(x), self.c(pooled)], 1)
        y = self.d(joined)
        out: Tensor = self.act(y) + joined * 0.5 - x[:, :1]
        return out


class Heads(nn.Module):
    """Three outputs: an early map, a late one, and numbers for each sample; the first is read on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = same(2, 4), nn.Conv2d(4, 4, 3, 2, 1), same(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        early = torch.tanh(self.a(x))
        late = torch.relu(self.b(early))
        return early, self.c(late), self.last(late.mean((2, 3)))


class Tied(nn.Module):
    """One convolution used twice, on maps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = same(2, 4), same(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        out: Tensor = self.b(functional.max_pool2d(x, 2))
        return out


class Frozen(nn.Module):
    """Nothing before the last convolution is trained, but for a norm's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = same(2, 4), nn.BatchNorm2d(4), same(4, 4), same(4, 2)
        for weight in (*self.a.parameters(), self.norm.bias, *self.b.parameters()):
            weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.relu(self.b(self.norm(self.a(x)))))
        return out


class Norms(nn.Module):
    """A norm first of all, one at rest, one without weights, one without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = nn.BatchNorm2d(2), same(2, 4)
        self.rest, self.bare = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.still = nn.BatchNorm2d(4, track_running_stats=False)
        self.b, self.c, self.d = same(4, 4), same(4, 4), same(4, 4)

    def train(self, mode: bool = True) -> Norms:
        super().train(mode)
        self.rest.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.rest(self.a(self.first(x)))
        x = torch.relu(self.bare(self.b(x)))
        out: Tensor = self.d(torch.relu(self.still(self.c(x))))
        return out


class Unread(nn.Module):
    """A branch that nothing reads on, and a constant map."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unread, self.b = same(2, 3), same(3, 3), same(3, 2)
        self.register_buffer("offset", torch.ones(3, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x)) + self.offset
        self.unread(x)
        out: Tensor = self.b(x).clamp(-0.4, 0.4)
        return out


class Up(nn.Module):
    """Up-sampled to the odd size of a skip, and joined with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = same(2, 4), nn.Conv2d(4, 6, 3, 2, 1), same(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.relu(self.a(x))
        coarse = functional.interpolate(torch.relu(self.b(fine)), size=fine.shape[2:], mode="bilinear")
        out: Tensor = self.c(torch.cat([coarse, fine], 1))
        return out


def heads_loss(output: Sequence[Tensor], target: Tensor) -> Tensor:
    early, late, numbers = output
    return functional.mse_loss(early, target) + (late**2).mean() + numbers.sigmoid().mean()


SPECIAL: dict[str, type[nn.Module]] = {
    "inception": Inception, "tied": Tied, "frozen": Frozen, "norms": Norms, "unread": Unread, "up": Up,
}  # fmt: skip


@cache
def special_case(name: str) -> Case:
    torch.manual_seed(4)
    return case_of(SPECIAL[name](), (3 if name == "inception" else 2, 13, 11), steps=3)


@pytest.mark.quick(every=24)
@pytest.mark.parametrize("name", by_name("tiled", SPECIAL))
@pytest.mark.parametrize(
    "groups", [(None, None), ((0,), (0,)), ((0, 2), (0, 3)), (None, (0,))], ids=["no", "one", "some", "back"]
)
def test_networks_with_something_special_by_tiles(name: str, groups: Any) -> None:
    case = special_case(name)
    case.check(case.plan(case.tiled(ByTiles((1, 2), (1, 1), *groups))))


@cache
def heads_case() -> Case:
    torch.manual_seed(5)
    module = Heads().double()
    batches = [(torch.randn(2, 2, 12, 9).double(), torch.randn(2, 4, 12, 9).double()) for _ in range(3)]
    graph = capture(module, batches[0][0], loss=heads_loss, target=batches[0][1], granularity="operators", name="heads")
    return Case(graph, batches)


@pytest.mark.quick(every=6)
@tiled("small")
@pytest.mark.parametrize("back", [None, (0,), (0, 2)])
@pytest.mark.parametrize("cut", [0, 2])
def test_several_outputs(back: tuple[int, ...] | None, cut: int) -> None:
    """With a cut, the early output is made before the tiles and goes to the device that computes the loss."""
    case = heads_case()
    starts = None if back is None else tuple(cut + start for start in back)
    stages = [case.tiled(ByTiles((1, 1), (1, 1), None, starts), cut)]
    if cut:
        stages.insert(0, Stage((0, cut), ("first", "second"), BySamples((1, 1))))
    case.check(case.plan(*stages))


@pytest.mark.quick(every=6)
@tiled("vgg")
@pytest.mark.parametrize("home", ["phone", "t0", "t3"])
@pytest.mark.parametrize("groups", [(None, None), ((0,), (0,))], ids=["no", "one"])
def test_an_input_with_a_home_is_cut_there(home: str, groups: Any) -> None:
    case = zoo_case("vgg")
    end = tail_of(case)
    stages = (case.tiled(ByTiles((1, 1), (1, 1), *groups), 0, end), Stage((end, case.count), ("t0",)))
    case.check(case.plan(*stages, micro_batches=2, homes={case.network.inputs[0]: home}))


@pytest.mark.slow
@tiled("efficientnet")
def test_replicas_agree_to_the_last_bit_and_a_run_repeats_itself() -> None:
    case = zoo_case("efficientnet")
    plan = case.plan(case.tiled(ByTiles((1, 1), (1, 1), None, (0, 5))))
    one, two = case.check(plan), case.check(plan)
    assert one.device_losses == two.device_losses
    for device, own in one.weights.items():
        assert all(torch.equal(tensor, two.weights[device][name]) for name, tensor in own.items())
        trained = {spec.name for spec in case.graph.weights if spec.trainable}
        assert all(torch.equal(own[name], one.weights["t0"][name]) for name in trained)


@pytest.mark.quick(every=2)
@tiled("resnet")
@pytest.mark.parametrize("back", [None, (0, 4)])
def test_kernels_of_another_memory_format(back: tuple[int, ...] | None) -> None:
    case = zoo_case("resnet")
    choice = {
        node.name: Kernel(channels_last=True, product=takes_product(case.graph, node))
        for node in case.graph.nodes
        if takes_format(case.graph, node)
    }
    assert any(kernel.product for kernel in choice.values())
    plan = case.plan(case.tiled(ByTiles((1, 1), (1, 1), None, back)))
    case.check(plan, kernels=dict.fromkeys(plan.devices, choice), stored=choice)


@pytest.mark.slow
@tiled("mobilenetv2")
def test_small_buckets_are_reduced_while_backward_goes_on() -> None:
    case = zoo_case("mobilenetv2")
    ran = case.check(case.plan(case.tiled(ByTiles((1, 1))), micro_batches=2, bucket_bytes=1))
    assert sum(text.startswith("reduce s0 gradients") for text in ran.logs["t0"].actions) > 5


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(1, 4), lambda: nn.BatchNorm2d(4)])
def test_a_tile_that_neither_owns_nor_reads_any_row_of_a_normalised_map(norm: Callable[[], nn.Module]) -> None:
    """Sixteen rows become four, of which the first tile has none: its part of the sums is zeros."""
    torch.manual_seed(0)
    module = nn.Sequential(same(2, 4), nn.AdaptiveAvgPool2d((4, 3)), norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    case = case_of(module, (2, 16, 12), samples=4)
    plan = case.plan(case.tiled(ByTiles((1, 3, 1), (1,), (0,), (0, 2))))
    geometry = TileGeometry(plan, 0, case.network)
    pooled = case.network.ops[1].outputs[0]
    assert geometry.own("t0", pooled).is_empty
    assert geometry.buffer("t0", pooled).shape[0] == 0
    case.check(plan)


@pytest.mark.slow
def test_more_micro_batches_than_one_in_flight() -> None:
    """A pipeline of two tiled stages by turns: several micro-batches in flight on every tile at once."""
    torch.manual_seed(0)
    case = case_of(nn.Sequential(same(2, 4), nn.BatchNorm2d(4), nn.ReLU(), same(4, 4), nn.Dropout(0.4), same(4, 3)),
                   (2, 10, 8), samples=8)  # fmt: skip
    stages = (
        case.tiled(ByTiles((1, 1)), 0, 3),
        Stage((3, case.count), ("u0", "u1"), ByTiles((1,), (2, 1), None, (3,))),
    )
    case.check(case.plan(*stages, micro_batches=4, order="1f1b"))


# Streams


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", by_name("tiled", ZOO, slow=("unet", "efficientnet", "yolov2")))
def test_a_stream_through_the_zoo(name: str) -> None:
    case = zoo_case(name)
    assert_streams(case, case.plan(case.tiled(ByTiles((1, 1), (1, 2))), order="stream", micro_batches=2))
    if name not in ("yolov2", "unet"):
        end = tail_of(case)
        stages = (case.tiled(ByTiles((1, 1), (1,), (0,)), 0, end), Stage((end, case.count), ("t0",)))
        assert_streams(case, case.plan(*stages, order="stream", micro_batches=2))


def test_an_early_output_streams_from_the_tiles() -> None:
    torch.manual_seed(5)
    batches = [(torch.randn(2, 2, 12, 9).double(), None) for _ in range(2)]
    graph = capture(Heads().double(), batches[0][0], granularity="operators", name="heads")
    case = Case(graph, batches)
    assert_streams(case, case.plan(case.tiled(ByTiles((1, 1), (1, 1))), order="stream"))
    late = case.count - 2
    stages = (case.tiled(ByTiles((1, 1)), 0, late), Stage((late, case.count), ("t0",)))
    assert_streams(case, case.plan(*stages, order="stream"))


def test_a_gradient_is_formatted_like_what_it_is_read_beside() -> None:
    last, box = torch.channels_last, Box.whole((1, 4, 3, 3))
    gradient = torch.randn(1, 4, 3, 3)
    beside = BoxTensor(box, torch.randn(1, 4, 3, 3).contiguous(memory_format=last))
    found = formatted_like(gradient, [beside])
    assert found.is_contiguous(memory_format=last)
    assert torch.equal(found, gradient)
    assert formatted_like(found, [beside]) is found
    assert formatted_like(gradient, []) is gradient
    flat = torch.randn(1, 4, 1, 1)
    assert formatted_like(flat, [beside]) is flat, "both formats are the same"
