"""What `manyhands bench pipeline` measures, in small: every side runs, rivals that die are named, nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn

from manyhands.facts.errors import BadValue, ManyhandsError
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.lab.lab import labs
from manyhands.models.registry import build, example_batch
from manyhands.profiler.kernels import Choice
from manyhands_bench.pipeline import measured as bench
from manyhands_bench.pipeline.measured import summary
from manyhands_bench.pipeline.ours import plan_text
from manyhands_bench.pipeline.overhead import critical_path
from manyhands_bench.pipeline.torch_group import TorchGroup
from manyhands_bench.pipeline.torch_pipeline import units_of
from manyhands_bench.pipeline.torch_setting import BareRound, TorchSetting, TorchVariant
from manyhands_bench.pipeline.torch_tuning import shared_out, splits

pytestmark = pytest.mark.xdist_group("bench_pipeline")

TINY = TorchSetting("mobilenetv2", (3, 64, 64), 4, 2)
UNITS = 34


def quiet(text: str) -> None:
    """No progress."""


def two_stages(micro_batches: int) -> Plan:
    return Plan("any", 8, (Stage((0, 1), ("a",)), Stage((1, 2), ("b",))), micro_batches=micro_batches)


def alike(micro_batches: int, *stages: tuple[float, float, float]) -> list[BareRound]:
    """Stages whose micro-batches take equally long."""
    return [BareRound([one] * micro_batches, [back] * micro_batches, step) for one, back, step in stages]


# Pure


def test_the_critical_path_of_two_equal_stages() -> None:
    """M+1 forward passes and M+1 backward passes, as drawn in the papers; and the step."""
    assert critical_path(two_stages(4), alike(4, (1.0, 1.0, 0.5), (1.0, 1.0, 0.25))) == pytest.approx(10.5)


def test_the_critical_path_waits_for_the_slower_stage() -> None:
    assert critical_path(two_stages(4), alike(4, (1.0, 2.0, 0.0), (0.0, 0.0, 0.0))) == pytest.approx(12.0)
    assert critical_path(two_stages(4), alike(4, (1.0, 2.0, 0.0), (10.0, 20.0, 0.0))) == pytest.approx(1 + 4 * 30 + 2)


def test_one_micro_batch_goes_there_and_back() -> None:
    assert critical_path(two_stages(1), alike(1, (1.0, 2.0, 0.1), (3.0, 4.0, 0.2))) == pytest.approx(10.1)


def test_what_holds_up_one_pass_holds_up_the_round() -> None:
    stages = alike(4, (1.0, 1.0, 0.0), (1.0, 1.0, 0.0))
    stages[1].backward[2] += 5.0
    assert critical_path(two_stages(4), stages) == pytest.approx(15.0)


def test_splits_follow_speeds() -> None:
    units = [(1.0, 1)] * 12
    assert splits(units, (1.0, 1.0), float("inf"), 1) == [(0, 6, 12)]
    assert splits(units, (3.0, 2.0, 1.0), float("inf"), 1) == [(0, 6, 10, 12)]
    assert splits(units, (1.0, 1.0), float("inf"), 3)[1:] == [(0, 5, 12), (0, 7, 12)]


def test_splits_avoid_slow_cuts() -> None:
    units = [(1.0, 1), (1.0, 1000), (1.0, 1), (1.0, 1)]
    assert splits(units, (1.0, 1.0), 100.0, 1) == [(0, 1, 4)]


def test_samples_are_shared_out() -> None:
    assert shared_out(16, (0.6, 0.4, 0.25)) == (8, 5, 3)
    assert shared_out(16, (1.0, 1.0, 1.0)) == (6, 5, 5)
    assert shared_out(3, (100.0, 1.0, 1.0)) == (1, 1, 1)


def test_summary_takes_the_worse() -> None:
    figures: bench.Figures = {
        "measured_vs_best_torch_local": 1.2, "measured_vs_best_torch_lab": 1.1,
        "pipeline_sim_error_local": 0.1, "pipeline_sim_error_lab": 0.05,
    }  # fmt: skip
    assert summary(figures) == {"measured_vs_best_torch": 1.1, "sim_error": 0.1}
    assert summary({"measured_vs_best_torch_local": 1.2, "lab_skipped": "why"}) == {"measured_vs_best_torch": 1.2}


def test_a_prediction_is_compared_with_the_blocks_that_follow_it() -> None:
    plan = two_stages(4)
    compared = bench.TorchComparison(plan, [(plan, 0.1)], plan, bench.Tuned({}, {}), Choice())
    compared.ours = [1.0, 1.0, 1.0, 2.0, 2.2, 1.8, 1.0]
    compared.predictions = {0: 1.1, 3: 2.2, 6: 5.0}
    assert compared.prediction_error == pytest.approx(0.1)


def test_plans_in_one_line() -> None:
    stages = Stage((0, 3), ("a", "b"), BySamples((2, 1))), Stage((3, 5), ("c",))
    text = plan_text(Plan("any", 6, stages, micro_batches=2))
    assert text == "[0, 3) on a+b (2+1) | [3, 5) on c; 2 micro-batches, 1f1b"


def test_units_are_the_network() -> None:
    """In evaluation, where dropout does nothing."""
    torch.manual_seed(0)
    module = build("mobilenetv2").eval()
    units = units_of(module)
    batch = example_batch("mobilenetv2", 2, input_shape=TINY.shape)
    assert len(units) == UNITS
    with torch.no_grad():
        torch.testing.assert_close(nn.Sequential(*units)(batch), module(batch), rtol=0, atol=0)


def test_other_networks_cannot_be_cut_by_hand() -> None:
    with pytest.raises(BadValue, match="Linear cannot be cut"):
        units_of(nn.Linear(1, 1))


def test_no_lab_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "missing", lambda: "no root")
    assert bench.bench_lab(quiet, True) == {"lab_skipped": "no root"}


# Processes


@pytest.mark.slow
def test_torch_runs_every_way_and_is_named_when_it_dies() -> None:
    pipelines = [TorchVariant("1f1b", (0, 1), (0, 20, UNITS), 2), TorchVariant("gpipe", (0, 1), (0, 9, UNITS), 2)]
    ways = [TorchVariant("ddp", (0, 1), shares=(3, 1)), *pipelines]
    ways += [replace(way, channels_last=True) for way in ways]
    with TorchGroup(TINY, [(), ()], cores=sorted(os.sched_getaffinity(0))[:1] * 2) as group:
        for way in ways:
            seconds = group.run(way, 2)
            assert len(seconds) == 2, way
            assert min(seconds) > 0
        units = group.units(2)
        assert len(units) == UNITS
        assert all(taken > 0 and size > 0 for taken, size in units)
        bare = group.bare((0, 20, UNITS), 2, 0.01)
        assert len(bare) == 2
        for one in (one for stage in bare for one in stage):
            assert len(one.forward) == len(one.backward) == TINY.micro_batches
            assert min(*one.forward, *one.backward, one.step) > 0
        processes = group.processes
        processes[1].send_signal(signal.SIGKILL)
        with pytest.raises(ManyhandsError, match=r"Torch rank [01] (ended|could not)"):
            group.run(pipelines[0], 1)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_torch_says_what_it_cannot_do() -> None:
    setting = TorchSetting("mobilenetv2", (3, 64, 64), 4, 1)
    with (
        TorchGroup(setting, [()]) as group,
        pytest.raises(ManyhandsError, match=r"Torch rank 0 could not run Schedule1F1B.*: \w+: "),
    ):
        group.run(TorchVariant("1f1b", (0,), (0, 0), 1), 1)  # a stage of nothing


@pytest.mark.slow
def test_torch_that_does_not_start_is_named() -> None:
    with pytest.raises(ManyhandsError, match="Torch rank 0 ended"):
        TorchGroup(TorchSetting("nothing", (3, 64, 64), 4, 1), [()])


@pytest.mark.slow
def test_local_figures() -> None:
    figures = bench.bench_local(quiet, True)
    for key in ("measured_vs_best_torch_local", "ours_local_seconds", "torch_ddp_local_seconds"):
        assert float(figures[key]) > 0, key
    for kind in ("1f1b", "gpipe"):
        assert float(figures[f"torch_{kind}_local_seconds"]) > 0
        assert "stages cut at" in str(figures[f"torch_{kind}_local_setting"])
    assert float(figures["pipeline_sim_error_local"]) >= 0
    assert "micro-batches" in str(figures["ours_local_setting"])


@pytest.mark.slow
def test_overhead_figures() -> None:
    figures = bench.executor_overhead(quiet, True)
    assert float(figures["executor_round_seconds"]) > 0
    assert float(figures["executor_bare_seconds"]) > 0
    assert 0.3 < float(figures["executor_overhead"]) < 5  # other work on this machine moves it


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="a lab needs root and iproute2")
@pytest.mark.xdist_group("lab")
def test_lab_figures_and_nothing_left() -> None:
    figures = bench.bench_lab(quiet, True)
    if "lab_skipped" not in figures:
        assert float(figures["measured_vs_best_torch_lab"]) > 0
        assert "60%/40%/25% of a core" in str(figures["setting_lab"])
    own = f"pipeline{os.getpid()}"
    assert own not in labs()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30).stdout
    assert own not in listed
