"""The studies of TILE chapter 6, simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.facts.plan import BySamples
from manyhands.simulator.simulate import simulate
from manyhands_bench.tile.setup import TiledNetwork
from manyhands_bench.tile.studies import Pis, draw_studies

pytestmark = pytest.mark.xdist_group("bench_tile")


def quiet(text: str) -> None:
    """No progress."""


@pytest.mark.slow
def test_studies_are_drawn(subject: TiledNetwork, tmp_path: Path) -> None:
    figures = draw_studies(subject, tmp_path / "out", True, quiet)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["fig_5_2c.png", "fig_5_2de.png", "fig_6_1.png", "fig_6_3.png", "fig_6_4.png", "fig_6_6.png"]
    assert float(figures["fig_6_1_speedup_2x2_without_weights"]) > 1
    alone, shared = (float(figures[f"fig_6_6_batch_{size}_data_parallel_over_tiles"]) for size in (1, 16))
    assert alone > shared


@pytest.mark.slow
def test_baselines_share_a_batch_by_samples_and_by_layers(subject: TiledNetwork) -> None:
    pis = Pis(subject, 2, 2)
    names = pis.cluster.names
    assert subject.by_samples(names, 2).devices == names[:2]
    assert subject.by_samples(names[:3], 4).stages[0].share == BySamples((2, 1, 1))
    ways = pis.ways(8)
    assert all(plan.devices == names and plan.batch_size == 8 for plan in ways.values())
    assert {name: plan.micro_batches for name, plan in ways.items()} == {
        "tiles": 1, "data parallel": 1, "layer partition": 8,
    }  # fmt: skip


def test_one_sample_keeps_one_core_busy_unless_it_is_cut(subject: TiledNetwork) -> None:
    pis = Pis(subject, 2, 2)
    found = {name: simulate(plan, pis.network, pis.cluster, keep_spans=False) for name, plan in pis.ways(1).items()}
    busy = {name: max(device.busy_seconds for device in one.devices.values()) for name, one in found.items()}
    assert found["data parallel"].seconds == busy["data parallel"] > 2 * busy["tiles"]
    assert found["layer partition"].seconds > 2 * busy["layer partition"]


def test_slots_of_one_device_share_its_port(subject: TiledNetwork) -> None:
    pis = Pis(subject, 2, 2)
    assert [device.host_name for device in pis.cluster.devices] == ["pi3-1", "pi3-1", "pi3-2", "pi3-2"]
