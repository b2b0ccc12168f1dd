"""Training whose sums go through process groups of PyTorch: what one device computes, in every way of sharing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

from grouped_devices import on_all, process_groups
from hand_made import summed_network
from harness import SGD, TOLERANCE, Batch, Ran, alone, plan_for, run, shared
from manyhands.executor.collectives import Collectives
from manyhands.executor.measured_choice import MOST_TURNS, TRIAL_ROUNDS, TRIED_PAIRS
from manyhands.executor.process_groups import GroupKey
from manyhands.facts.clipping import Clipping
from manyhands.facts.collectives import AUTO, TORCH
from manyhands.facts.plan import ByTiles
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.schedule.actions import Reduce
from manyhands.schedule.tiles import TileGeometry
from manyhands.transport.mailbox import Mailbox
from real_runs import CLASSES, network
from tiled_cases import small_case
from tiled_networks import same

STEPS = 3


@pytest.fixture(scope="module")
def graph() -> Graph:
    picture, target = torch.randn(2, 1, 8, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    return capture(network(), picture, loss=functional.cross_entropy, target=target)


def batches(size: int, steps: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for _ in range(steps)
    ]


def reductions(ran: Ran, device: str) -> list[Reduce]:
    return [action for action in ran.schedule.every_action(device) if isinstance(action, Reduce)]


def assert_all_grouped(ran: Ran, devices: Sequence[str], steps: int = STEPS) -> None:
    """Every reduction of these devices went through a group, and no message carried any."""
    for device in devices:
        log, planned = ran.logs[device], reductions(ran, device)
        assert planned
        assert sum(log.group_sums.values()) == steps * len(planned)
        kinds = sum(log.sent_kinds.values())
        assert sum(size for to, size in log.sent_bytes.items() if to != "coordinator") == kinds


def test_samples_with_batch_norm_are_those_of_one_device(graph: Graph) -> None:
    plan = plan_for(graph, [shared(0, 3, 3, 1, 2)], batch_size=6)
    data = batches(6)
    ran = run(graph, plan, data, SGD, seed=7, collectives=TORCH)
    ran.assert_equals(*alone(graph, data, SGD, seed=7))
    assert_all_grouped(ran, plan.devices)
    whats = {reduce.what for reduce in reductions(ran, plan.devices[0])}
    assert whats == {"gradients", "statistics"}
    first, *others = ran.weights.values()  # the library gives all devices the same bits
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_a_hybrid_plan_with_two_groups_of_replicas_and_a_norm(graph: Graph) -> None:
    stages = [shared(0, 1, 2, 1), shared(1, 3, 1, 2)]
    plan = plan_for(graph, stages, batch_size=6, micro_batches=2, gradient_norm=True)
    data = batches(6)
    clipping = Clipping(norm=0.5)
    ran = run(graph, plan, data, SGD, seed=7, collectives=TORCH, clipping=clipping)
    by_messages = run(graph, plan, data, SGD, seed=7, clipping=clipping)
    ran.assert_equals(by_messages.weights[plan.devices[0]] | by_messages.weights[plan.devices[-1]], by_messages.losses)
    assert_all_grouped(ran, plan.devices)
    assert len({key for device in plan.devices for key in ran.logs[device].group_sums}) == 5  # 2 stages, 2 each; a norm


def blocks() -> nn.Module:
    """Batch norms between convolutions, whose boundary data travels beside the sums."""
    norms = [nn.Sequential(same(2, 2), nn.BatchNorm2d(2), nn.LeakyReLU(0.1)) for _ in range(2)]
    return nn.Sequential(*norms, same(2, 2))


def test_tiles_whose_statistics_are_waited_for_later() -> None:
    case = small_case(blocks, (2, 8, 8))
    tiles = ByTiles((1, 1))
    plan = resolve(case.plan(case.tiled(tiles)), case.network)
    geometry = TileGeometry(plan, 0, case.network)
    starts = geometry.start_names(geometry.beside_sums(through_windows=True))
    plan = case.plan(case.tiled(ByTiles((1, 1), forward_groups=starts)))
    ran = run(case.graph, plan, case.batches, SGD, seed=7, collectives=TORCH)
    ran.assert_equals(*case.expected(1))
    assert_all_grouped(ran, plan.devices, len(case.batches))
    assert any(reduce.later for reduce in reductions(ran, plan.devices[0]))


def test_auto_measures_both_ways_and_is_exact(graph: Graph) -> None:
    steps = MOST_TURNS * TRIAL_ROUNDS + 3
    tried = [turn * TRIED_PAIRS for turn in range(1, MOST_TURNS + 1)]
    plan = plan_for(graph, [shared(0, 3, 2, 2)], batch_size=4)
    data = batches(4, steps)
    ran = run(graph, plan, data, SGD, seed=7, collectives=AUTO)
    ran.assert_equals(*alone(graph, data, SGD, seed=7))
    for device in plan.devices:
        each = ran.logs[device].group_sums
        planned = reductions(ran, device)
        for key, count in each.items():
            of_key = sum(str(GroupKey.of(reduce)) == key for reduce in planned)
            assert count in [of_key * each for pairs in tried for each in (pairs, steps - pairs)], key
    assert len({tuple(sorted(ran.logs[device].group_sums.items())) for device in plan.devices}) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_any_layout_and_type_are_added_up_in_place(dtype: torch.dtype) -> None:
    devices = ("a", "b", "c")
    gradients = {
        device: [torch.full((5,), float(place), dtype=dtype), _channels_last(place, dtype), torch.ones((), dtype=dtype)]
        for place, device in enumerate(devices)
    }
    expected = [sum(gradients[device][place] for device in devices) for place in range(3)]
    sizes = [gradient.numel() for gradient in gradients["a"]]
    made = summed_network(sizes, str(dtype).removeprefix("torch."))
    reduce = Reduce(0, "gradients", 0, 3, devices, sum(sizes) * dtype.itemsize)
    key = GroupKey.of(reduce)
    boxes = {device: Mailbox(device, limit_seconds=10) for device in devices}
    with process_groups(boxes, dict.fromkeys(devices, (key,))) as groups:
        ways = {d: Collectives(groups[d], is_measured=False, first_step=0, stride=1) for d in devices}
        records = on_all({d: lambda d=d: ways[d].sum(reduce, made, 0, gradients[d]) for d in devices})
    for device in devices:
        for place, gradient in enumerate(gradients[device]):
            assert torch.equal(gradient, expected[place]), (device, place)
        record = records[device]
        assert record.received == record.sums == ()
        assert record.after == records["a"].after
    totals = [sum(records[device].own[chunk] for device in devices) for chunk in range(len(devices))]
    assert totals == pytest.approx(records["a"].after, rel=TOLERANCE)


def _channels_last(place: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(2 * 3 * 2 * 2, dtype=torch.float32).reshape(2, 3, 2, 2) + place
    return values.to(dtype).to(memory_format=torch.channels_last)
