"""`manyhands bench auto`: what is drawn, what counts as a gain, what is said when a part cannot be measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, OutOfMemory, UnknownName
from manyhands.facts.profile import estimate_cluster
from manyhands.planner.strategies import CORNERS
from manyhands.plans.networks import load_network
from manyhands_bench.auto import bench as whole
from manyhands_bench.auto import lab, memory
from manyhands_bench.auto.bench import PARTS, bench_auto
from manyhands_bench.auto.lab import MIXED, TRIALS, LabTask, PlanComparison, worth_measuring
from manyhands_bench.auto.plots import Gain, Sides, draw_gains, draw_sides
from manyhands_bench.auto.scale import joined_layers, unequal
from manyhands_bench.auto.scenarios import (
    BATCHES,
    COUNT,
    DEVICES,
    LINKS,
    RATES_MBIT,
    SUBJECTS,
    PlanningScenario,
    drawn_scenarios,
)
from manyhands_bench.auto.simulated import ScenarioResult, bench_simulated, figures_of
from manyhands_bench.command import app
from manyhands_bench.figures import Figures
from manyhands_bench.parts import failed


def answer(corners: tuple[float, float, float, float], seconds: float, mixed: bool, number: int = 0) -> ScenarioResult:
    return ScenarioResult(
        number, "a network", dict(zip(CORNERS, corners)), seconds, mixed, "tiles x2 | single x1", 1.0, 2.0
    )


# Scenarios


def test_scenarios_are_always_the_same_and_another_seed_draws_others() -> None:
    assert drawn_scenarios() == drawn_scenarios()
    assert list(map(str, drawn_scenarios(seed=1))) != list(map(str, drawn_scenarios()))


def test_scenarios_cover_every_network_batch_rate_and_size_of_cluster() -> None:
    found = drawn_scenarios()
    assert len(found) == COUNT >= 60
    assert {(one.model, one.shape) for one in found} == set(SUBJECTS)
    assert {one.batch_size for one in found} == set(BATCHES)
    assert (min(BATCHES), max(BATCHES)) == (1, 256)
    assert {one.rate_mbit for one in found} == set(RATES_MBIT)
    assert {len(one.cluster.devices) for one in found} == set(DEVICES)
    assert {one.links for one in found} == set(LINKS)
    assert all(len({device.gflops for device in one.cluster.devices}) > 1 for one in found), "devices are unequal"


def test_links_differ_where_they_are_drawn_so_and_none_is_slower_than_the_slowest_rate() -> None:
    for one in drawn_scenarios():
        rates = [link.link.bytes_per_second for link in one.cluster.links]
        assert bool(rates) == (one.links != "alike")
        assert all(rate >= RATES_MBIT[0] * 1e6 / 8 for rate in rates)
        if rates and one.rate_mbit > RATES_MBIT[0]:
            assert min(rates) < one.cluster.link.bytes_per_second


def test_two_small_scenarios_are_answered_and_auto_is_never_behind_a_corner() -> None:
    devices = [{"name": "a", "kind": "pi4"}, {"name": "b", "kind": "pi5"}]
    link = {"rate": "1000 Mbit/s", "delay": "0.3 ms"}
    cluster = Cluster.from_dict({"name": "two", "devices": devices, "link": link})
    tiny = [
        PlanningScenario(n, "tiny", (1, 16, 16), cluster, 1000, 1.0, "alike", size) for n, size in enumerate((1, 8))
    ]
    figures, found = bench_simulated(tiny, lambda text: None, at_once=1)
    assert figures["profile_machine"] == "estimated from the device catalogue"
    assert [one.number for one in found] == [0, 1]
    assert figures["count"] == figures["count_compared"] == 2
    assert all(one.gain >= 1 - 1e-9 for one in found)
    assert all(set(one.corners) == set(CORNERS) for one in found)
    assert found[0].corners["samples"] == math.inf, "one sample cannot be shared"
    assert "batch 8 on 1 pi4, 1 pi5" in str(figures["scenarios"])


# What counts


def test_gains_are_over_the_best_corner_and_what_does_not_fit_is_counted_apart() -> None:
    nothing = math.inf
    found = [
        answer((4.0, 2.0, 3.0, nothing), 1.0, True),
        answer((1.0, 2.0, 3.0, 4.0), 1.0, False),
        answer((nothing,) * 4, 5.0, True),
        answer((nothing,) * 4, nothing, False),
    ]
    figures = figures_of(found, 8.0)
    assert figures["mixed_share"] == pytest.approx(2 / 3), "of three in which anything fits"
    assert figures["gain_geomean"] == pytest.approx(math.sqrt(2.0))
    assert figures["gain_geomean_mixed"] == pytest.approx(2.0)
    assert (figures["gain_min"], figures["gain_max"]) == (1.0, 2.0)
    assert (figures["count"], figures["count_compared"]) == (4, 2)
    assert (figures["count_nothing_fits"], figures["count_only_mixed_fits"]) == (1, 1)
    assert (figures["wins_mixed"], figures["wins_single"], figures["wins_other"]) == (2, 1, 0)
    assert figures["scenario_seconds"] == 2.0


def test_a_mixed_plan_as_fast_as_a_corner_has_not_won_and_one_behind_is_seen() -> None:
    same = figures_of([answer((1.0, 2.0, 3.0, 4.0), 1.0, True)], 1.0)
    assert (same["mixed_share"], same["wins_single"]) == (0.0, 1)
    behind = figures_of([answer((1.0, 2.0, 3.0, 4.0), 1.25, False)], 1.0)
    assert behind["gain_min"] == 0.8


def test_corners_far_from_the_best_are_not_measured() -> None:
    predicted = {MIXED: 1.0, "single": 3.0, "samples": 3.1, "pipeline": 1.5, "tiles": 2.0}
    assert worth_measuring(predicted) == [MIXED, "pipeline", "tiles"]
    assert worth_measuring({MIXED: 1.0, "single": 3.8, "tiles": 1.5}) == [MIXED, "tiles"]


def test_the_corner_to_beat_is_the_fastest_as_measured() -> None:
    predicted = {MIXED: 1.0, "tiles": 2.0, "single": 2.2}
    blocks = {MIXED: [1.0, 2.0, 1.25], "tiles": [3.0], "single": [2.0, 3.0, 2.5]}
    one = PlanComparison(TRIALS[0], 1.0, False, {}, predicted, blocks)
    assert one.best_corner == "single"
    assert one.gain == 2.0, "the median of ratios, block by block"
    assert one.predicted_gain == 2.2
    assert one.error(MIXED) == pytest.approx(0.2)


# Parts


def test_a_network_of_joined_layers_is_the_same_network() -> None:
    network = load_network("tiny", None, "operators")
    joined = joined_layers(network, 4)
    assert len(joined.layers) == 4 < len(network.layers)
    assert joined.layers[0].first == 0
    assert joined.layers[-1].last == len(network.ops)
    assert joined.layers[-1].outputs == network.outputs
    for field in ("macs", "parameter_bytes", "saved_bytes"):
        assert sum(getattr(one, field) for one in joined.layers) == sum(getattr(one, field) for one in network.layers)
    cluster = unequal(3)
    times = [estimate_cluster(one, cluster).of("d1").layer_seconds for one in (network, joined)]
    counts = len(network.layers), 4
    whole_step, joined_step = (sum(sum(time(i, 4)) for i in range(n)) for time, n in zip(times, counts))
    assert joined_step == pytest.approx(whole_step)


def test_the_unequal_cluster_is_unequal() -> None:
    cluster = unequal(16)
    assert len({(device.gflops, device.memory_bytes) for device in cluster.devices}) > 12


def test_the_lab_has_three_trials_of_unequal_or_equal_devices_the_catalogue_knows() -> None:
    assert len(TRIALS) >= 3
    assert len(set(map(str, TRIALS))) == len(TRIALS)
    for trial in TRIALS:
        assert trial.cluster("x").names == tuple(f"d{place}" for place in range(1, len(trial.kinds) + 1))


def test_a_trial_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(trial: LabTask, name: str, extent: object, say: object) -> PlanComparison:
        if trial is TRIALS[0]:
            raise OutOfMemory("d1 is full.")
        return PlanComparison(trial, 2.0, False, {}, {MIXED: 1.0, "tiles": 1.5}, {MIXED: [1.0], "tiles": [1.4]})

    monkeypatch.setattr(lab, "_compared", compared)
    monkeypatch.setattr(lab, "_text", lambda one: "told")
    figures, found = lab.bench_lab(lab.AutoLabExtent(), lambda text: None)
    assert len(found) == len(TRIALS) - 1
    assert figures["lab_gain_min"] == pytest.approx(1.4)
    assert "d1 is full." in str(figures["lab_1_failed"])
    assert failed(figures) == ["lab_1_failed"]


def test_without_a_lab_segmentation_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "missing", lambda: "you are not root.")
    assert "not root" in str(memory.bench_memory(memory.MemoryExtent(), lambda text: None)["unet_skipped"])


def test_parts_that_fail_are_told_and_figures_are_flat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(bench: object) -> Figures:
        raise OutOfMemory("full.")

    parts = {"simulated": lambda bench: {"gain_min": 1.0, "text": "words"}, "lab": broken}
    monkeypatch.setattr(whole, "PARTS", parts)
    figures = bench_auto(out=tmp_path)
    assert (figures["gain_min"], figures["lab_failed"]) == (1.0, "full.")
    assert json.loads((tmp_path / "figures.json").read_text())["gain_min"] == 1.0
    told = CliRunner().invoke(app, ["auto", "--json", "--out", str(tmp_path), "--only", "simulated"])
    assert told.exit_code == 0, told.output
    printed = json.loads(told.stdout)
    assert printed["gain_min"] == 1.0
    assert all(isinstance(value, (int, float)) for value in printed.values())
    assert CliRunner().invoke(app, ["auto", "--json", "--out", str(tmp_path)]).exit_code == 1


def test_unknown_parts_and_both_lengths_are_refused() -> None:
    with pytest.raises(UnknownName, match="nonsense"):
        bench_auto(only=["nonsense"])
    with pytest.raises(BadValue, match="--quick and --full"):
        bench_auto(quick=True, full=True)
    assert set(PARTS) == {"simulated", "scale", "lab", "segmentation"}


def test_pictures_are_drawn(tmp_path: Path) -> None:
    gains = [Gain("a", "mixed", 1.4), Gain("b", "single", 1.0), Gain("c", "mixed", None)]
    assert draw_gains(gains, tmp_path / "gains.png", "gains").stat().st_size > 5_000
    sides = [Sides("a net on b", {"mixed": 1.0, "tiles": 1.5}, {"mixed": 0.9, "tiles": 1.4})] * 3
    assert draw_sides(sides, tmp_path / "lab.png", "lab").stat().st_size > 5_000
