"""Scripts for one device, and what became of them: the same weights, by at most five lines."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from manyhands_bench.trainer.own_loop import lines_changed

pytestmark = pytest.mark.xdist_group("training")

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "port_timm": ("timm",), "port_lora": ("transformers", "peft"), "port_segmentation": (),
    "port_lightning": ("lightning",),
}  # fmt: skip
MOST_LINES = 5


def test_every_port_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("port_*")} == set(NEEDS)


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_it_changes_at_most_five_lines(name: str) -> None:
    before, after = ((EXAMPLES / name / f"{part}.py").read_text() for part in ("before", "after"))
    assert "manyhands" not in before
    assert 0 < lines_changed(before, after) <= MOST_LINES


@pytest.mark.slow
@pytest.mark.quick("port_segmentation")
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_it_ends_with_the_same_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    monkeypatch.setattr("manyhands.session.measuring.MEASURE_SECONDS", 0.1)
    weights = {}
    for part in ("before", "after"):
        text = (EXAMPLES / name / f"{part}.py").read_text()
        shared = text.replace("mh.Cluster.local(2)", 'mh.Cluster.local(2), plan="samples", folder=FOLDER')
        assert (shared != text) == (part == "after"), "both workers are to take part"
        script = tmp_path / f"{part}.py"
        script.write_text(shared)
        monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / f"{part}.pt")])
        runpy.run_path(str(script), {"FOLDER": str(tmp_path / "run")}, run_name="__main__")
        weights[part] = torch.load(tmp_path / f"{part}.pt")
    assert (tmp_path / "run" / "metrics.csv").exists()
    assert weights["after"].keys() == weights["before"].keys()
    for key, tensor in weights["before"].items():
        torch.testing.assert_close(weights["after"][key], tensor, rtol=1e-6, atol=1e-6, msg=key)
