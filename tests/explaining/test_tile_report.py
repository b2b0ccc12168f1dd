"""Bytes by use are the plan's messages and nothing else, and the tile map shows what the plan exchanges."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import manyhands as mh
from manyhands.executor.messages import COORDINATOR, plan_bytes
from manyhands.explaining.tile_report import (
    USE_OF_KIND,
    USES,
    group_maps,
    is_tiled,
    planned_traffic,
    tiled_schedule,
    traffic_text,
    write_tile_map,
)
from manyhands.facts.boxes import Box
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.observe.tile_map import HANDED
from manyhands.schedule.actions import KINDS
from manyhands.schedule.policy import Schedule
from real_runs import BATCH, CLASSES, Pictures, names, train, workers

NAMES = ("a", "b", "c", "d", "e", "f")


def tiled_network() -> nn.Sequential:
    """Two layers of convolutions with batch norm, pooling in between, a residual block, a head."""
    torch.manual_seed(2)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = x + self.inner(x)
            return made

    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        Residual(),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
    ).double()


@pytest.fixture(scope="module")
def network() -> Network:
    graph = mh.capture(tiled_network(), torch.zeros(2, 1, 8, 8, dtype=torch.float64))
    return graph.network


def tiled(network: Network, share: ByTiles, reduce: str = "allreduce", micro_batches: int = 2, **options: str) -> Plan:
    """All but the last layer in tiles, the rest on one of the devices."""
    count = len(share.rows) * len(share.columns)
    head = len(network.layers) - 1
    stages = (
        Stage((0, head), NAMES[:count], share, reduce=reduce),  # type: ignore[arg-type]
        Stage((head, head + 1), NAMES[:1]),
    )
    plan = Plan(network.name, BATCH, stages, micro_batches=micro_batches, order="gpipe")
    return resolve(msgspec.structs.replace(plan, **options), network)


SHARES = [
    ByTiles((1, 1)),
    ByTiles((3, 1), (1, 2)),
    ByTiles((1,), (1, 1, 1), (0,)),
    ByTiles((1, 1), (1, 1), (0, 2), (0, 1)),
    ByTiles((1, 1, 1), (1, 1), (0, 1), (0,)),
]


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("reduce", ["allreduce", "gateway"])
def test_bytes_by_use_are_all_that_the_plan_sends(network: Network, share: ByTiles, reduce: str) -> None:
    schedule = Schedule(tiled(network, share, reduce), network)
    traffic = planned_traffic(schedule)
    between = plan_bytes({d: tuple(schedule.every_action(d)) for d in schedule.lowering.work}, network)
    sent = {device: sum(uses.values()) for device, uses in traffic.by_device.items()}
    assert sum(size for device, size in sent.items() if device != COORDINATOR) == sum(between.values())
    for device in schedule.plan.devices:
        assert sent[device] == sum(size for (source, _), size in between.items() if source == device)
    assert tuple(traffic.by_use) == USES
    assert traffic.by_use == {use: sum(own[use] for own in traffic.by_device.values()) for use in USES}
    weights = sum(w.bytes for w in network.weights.values() if w.trainable and not w.name.startswith("3."))
    count = len(share.rows) * len(share.columns)
    assert traffic.by_use["weights"] == 2 * (count - 1) * weights
    assert traffic_text({"input_output": 2000, "boundary": 0, "weights": 3}) == (
        "Bytes a step: 2 kB input/output, 0 B boundary, 3 B weights"
    )


@pytest.mark.slow
def test_of_volumes_the_two_directions_that_are_cut_most_are_shown(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 2, 3, padding=1)).double()
    network = mh.capture(module, torch.zeros(2, 1, 9, 8, 6, dtype=torch.float64)).network
    for share, axes, shown in (
        (ByTiles((1, 1), depths=(1, 1, 1)), ("depth", "row"), 6),
        (ByTiles((1,), (1, 1), depths=(1, 1, 1)), ("depth", "column"), 6),
        (ByTiles((1, 1, 1), (1, 1)), ("row", "column"), 6),
        (ByTiles((1, 1), (1, 1), depths=(1, 1)), ("row", "column"), 4),
    ):
        devices = tuple(f"d{place}" for place in range(math.prod(share.grid)))
        stage = Stage((0, len(network.layers)), devices, share)
        schedule = Schedule(resolve(Plan(network.name, 2, (stage,)), network), network)
        maps = group_maps(schedule)
        assert {one.axes for one in maps} == {axes}
        assert {len(one.owned) for one in maps} == {shown}
        assert all(one.size[1:] == (9, 8, 6) for one in maps)
        assert all(("of 2 layers of tiles one is shown" in one.notes) == (shown == 4) for one in maps)
        sent = planned_traffic(schedule).sent
        assert sum(one.exchanged_bytes for one in maps) == sum(own["halo"] for own in sent.values()) > 0
    assert write_tile_map(schedule, tmp_path / "tiles.png", title="volumes").stat().st_size > 1000


def test_every_kind_has_a_use() -> None:
    assert set(KINDS) < USE_OF_KIND.keys()
    assert set(USE_OF_KIND.values()) == set(USES)


def test_a_stream_hands_its_outputs_back(network: Network) -> None:
    plan = tiled(network, ByTiles((1, 1)), order="stream")
    traffic = planned_traffic(Schedule(plan, network))
    assert traffic.by_use["weights"] == 0
    assert traffic.sent["a"]["result"] == BATCH * CLASSES * 8
    assert traffic.sent[COORDINATOR]["feed"] == sum(traffic.fed.values()) > BATCH * 64 * 8


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("share", SHARES, ids=str)
def test_the_map_shows_what_is_exchanged(network: Network, share: ByTiles, tmp_path: Path) -> None:
    schedule = Schedule(tiled(network, share), network)
    maps = group_maps(schedule)
    kinds = planned_traffic(schedule).sent
    sent = {kind: sum(own[kind] for own in kinds.values()) for kind in KINDS}
    shown = {w: sum(one.exchanged_bytes for one in maps if one.way == w) for w in ("forward", "backward")}
    assert shown["forward"] == sent["halo"]
    if share.backward_groups is None:
        assert not any(one.way == "backward" for one in maps)
    else:
        assert shown["backward"] == sent["halo-gradient"]
        assert sum(one.way == "backward" for one in maps) == len(share.backward_groups)
    for way in ("forward", "backward"):
        numbers = [one.number for one in maps if one.way == way]
        assert numbers == list(range(1, len(numbers) + 1))
    for one in maps:
        _, rows, columns = one.size
        assert sum(box.volume for box in one.owned.values()) == rows * columns
        for device, halo in one.halos.items():
            for source, box in halo:
                assert box.intersect(one.owned[device]).is_empty
                assert Box.whole((rows, columns)).contains(box)
                assert source == HANDED or one.owned[source].contains(box)
    assert write_tile_map(schedule, tmp_path / "tiles.png", title="t").read_bytes().startswith(b"\x89PNG")


def test_only_tiled_plans_have_a_map(network: Network) -> None:
    alone = Plan(network.name, BATCH, (Stage((0, len(network.layers)), ("a",)),))
    assert not is_tiled(alone)
    assert tiled_schedule(alone, network) is None
    assert tiled_schedule(tiled(network, ByTiles((1, 1))), network) is not None


@pytest.mark.slow
def test_a_run_sends_what_was_planned_and_draws_it(tmp_path: Path) -> None:
    """In real processes; and a log that says otherwise is noticed."""
    with workers(2, pictures=True) as cluster:
        own = names(cluster)
        stages = (Stage((0, 4), own, ByTiles((2, 1))), Stage((4, 5), own[:1]))
        plan = Plan("Sequential", BATCH, stages, micro_batches=2, order="gpipe")
        ran = train(cluster, plan, tmp_path / "run", model=tiled_network(), data=Pictures(), steps=3,
                    loss=functional.cross_entropy)  # fmt: skip
    result = ran.result
    assert result.traffic.differences(result.logs, result.plan) == []
    assert result.bytes_by_use == result.traffic.by_use
    assert min(result.bytes_by_use.values()) > 0
    assert set(result.peaks) == set(own)
    pictures = {path.name for path in (tmp_path / "run" / "plots").iterdir()}
    assert pictures == {"loss.png", "memory.png", "tiles.png", "timeline.png", "utilisation.png"}
    log = result.logs[own[1]]
    log.sent_kinds["halo"] += 8
    told = result.traffic.differences(result.logs, result.plan)
    assert len(told) == 2  # and so many fewer bytes in reductions
    assert told[0].startswith(f"{own[1]} sent {log.sent_kinds['halo']} bytes as 'halo' in 3 rounds")
