"""Boundary data that travels beside the sums of normalisations, in place of after them: exact, and in that order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from groups import slow_if
from hand_made import cluster as cluster_of
from manyhands.executor.boxes import packed_alone
from manyhands.executor.tile_base import memory_of
from manyhands.executor.tile_call import ForwardCall
from manyhands.executor.tile_pointwise import Activation
from manyhands.facts.errors import BadSchedule
from manyhands.facts.link import Link
from manyhands.facts.plan import ByTiles, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Kernel, estimate_cluster
from manyhands.planner.tiles import TilePrices, with_groups
from manyhands.plans.simulating import simulate
from manyhands.schedule.actions import Action, Await, Backward, Receive, Reduce, Send, parse_action
from manyhands.schedule.checker import check, check_progress
from manyhands.schedule.policy import Schedule
from manyhands.schedule.tiles import TileGeometry
from tiled_cases import DRAWN, PICTURES, Case, case_of, small_case, unwritten_memory_noticed, zoo_case
from tiled_networks import Together, networks, same


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory() -> Iterator[None]:
    with unwritten_memory_noticed():
        yield


def block(inputs: int, outputs: int, norm: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(same(inputs, outputs), norm or nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1))


def chain() -> nn.Module:
    """A pool between two blocks, and a block of single places."""
    single = nn.Sequential(nn.Conv2d(4, 3, 1, bias=False), nn.BatchNorm2d(3), nn.LeakyReLU(0.1))
    return nn.Sequential(block(2, 3), nn.MaxPool2d(2), block(3, 4), single, block(3, 4), same(4, 2))


def other_norms() -> nn.Module:
    return nn.Sequential(block(2, 4, nn.GroupNorm(2, 4)), block(4, 4, nn.InstanceNorm2d(4, affine=True)), same(4, 2))


def beside(case: Case, share: ByTiles, *, through_windows: bool = True) -> tuple[Plan, TileGeometry]:
    """The plan that exchanges beside sums wherever it can."""
    plan = resolve(case.plan(case.tiled(share)), case.network)
    geometry = TileGeometry(plan, 0, case.network)
    starts = geometry.start_names(geometry.beside_sums(through_windows=through_windows))
    stage = msgspec.structs.replace(plan.stages[0], share=msgspec.structs.replace(share, forward_groups=starts))
    changed = resolve(msgspec.structs.replace(plan, stages=(stage,)), case.network)
    return changed, TileGeometry(changed, 0, case.network)


def target(case: Case, op: int) -> str:
    return case.network.ops[op].target.split(".")[1]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("through", [True, False])
def test_where_it_is_exchanged(through: bool) -> None:
    """Before the normalisation; a pool is gone through or not; sums that nothing is fetched beside start nothing."""
    case = small_case(chain, (2, 16, 12))
    plan, geometry = beside(case, ByTiles((1, 1)), through_windows=through)
    places = {op: target(case, op) for op in geometry.group_starts[1:]}
    norms = [op for op in range(len(case.network.ops)) if target(case, op) == "batch_norm"]
    fetching = {group.first for group in geometry.groups if group.fetches}
    if through:
        assert list(places) == [norms[0], norms[2], norms[3]]  # before the block of single places nothing is fetched
        assert fetching == geometry.rim_first == set(places)
    else:  # the pool's windows lie inside the tiles: what is fetched is what it made
        assert fetching - geometry.rim_first == {op for op, name in places.items() if name == "conv2d"}
        assert len(fetching - geometry.rim_first) == 1
    assert plan.stages[0].share.forward_groups is not None  # type: ignore[union-attr]


def taken(actions: tuple[Action, ...] | list[Action], geometry: TileGeometry, op: int) -> list[str]:
    """What a device does around a group's start, in words."""
    name = geometry.network.ops[op].inputs[0]
    words = []
    for action in actions:
        if isinstance(action, (Send, Receive)) and any(part.tensor == name for part in action.message.parts):
            words.append(f"{type(action).__name__.lower()} {action.message.kind}")
        elif isinstance(action, (Reduce, Await)) and action.first == op and getattr(action, "what", "") != "gradients":
            later = "later " if getattr(action, "later", False) else ""
            words.append(f"{later}{type(action).__name__.lower()}{' back' if action.backward else ''}")
        elif isinstance(action, Backward) and (action.first <= op < action.last or action.part == "weights"):
            words.append(f"backward {action.part}".strip())
    return words


def test_both_travel_at_once_and_weights_are_computed_meanwhile() -> None:
    case = small_case(chain, (2, 16, 12))
    plan, geometry = beside(case, ByTiles((1, 1)))
    ran = case.check(plan)
    for executor in ran.executors.values():
        done = [parse_action(text) for text in executor.log.actions]  # what the run itself noted
        for op in geometry.rim_first:
            words = taken(done, geometry, op)
            ahead = words[: words.index("receive halo") + 1]
            assert ahead == ["send halo", "reduce", "receive halo"]
            start = words.index("later reduce back")
            assert words[start : start + 7] == [
                "later reduce back", "backward rim", "send halo-gradient", "backward weights", "await back", "backward",
                "receive halo-gradient",
            ]  # fmt: skip
        assert sum(isinstance(action, Await) for action in done) == 4  # the block of single places too


