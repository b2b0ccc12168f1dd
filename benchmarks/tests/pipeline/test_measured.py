"""Our pipelines beside PyTorch's: figures, predictions, the lab."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from manyhands.facts.plan import Plan, Stage
from manyhands.lab.removal import labs
from manyhands.profiler.kernels import Choice
from manyhands_bench.pipeline import measured as bench
from manyhands_bench.pipeline.measured import summary

pytestmark = pytest.mark.xdist_group("bench_pipeline")


def quiet(text: str) -> None:
    """No progress."""


def two_stages(micro_batches: int) -> Plan:
    return Plan("any", 8, (Stage((0, 1), ("a",)), Stage((1, 2), ("b",))), micro_batches=micro_batches)


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


def test_no_lab_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "missing", lambda: "no root")
    assert bench.bench_lab(quiet, True) == {"lab_skipped": "no root"}


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
