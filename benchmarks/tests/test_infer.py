"""`manyhands bench infer`: what is compared with what, what is simulated, what is said when a part cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hand_made import even_profile
from manyhands.executor.log import DeviceLog, MeasuredSpan
from manyhands.facts.errors import BadPlan, BadValue, Refused, UnknownName
from manyhands.facts.presets import preset
from manyhands.facts.reads import Dealt
from manyhands.plans.inference import plan_for, sample_seconds
from manyhands_bench.command import app
from manyhands_bench.everything import this_host
from manyhands_bench.infer import bench as whole
from manyhands_bench.infer import lab
from manyhands_bench.infer.accuracy import Accuracy, DecoupledVariant
from manyhands_bench.infer.bench import PARTS, bench_infer, scope_of
from manyhands_bench.infer.drawn import draw_lab, draw_memory, draw_scores, draw_simulated
from manyhands_bench.infer.lab import InferLabExtent, MeasuredMethod, bench_lab, lab_figures, lab_of
from manyhands_bench.infer.networks import GROUPS, RESNET50, DecnnNetwork, Library, ProfiledNetwork, half_graph
from manyhands_bench.infer.simulated import (
    ALL,
    ALONE,
    BOTH,
    COATES,
    METHODS,
    MODNN_DECOUPLED,
    ONE,
    PAIRS,
    SCALING,
    TILED,
    WEAK,
    Case,
    MethodSeconds,
    Simulated,
    ahead_of,
    bench_simulated,
    devices_of,
)
from manyhands_bench.infer.site import WARM_UPS, Ran, interleaved
from manyhands_bench.infer.sync import bench_sync
from manyhands_bench.parts import KEPT, failed

TINY = DecnnNetwork("tiny", 1.5, (1, 16, 16), paper_seconds=0.3)
SLOW = {ONE: MethodSeconds(1.0, 1.0), ALONE: MethodSeconds(0.5, 0.5)}
"""One device, which is no rival."""


def methods(rival: float, both: float, every: float) -> dict[str, MethodSeconds]:
    """Rivals as fast as told, one of them a little faster than the others."""
    tiled = {name: MethodSeconds(rival + 0.1, rival + 0.2) for name in TILED}
    return {
        **SLOW,
        **tiled,
        COATES: MethodSeconds(rival, rival),
        BOTH: MethodSeconds(both, both),
        ALL: MethodSeconds(2 * every, every),
    }


class HandMade(Library):
    """Networks that are captured but not measured: every layer takes a hundredth of a second."""

    def known(self, subject: DecnnNetwork, *, decoupled: bool) -> ProfiledNetwork:
        network = self.graph(subject, decoupled=decoupled).network
        return ProfiledNetwork(network, even_profile(network, ["one"]).of("one"))


@pytest.fixture(scope="module")
def library() -> Library:
    return HandMade(0.01, lambda text: None)


# What is compared


def test_ours_is_compared_with_the_best_rival() -> None:
    own = methods(rival=0.3, both=0.2, every=0.1)
    assert ahead_of(own) == pytest.approx((1.5, 3.0))
    own[MODNN_DECOUPLED] = MethodSeconds(0.1, 0.05)
    assert ahead_of(own) == pytest.approx((0.5, 0.5))
    assert ahead_of(own, (ONE,)) == pytest.approx((5.0, 10.0))


def test_a_stream_is_timed_after_it_has_warmed_up() -> None:
    turns, at_once = WARM_UPS + 3, WARM_UPS + 4
    ran = Ran(turns)
    for number in range(turns):
        ran.asked.append(float(number))
        ran.answered.append(number + (9.0 if number < WARM_UPS else 0.2 + 0.1 * (number - WARM_UPS)))
    begin = ran.answered[-1]
    gaps = [3.0] * WARM_UPS + [0.5, 0.5, 0.5, 0.5]
    ran.answered += [begin + sum(gaps[: number + 1]) for number in range(at_once)]
    assert ran.latency == pytest.approx(0.3)
    assert ran.interval == pytest.approx(0.5)


def test_answers_of_a_batch_count_once() -> None:
    """The first batch has what was there when it began, the last what was left: neither is counted."""
    batches = [(1.0, 3), (2.0, 8), (3.0, 8), (4.0, 8), (5.0, 5)]
    told = [moment + 1e-4 * number for moment, count in batches for number in range(count)]
    assert Ran(0, answered=told).interval == pytest.approx(3 / 24)
    assert Ran(0, answered=told[:19]).interval == pytest.approx(2 / 16)


def test_a_sample_is_inside_from_the_first_device_to_the_last() -> None:
    def span(device: str, start: float, end: float, step: int, kind: str = "forward") -> MeasuredSpan:
        return MeasuredSpan(device, "compute", start, end, kind, "", step)

    one = DeviceLog("a", peak_bytes=5, spans=[span("a", 1, 2, 7), span("a", 0, 9, 7, "send"), span("a", 11, 12, 8)])
    two = DeviceLog("b", peak_bytes=8, spans=[span("b", 1.5, 4, 7), span("b", 10, 14, 8)])
    ran = Ran(2, logs={"a": one, "b": two})
    assert ran.inside == pytest.approx(3.5)
    assert ran.peak_bytes == 8


def measured(seconds: float, predicted: float, latency: float | None = None) -> MeasuredMethod:
    inside = seconds if latency is None else latency
    return MeasuredMethod(MethodSeconds(predicted, predicted), inside, seconds + 0.01, seconds)


def test_the_lab_says_how_far_off_the_simulation_was() -> None:
    own = {name: measured(0.4, 0.4) for name in TILED}
    own |= {BOTH: measured(0.2, 0.25), ALL: measured(0.1, 0.2, math.nan)}
    figures = lab_figures({"240_20": own})
    assert figures["lab_worst_vs_rivals"] == pytest.approx(2.0)
    assert figures["lab_vs_rivals_throughput_240_20"] == pytest.approx(4.0)
    assert figures["lab_scheme3_gain_240_20"] == pytest.approx(2.0)
    # eight of the rivals, two of schemes 1+2, one of all: a latency that was not measured is none
    assert figures["lab_sim_error_worst"] == pytest.approx(0.5)
    assert figures["lab_sim_error"] == pytest.approx(0.0)
    assert own[ALL].errors == pytest.approx([0.5])


def test_devices_of_the_lab_are_as_fast_as_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        gflops = 40.0

    monkeypatch.setattr(lab, "this_machine", lambda threads: Core)
    subject = replace(RESNET50, paper_seconds=2.0)
    asked = lab_of("240_20", 0.2, subject, "x")
    assert [device.gflops for device in asked.cluster.devices] == pytest.approx([4.0] * GROUPS)
    assert asked.cluster.link == preset("decnn-240-20").link
    assert asked.scale == pytest.approx(lab.SCALE)
    slower = lab_of("240_20", 1.0, subject, "x")
    assert slower.scale == pytest.approx(0.5 / lab.LARGEST_SHARE)


# What is simulated


def test_a_network_on_a_slower_machine(library: Library) -> None:
    known = library.profiled(TINY, decoupled=False)
    assert known.scaled(3.0).seconds == pytest.approx(3 * known.seconds)
    cluster = devices_of(SCALING)
    profile = known.scaled(3.0).on(cluster)
    single = plan_for(known.network, cluster, profile, strategy="single").plan
    assert sample_seconds(single, known.network, cluster, profile) == pytest.approx(3 * known.seconds)


def test_methods_over_a_weak_link(library: Library) -> None:
    original, decoupled = (library.profiled(TINY, decoupled=one) for one in (False, True))
    cluster = devices_of(WEAK)
    found = Case(cluster, original, decoupled, streams=1).methods()
    assert set(found) == set(METHODS)
    assert found[ONE].latency == pytest.approx(original.seconds)
    assert found[ALONE].interval == pytest.approx(decoupled.seconds)
    plan = plan_for(decoupled.network, cluster, decoupled.on(cluster), strategy="channels").plan
    assert found[BOTH].latency == pytest.approx(sample_seconds(plan, decoupled.network, cluster, decoupled.on(cluster)))
    assert found[ALL].interval < found[BOTH].interval
    assert found[ALL].latency >= found[BOTH].latency - 1e-9
    assert len(devices_of(SCALING, 2).names) == 2


def test_figures_of_what_was_simulated(library: Library, tmp_path: Path) -> None:
    figures, found = bench_simulated(library, [TINY], TINY, (WEAK,), 1, lambda text: None)
    assert figures["profile_machine"] == this_host().slug
    assert figures["slower_factor"] == pytest.approx(0.3 / library.profiled(TINY, decoupled=False).seconds)
    rows = found.tables["tiny"]
    assert rows[WEAK][ONE].latency == pytest.approx(0.3)
    worst = min(min(ahead_of(own)) for own in rows.values())
    assert figures["worst_vs_rivals"] == pytest.approx(worst)
    assert figures["worst_vs_one_device"] == pytest.approx(min(min(ahead_of(own, (ONE,))) for own in rows.values()))
    assert figures["scheme3_gain"] == pytest.approx(rows[WEAK][BOTH].interval / rows[WEAK][ALL].interval)
    assert [path.name for path in draw_simulated(found, tmp_path)] == ["fig_8_tiny.png"]


def test_channels_wait_for_each_other_at_shuffles_only(library: Library) -> None:
    figures = bench_sync(library, TINY, lambda text: None)
    shuffles = sum(op.channels == "shuffle" for op in library.graph(TINY, decoupled=True).network.ops)
    assert figures["sync_points_channels"] == shuffles > 0
    assert figures["messages_channels"] == shuffles * GROUPS * (GROUPS - 1)
    assert figures["sync_points_channels_with_classifier"] > figures["sync_points_channels"]  # type: ignore[operator]
    assert figures["sync_points_1d"] == figures["sync_points_2d"]
    assert figures["messages_2d"] == 2 * figures["messages_1d"]  # type: ignore[operator]


def test_the_drawn_networks_answer_with_numbers(library: Library) -> None:
    graph = library.graph(TINY, decoupled=True)
    assert all(bool(torch.isfinite(value).all()) for value in graph.state.values())
    plan = plan_for(graph.network, devices_of(SCALING), strategy="channels").plan
    both = interleaved(plan, 8)
    assert (both.order, both.steps_per_round, both.micro_batch_size) == ("interleave", 8, plan.micro_batch_size)


# Parts


def test_a_bare_half_is_half_of_the_network_and_exchanges_nothing(library: Library) -> None:
    subject = DecnnNetwork("resnet18", 1.5, (3, 64, 64))
    whole, half = library.graph(subject, decoupled=True).network, half_graph(subject).network
    convolutions = [[op.macs for op in network.ops if "conv" in op.target] for network in (whole, half)]
    assert sorted(convolutions[0]) == sorted(2 * macs for macs in convolutions[1])
    assert any(isinstance(rule, Dealt) for op in whole.ops for read in op.reads for rule in read.rules)
    assert not any(isinstance(rule, Dealt) for op in half.ops for read in op.reads for rule in read.rules)


def test_what_cannot_be_asked_for_is_refused() -> None:
    with pytest.raises(UnknownName, match="synk"):
        bench_infer(only=["synk"])
    with pytest.raises(BadValue, match="--full"):
        bench_infer(quick=True, full=True)
    with pytest.raises(BadValue, match="'tpu'") as error:
        bench_infer(compute="tpu")
    with pytest.raises(Refused, match="cuda:99 was asked for"):
        bench_infer(compute="cuda:99")
    assert "cpu, cuda" in error.value.hint
    assert set(scope_of(False, False, "cpu").pairs) == set(PAIRS)
    assert scope_of(False, True, "cuda").accuracy.compute == "cuda"


def test_where_there_can_be_no_lab_that_is_said(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(lab, "missing", lambda: "only root may do that")
    assert bench_lab(library, TINY, InferLabExtent((SCALING,), 3, 3, 0.1), lambda text: None) == (
        {"lab_skipped": "only root may do that"}, {},
    )  # fmt: skip


def test_without_pictures_nothing_is_trained(tmp_path: Path) -> None:
    figures = bench_infer(quick=True, only=["accuracy"], pictures=tmp_path / "none.npz", out=tmp_path)
    assert "--pictures" in str(figures["accuracy_setting"])
    assert not failed(figures)


def test_a_part_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(bench: whole.InferBench) -> Mapping[str, str]:
        raise BadPlan("It does not fit.", hint="Take fewer.")

    monkeypatch.setattr(whole, "PARTS", {**PARTS, "sync": broken, "memory": lambda bench: {"memory_reduction_4": 0.7}})
    words = ["infer", "--quick", "--json", "--only", "sync", "--only", "memory", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "sync_failed: It does not fit. Take fewer." in result.stderr
    assert json.loads(result.stdout)["memory_reduction_4"] == 0.7
    assert json.loads((tmp_path / KEPT).read_text())["memory_reduction_4"] == 0.7


# Pictures


def test_pictures_are_drawn(tmp_path: Path) -> None:
    tables = {"net": {pair: methods(0.3, 0.2, 0.1) for pair in PAIRS}}
    found = Simulated(tables, {"net": methods(0.5, 0.4, 0.3)}, {}, 7.0)  # type: ignore[arg-type]
    own = {name: measured(0.4, 0.5) for name in TILED} | {BOTH: measured(0.2, 0.2), ALL: measured(0.1, 0.2, math.nan)}
    ways = (
        DecoupledVariant(),
        *(DecoupledVariant(widen, shuffles) for widen in (1.0, 1.5) for shuffles in (0, 3, "all")),
    )
    rows = {str(way): [0.8 + 0.01 * place, 0.82] for place, way in enumerate(ways)}
    drawn = [
        *draw_simulated(found, tmp_path),
        draw_memory({name: 10**6 * place for place, name in enumerate(METHODS, 1)}, "net", tmp_path),
        draw_lab({"880_0.15": own, "240_20": own}, "net", tmp_path),
        draw_scores(rows, Accuracy(ways=ways, seeds=2), tmp_path),
    ]
    assert [path.name for path in drawn] == ["fig_8_net.png", "fig_10.png", "fig_12.png", "lab.png", "accuracy.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


# With workers


@pytest.mark.slow
def test_the_command_measures_every_figure(tmp_path: Path) -> None:
    parts = ("sync", "simulated", "speedup", "memory")
    words = [word for part in parts for word in ("--only", part)]
    result = CliRunner().invoke(app, ["infer", "--quick", "--json", "--out", str(tmp_path), *words])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    for key in (
        "worst_vs_rivals",
        "scheme3_gain",
        "speedup_2",
        "limit_2",
        "speedup_2_latency",
        "limit_2_latency",
        "memory_reduction_4",
        "scheme3_memory",
    ):
        assert 0 < figures[key] < 100, key
    assert figures["sync_points_channels"] == 3
    assert figures["memory_reduction_4"] > figures["memory_reduction_4_coates"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["fig_10.png", "fig_12.png", "fig_8_resnet18.png"]
