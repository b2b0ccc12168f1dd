"""Tiles over real processes equal one device, and every tile computed its planned share with the planned bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import manyhands as mh
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.runtime.coordinator import Coordinator
from real_runs import BATCH, LAYERS, Pictures, assert_close, names, network, train, workers

pytestmark = [
    pytest.mark.xdist_group("tiled_processes"),  # its workers are started once
    pytest.mark.usefixtures("strangers"),
]

STEPS = 10


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(3) as coordinator:
        yield coordinator


def tiled(devices: tuple[str, ...], share: ByTiles, **options: Any) -> Plan:
    """The convolutions by tiles, the rest on the second of the devices."""
    stages = (Stage((0, 2), devices, share, **options), Stage((2, LAYERS), devices[1:2], Single()))
    return Plan("Sequential", BATCH, stages, order="sequential")


def mixed(devices: tuple[str, ...]) -> Plan:
    """Tiles, then samples, then one device: the same three devices, two micro-batches."""
    stages = (
        Stage((0, 1), devices, ByTiles((1, 2, 1))),
        Stage((1, 2), devices[:2], BySamples((4, 2))),
        Stage((2, LAYERS), devices[2:], Single()),
    )
    return Plan("Sequential", BATCH, stages, order="sequential", micro_batches=2)


def plan_called(kind: str, devices: tuple[str, ...]) -> Plan:
    plans = {
        "every layer": tiled(devices, ByTiles((2, 1, 1))),
        "one group": tiled(devices, ByTiles((1,), (1, 2, 1), (0,), (0,))),
        "deltas": tiled(devices, ByTiles((1, 1, 1), (1,), None, (0, 1)), reduce="gateway"),
        "interior first": tiled(devices, ByTiles((1, 1, 1), interior_first=(1,))),
        "mixed": mixed(devices),
    }
    return plans[kind]


@pytest.mark.quick("mixed")
@pytest.mark.parametrize(
    "kind",
    [
        "every layer",
        pytest.param("one group", marks=pytest.mark.slow),
        pytest.param("deltas", marks=pytest.mark.slow),
        "interior first",
        "mixed",
    ],
)
def test_tiles_equal_one_device(cluster: Coordinator, tmp_path: Path, kind: str) -> None:
    plan = plan_called(kind, names(cluster))
    ran = train(cluster, plan, tmp_path / "tiles", steps=STEPS)
    ran.assert_as_planned()
    assert all(log.elements > 0 for log in ran.result.logs.values())
    assert all(log.peak_bytes > 0 and log.peak_parts["features"] > 0 for log in ran.result.logs.values())
    assert not ran.result.traffic.differences(ran.result.logs, ran.result.plan)
    one = train(cluster, "single", tmp_path / "single", steps=STEPS, micro_batches=plan.micro_batches)
    assert_close(ran.state, one.state)
    assert ran.result.losses == pytest.approx(one.result.losses, rel=1e-10)


@pytest.mark.slow
def test_float32_stays_close_over_ten_steps(cluster: Coordinator, tmp_path: Path) -> None:
    plan = plan_called("every layer", names(cluster))
    runs = [
        train(cluster, each, tmp_path / name, model=network(dtype=torch.float32),
              data=Pictures(dtype=torch.float32), steps=STEPS)
        for name, each in (("tiles", plan), ("single", "single"))
    ]  # fmt: skip
    assert_close(runs[0].state, runs[1].state, tolerance=1e-4)
    assert runs[0].result.losses == pytest.approx(runs[1].result.losses, rel=1e-4)


@pytest.mark.slow
def test_the_strategy_chooses_grid_groups_and_tail(cluster: Coordinator, tmp_path: Path) -> None:
    ran = train(cluster, "tiles", tmp_path / "tiles", steps=4, test=Pictures(BATCH))
    ran.assert_as_planned()
    share = ran.result.plan.stages[0].share
    assert isinstance(share, ByTiles)
    assert 2 <= len(share.rows) * len(share.columns) <= 3  # as many as the measured times make worth it
    assert len(ran.result.plan.stages) == 2  # flattening cannot be tiled
    one = train(cluster, "single", tmp_path / "single", steps=4, test=Pictures(BATCH))
    assert_close(ran.state, one.state)
    assert ran.result.test is not None
    assert one.result.test is not None
    assert ran.result.test.loss == pytest.approx(one.result.test.loss, rel=1e-10)


class _Maps(Pictures):
    """The target is a map: the loss is computed where the tiles' outputs are gathered."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, _ = super().__getitem__(index)
        return picture, picture.flip(1)


@pytest.mark.slow
def test_tile_plan_fits_any_batch_and_gathers_the_output(cluster: Coordinator, tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 1, 5, padding=2)
        ).double()

    plan = mh.tile_plan(
        mh.capture(model(), torch.zeros(2, 1, 8, 8).double(), name="Sequential"), cluster.cluster(), grid=(3, 1),
        rows=(1, 3, 2), backward_groups=(0,),
    )  # fmt: skip
    runs = [
        train(cluster, each, tmp_path / name, model=model(), data=_Maps(), loss=functional.mse_loss, steps=5)
        for name, each in (("tiles", plan), ("single", "single"))
    ]
    runs[0].assert_as_planned()
    assert runs[0].result.plan.batch_size == BATCH
    assert_close(runs[0].state, runs[1].state)
    assert runs[0].result.losses == pytest.approx(runs[1].result.losses, rel=1e-10)
