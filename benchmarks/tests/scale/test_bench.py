"""The figures of very many devices, on few."""

from __future__ import annotations

import pytest

from manyhands_bench.scale import bench as module
from manyhands_bench.scale.bench import Scale, bench_scale, sites


def test_sites_of_two_kinds() -> None:
    cluster = sites(3, 5)
    assert len(cluster.devices) == 15
    assert {device.site for device in cluster.devices} == {"site-1", "site-2", "site-3"}
    assert {device.kind for device in cluster.devices} == set(module.KINDS)


@pytest.mark.slow
def test_every_figure_of_a_short_run() -> None:
    figures = bench_scale(quick=True, on_progress=lambda text: None)
    assert not [name for name in figures if name.endswith("_failed")]
    for name in ("plan_seconds_40", "simulate_seconds_40", "simulate_seconds_200", "simulated_step_seconds_200"):
        assert float(figures[name]) > 0
    assert float(figures["tiles_4x4_over_4x3_by_host"]) < float(figures["tiles_4x4_over_4x3_flat"])
    assert "% of" in str(figures["limit_40"])


@pytest.mark.slow
def test_a_few_devices_are_simulated() -> None:
    figures = module._largest(Scale(simulated=(2, 3), say=lambda text: None))
    assert figures["simulated_actions_6"]
