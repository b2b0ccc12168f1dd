"""One network is examined: everything that goes wrong is a result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands_bench.networks import examine as examining
from manyhands_bench.networks import trained as training
from manyhands_bench.networks.examine import examine, looks_convolutional
from manyhands_bench.networks.outcome import NetworkOutcome
from manyhands_bench.networks.subject import Subject, images
from network_tasks import Attending, Refused, Small


class InFloat32(nn.Module):
    """A network that computes in float32 whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.float())


NETWORKS = {
    "timm:small": lambda: Subject(Small(), images(3, 16, 16)),
    "timm:attending": lambda: Subject(Attending(), images(6)),
    "timm:refused": lambda: Subject(Refused(), images(3, 8, 8)),
    "timm:float32": lambda: Subject(InFloat32(), images(6)),
    "timm:misfit": lambda: Subject(nn.Linear(3, 4), images(5)),
}


@pytest.fixture(autouse=True)
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "subject_named", lambda name: NETWORKS[name]())
    monkeypatch.setattr(training, "trained_subject", lambda name: NETWORKS[name]())


def examined(name: str, folder: Path, is_drawn: bool = False) -> tuple[NetworkOutcome, list[str]]:
    steps: list[str] = []
    outcome = examine(name, "pipeline", folder, lambda outcome: steps.append(outcome.step), is_drawn)
    assert outcome.is_complete
    return outcome, steps


@pytest.mark.slow
def test_a_network_that_can_do_it_all(tmp_path: Path) -> None:
    outcome, steps = examined("timm:small", tmp_path)
    assert steps == ["build", "capture", "forward", "samples", "pipeline", "tiles"]
    assert outcome.problems == []
    assert outcome.captured
    assert outcome.is_convolutional
    assert outcome.forward_difference is not None
    assert outcome.forward_difference <= 1e-12
    assert outcome.shares == {"samples": True, "pipeline": True, "tiles": True}
    assert outcome.tiled_layers is not None
    assert 0 < outcome.tiled_layers < 1, "what follows global pooling is not tiled"
    assert (outcome.trained_by, outcome.trained_difference) == ("", None)


@pytest.mark.slow
def test_ways_of_sharing_that_a_network_does_not_allow(tmp_path: Path) -> None:
    outcome, _ = examined("timm:attending", tmp_path)
    assert not outcome.is_convolutional
    assert not outcome.shares.get("tiles")
    assert not any(problem.is_bare for problem in outcome.problems)


def test_a_network_that_cannot_be_captured(tmp_path: Path) -> None:
    outcome, steps = examined("timm:refused", tmp_path)
    assert steps[-1] == "capture"
    assert not outcome.captured
    assert outcome.is_convolutional, "it contains convolutions and no attention"
    (problem,) = outcome.problems
    assert "network_tasks.py" in problem.text
    assert not problem.is_bare
    assert outcome.shares == {}


def test_a_network_that_does_not_run_in_float64_is_examined_in_its_own_type(tmp_path: Path) -> None:
    outcome, _ = examined("timm:float32", tmp_path)
    assert outcome.not_run == ""
    assert outcome.captured
    assert outcome.forward_difference == 0.0


def test_a_network_that_does_not_run_by_itself(tmp_path: Path) -> None:
    outcome, _ = examined("timm:misfit", tmp_path)
    assert "RuntimeError" in outcome.not_run
    assert outcome.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm:small", "timm:refused"])
def test_a_drawn_network_is_trained(name: str, tmp_path: Path) -> None:
    outcome, steps = examined(name, tmp_path / "run", is_drawn=True)
    assert steps[-1] == "train"
    assert not (tmp_path / "run").exists()
    assert outcome.trained_by == ("pipeline" if name == "timm:small" else "samples")
    if name == "timm:small":
        assert outcome.problems == []
        assert outcome.trained_difference is not None
        assert outcome.trained_difference <= 1e-9
    else:
        assert outcome.trained_difference is None
        assert outcome.problems[-1].step == "train"


def test_convolutional_modules() -> None:
    assert looks_convolutional(Small())
    assert not looks_convolutional(nn.Sequential(nn.Conv2d(3, 4, 1), nn.MultiheadAttention(4, 1)))
    assert not looks_convolutional(nn.Linear(3, 4))
    assert torch.is_tensor(Small()(torch.zeros(2, 3, 8, 8)))