WAYS = {"2x1": ByTiles((1, 1)), "2x2 uneven": ByTiles((2, 1), (1, 2)), "3x2": ByTiles((1, 2, 1), (1, 1))}


@pytest.mark.quick("chain-True-2x1")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("build", [chain, other_norms])
def test_small_networks(build, through: bool, way: str) -> None:  # type: ignore[no-untyped-def]
    case = small_case(build, (2, 18, 14), 4)
    plan, geometry = beside(case, WAYS[way], through_windows=through)
    assert geometry.rim_first
    case.check(plan)
    case.check(msgspec.structs.replace(plan, micro_batches=2, bucket_bytes=1))


ZOO_WAYS = [("yolov2", "2x2 uneven"), ("resnet", "2x1"), ("unet", "3x2"), ("mobilenetv2", "2x2 uneven")]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(name, way, marks=[pytest.mark.xdist_group(f"tiled {name}"), *slow_if(name == "mobilenetv2")])
     for name, way in ZOO_WAYS],
)  # fmt: skip
def test_the_zoo(name: str, way: str) -> None:
    """With residuals, skips and passthroughs: what several operators read is exchanged as before."""
    case = zoo_case(name)
    plan, geometry = beside(case, WAYS[way])
    assert geometry.rim_first
    case.check(plan)


def last_where(case: Case, plan: Plan, *numbers: int) -> dict[str, dict[str, Kernel]]:
    """Kernels of all devices: of convolutions at these places of a turn of two, in channels_last."""
    convolutions = [op for op in case.network.ops if op.macs]
    own = {op.name: Kernel(channels_last=number % 2 in numbers) for number, op in enumerate(convolutions)}
    return dict.fromkeys(plan.devices, own)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("build", [chain, other_norms])
def test_maps_that_lie_in_two_formats(build, samples: int) -> None:  # type: ignore[no-untyped-def]
    """Pieces come as they travel, channels first, and are written among maps with channels last; one sample's rows lie
    without gaps, those of several do not. The same where convolutions take turns, whatever is exchanged where."""
    torch.manual_seed(3)
    case = case_of(build(), (2, 16, 12), samples=samples)
    for share in (ByTiles((1, 2)), ByTiles((1,), (1, 1))):
        plan, _ = beside(case, share)
        before = resolve(case.plan(case.tiled(share)), case.network)
        for numbers in ((0, 1), (0,), (1,)):
            case.check(plan, kernels=last_where(case, plan, *numbers))
            case.check(before, kernels=last_where(case, before, *numbers))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("is_beside", [True, False])
