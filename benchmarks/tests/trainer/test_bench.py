"""The parts of `manyhands bench trainer`, its keys, and what is said of aims."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from typer.testing import CliRunner

from manyhands.facts.errors import OutOfMemory, UnknownName
from manyhands_bench.claims import CLAIMS
from manyhands_bench.command import app
from manyhands_bench.figures import Figures
from manyhands_bench.trainer import bench as whole
from manyhands_bench.trainer import precision
from manyhands_bench.trainer.bench import DEFAULT, NOT_MEASURED, PARTS, QUICK, TrainerBench, bench_trainer

KEYS = {
    "clip_exact": 1e-10, "groups_exact": 1e-10, "bf16_noise_ratio": 1.5, "bf16_bytes_ratio": 0.52,
    "loader_ratio": 0.95, "first_step_seconds": 10, "lines_changed_max": 5, "loop_overhead": 1.03,
}  # fmt: skip
"""The figures of the command and their aims; bf16_speedup_gpu has none but to be faster."""


def test_every_aim_is_the_one_that_was_set() -> None:
    aims = {claim.key: claim.aim for claim in CLAIMS if claim.bench == "trainer" and claim.aim is not None}
    assert {key: aim.value for key, aim in aims.items() if key in KEYS} == KEYS
    assert {key for key, aim in aims.items() if aim.sign == "≥"} == {"loader_ratio", "bf16_speedup_gpu"}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """In place of the parts: one with figures that meet their aims, miss them, or are not there, and one that fails."""

    def broken(bench: object) -> Figures:
        raise OutOfMemory("full.")

    made: Figures = {
        "clip_exact": 3e-16,
        "loop_overhead": 1.2,
        "bf16_speedup_gpu": NOT_MEASURED,
        "steps": 3,
        "loop_setting": "words",
    }
    monkeypatch.setattr(whole, "PARTS", MappingProxyType({"loop": lambda bench: made, "loader": broken}))
    return made


@pytest.mark.usefixtures("figures")
def test_the_document_has_numbers_and_null_and_the_aims_are_beside_it(tmp_path: Path) -> None:
    words = ["trainer", "--json", "--only", "loop", "--out", str(tmp_path)]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    printed = json.loads(ran.stdout)
    assert printed.pop("seconds_loop") >= 0
    assert printed == {"clip_exact": 3e-16, "loop_overhead": 1.2, "bf16_speedup_gpu": None, "steps": 3, "quick": 0}
    assert json.loads((tmp_path / "figures.json").read_text())["bf16_speedup_gpu"] is None
    said = ran.stderr.splitlines()
    assert "loop_setting: words" in said
    assert any(line.startswith("machine: ") for line in said)
    assert [line for line in said if line.startswith("aim of")] == [
        "aim of clip_exact: ≤ 1e-10: met", "aim of loop_overhead: ≤ 1.03x: not met",
        "aim of bf16_speedup_gpu: ≥ 1x: not measured",
    ]  # fmt: skip


@pytest.mark.usefixtures("figures")
def test_the_table_has_the_aims_and_a_part_that_fails_is_told() -> None:
    ran = CliRunner().invoke(app, ["trainer"])
    assert ran.exit_code == 1
    assert "loader_failed: full." in ran.stderr
    lines = {line.split()[0]: line.strip() for line in ran.stdout.splitlines() if line.split()}
    assert lines["clip_exact"].endswith("≤ 1e-10: met")
    assert lines["loop_overhead"].endswith("≤ 1.03x: not met")
    assert "nan" not in lines["bf16_speedup_gpu"]
    assert lines["bf16_speedup_gpu"].split(maxsplit=1)[1].split("  ")[0] == "not measured"
    assert lines["steps"].split() == ["steps", "3"]


@pytest.mark.usefixtures("figures")
def test_a_quick_look_is_not_judged() -> None:
    ran = CliRunner().invoke(app, ["trainer", "--quick", "--only", "loop"])
    assert ran.exit_code == 0, ran.output
    assert "met" not in ran.stdout.split("figure")[1].replace("not measured", "")


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(UnknownName, match="nonsense"):
        bench_trainer(only=["nonsense"])


def test_the_option_names_every_part() -> None:
    ran = CliRunner().invoke(app, ["trainer", "--help"])
    assert f"Run only this part: {', '.join(PARTS)}. Repeatable." in " ".join(ran.stdout.split())


def test_without_a_gpu_there_is_a_reason_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "bf16_speedup_gpu", lambda: None)
    figures = TrainerBench(QUICK, lambda text: None).gpu()
    assert figures["bf16_speedup_gpu"] is NOT_MEASURED
    assert "needs a GPU" in str(figures["gpu_skipped"])


def test_without_muon_groups_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    figures = TrainerBench(QUICK, lambda text: None).groups()
    assert figures["groups_exact"] is NOT_MEASURED


def test_the_setting_of_the_first_step_is_the_one_of_the_aim() -> None:
    start = DEFAULT.start
    assert (start.model, start.shape, start.batch_size, start.workers) == ("resnet50", (3, 128, 128), 8, 2)
    assert start.profile_seconds is None


@pytest.mark.slow
def test_a_quick_run_gives_every_figure() -> None:
    figures = bench_trainer(quick=True)
    assert not [name for name in figures if name.endswith("_failed")]
    missing = {claim.key for claim in CLAIMS if claim.bench == "trainer"} - set(figures)
    assert not missing