def test_an_activation_works_in_place_where_a_map_has_a_rim(is_beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch norm before it writes where the result belongs, among others' rows and zeros of padding."""
    torch.manual_seed(3)
    case = case_of(chain(), (2, 16, 12), samples=1)
    share = ByTiles((1, 1))
    plan = beside(case, share)[0] if is_beside else resolve(case.plan(case.tiled(share)), case.network)
    places: list[bool] = []
    activate = Activation.forward

    def forward(self: Activation, call: ForwardCall) -> torch.Tensor:
        if call.into is not None:
            places.append(memory_of(call.into) == memory_of(call.inputs[0].tensor))
        return activate(self, call)

    monkeypatch.setattr(Activation, "forward", forward)
    case.check(plan, kernels=last_where(case, plan, 0, 1))
    assert sum(places) >= 6  # of both tiles
    places.clear()
    case.check(plan, kernels=last_where(case, plan))
    assert places  # rows of a map with channels first have gaps between them
    assert not any(places)


GROUPS = {
    "every layer": ByTiles((1, 1)),
    "one group": ByTiles((1, 2), (1, 1), (0,)),
    "one group of deltas": ByTiles((2, 1), (1,), (0,), (0,)),
    "some of both": ByTiles((1, 1), (2, 1), (0, 5, 9), (0, 3, 8)),
    "beside sums": ByTiles((1, 2)),
}


@cache
def single_precision() -> Case:
    torch.manual_seed(3)
    return case_of(chain(), (2, 16, 12), samples=4, steps=10, dtype=torch.float32)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("groups", GROUPS)
def test_ten_steps_in_float32(groups: str) -> None:
    case = single_precision()
    plan, _ = beside(case, GROUPS[groups]) if groups == "beside sums" else (case.plan(case.tiled(GROUPS[groups])), None)
    case.check(plan, 1e-4)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("start", [3, 4, 5])
def test_maps_of_five_axes_beside_channels_last(start: int) -> None:
    """Channels in groups are an axis more for a while, which no such format has."""
    torch.manual_seed(0)
    module = nn.Sequential(same(2, 4), Together(), nn.Conv2d(6, 4, 3, padding=1, groups=2))
    case = case_of(module, (2, 12, 10))
    assert any(len(case.network.tensors[name].shape) == 5 for name in case.network.ops[start - 1].outputs)
    share = ByTiles((1, 1), forward_groups=(0, case.network.ops[start].name))
    plan = resolve(case.plan(case.tiled(share)), case.network)
    case.check(plan, kernels=last_where(case, plan, 0, 1))


@pytest.mark.slow
@settings(DRAWN, max_examples=6)
@given(st.data())
def test_any_network(data: st.DataObject) -> None:
    shape = (2, *data.draw(st.sampled_from(PICTURES)))
    case = case_of(data.draw(networks(shape)), shape, samples=4, seed=data.draw(st.integers(0, 99)))
    for through in (True, False):
        plan, _ = beside(case, data.draw(st.sampled_from(list(WAYS.values()))), through_windows=through)
        case.check(plan)


def simulated(plan: Plan, case: Case, link: Link) -> float:
    machines = cluster_of(plan.devices, link)
    return simulate(plan, case.network, machines).seconds


def test_long_delays_are_waited_for_less_often() -> None:
    """Each way once where it was twice, and backward behind the weights' gradients; where bytes count, pools first."""
    case = small_case(chain, (2, 16, 12))
    every = resolve(case.plan(case.tiled(ByTiles((1, 1)))), case.network)
    (near, _), (through, _) = (beside(case, ByTiles((1, 1)), through_windows=value) for value in (False, True))
    delayed, narrow = Link(1e12, 0.1), Link(1e3, 0.0)
    waits = [simulated(plan, case, delayed) / 0.1 for plan in (every, near, through)]
    assert waits[0] - waits[1] > 1.9
    assert waits[1] - waits[2] > 0.9
    assert simulated(every, case, narrow) < simulated(through, case, narrow)


def test_the_planner_prices_both() -> None:
    case = small_case(chain, (2, 16, 12))
    every = resolve(case.plan(case.tiled(ByTiles((1, 1)))), case.network)
    machines = cluster_of(every.devices, Link(1e6, 1e-3))
    priced = TilePrices(every, 0, case.network, machines, estimate_cluster(case.network, machines))
    found = {groups.name: groups for groups in priced.groupings()}
    for name, through in (("beside sums", False), ("beside sums, through pools", True)):
        plan, _ = beside(case, ByTiles((1, 1)), through_windows=through)
        assert with_groups(every, 0, found[name]) == plan
        assert found[name].seconds > 0
    with_less = {name: groups.seconds for name, groups in found.items() if "beside" in name}
    assert min(with_less, key=with_less.__getitem__) == "beside sums"  # not pooled yet, it is four times as much


def test_waiting_for_what_was_not_given() -> None:
    case = small_case(chain, (2, 16, 12))
    schedule = Schedule(beside(case, ByTiles((1, 1)))[0], case.network)
    check(schedule)
    own = schedule.actions["t1"]
    turned = tuple(action for action in own if not (isinstance(action, Reduce) and action.later))
    with pytest.raises(BadSchedule, match="is joined by"):
        check(schedule, actions={**schedule.actions, "t1": turned})
    with pytest.raises(BadSchedule, match=r"t1 is to 'await s0 m0b \d+:\d+', and has not given its own part"):
        check_progress({**schedule.actions, "t1": turned})
    never = tuple(action for action in own if not isinstance(action, Await))
    with pytest.raises(BadSchedule, match=r"t1 gives its part to 'reduce .* later', and never waits for the others'"):
        check(schedule, actions={**schedule.actions, "t1": never})


class Shifted(nn.Module):
    """What a tile reads of a map may be all of others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, 1:]


def shifted() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.AdaptiveAvgPool2d((6, 4)), block(4, 5), nn.Sigmoid(), Shifted()
    )


@pytest.mark.slow
def test_a_tile_that_reads_nothing_of_its_own() -> None:
    case = small_case(shifted, (2, 16, 12))
    plan, geometry = beside(case, ByTiles((1, 2, 1)))
    (first,) = geometry.rim_first
    name = case.network.ops[first + 1].outputs[0]
    assert geometry.computed["t0"][name].intersect(geometry.own("t0", name)).is_empty
    case.check(plan)


@pytest.mark.slow
def test_starts_are_in_order_and_begin_with_the_stage() -> None:
    case = zoo_case("yolov2")
    for through in (True, False):
        _, geometry = beside(case, ByTiles((1, 1)), through_windows=through)
        starts = geometry.group_starts
        assert starts[0] == geometry.first
        assert all(a < b for a, b in pairwise(starts))
        for group in geometry.groups:  # every operator still has what it reads
            assert group.first < group.last


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_what_is_packed_alone_is_contiguous(dtype: torch.dtype) -> None:
    whole = torch.arange(2 * 3 * 6 * 5).view(2, 3, 6, 5).to(dtype)
    part = whole[:, :, 1:4]
    assert torch.equal(packed_alone(part), part)
    assert packed_alone(part).is_contiguous()
    assert packed_alone(whole).data_ptr() == whole.data_ptr()
