"""Groups, several optimizers and schedules: the figure of the documentation, measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.runtime.coordinator import Coordinator
from manyhands_bench.trainer.groups import WAYS, by_pytorch, difference, groups_exact, muon_and_adamw, no_decay, trained


def test_what_is_compared_differs_between_optimizers() -> None:
    assert difference(by_pytorch(no_decay), by_pytorch(muon_and_adamw)) > 0.01


@pytest.mark.slow
def test_tiles_then_samples_are_exact(tmp_path: Path) -> None:
    with Coordinator.local_cluster(mh.Cluster.local(2), threads=1) as cluster:
        model = trained("mixed", no_decay, cluster, tmp_path)
    assert difference(model, by_pytorch(no_decay)) <= 1e-10


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_groups_are_exact() -> None:
    measured = groups_exact()
    assert set(measured) == {"groups_exact", *(f"groups_{way}" for way in WAYS)}
    assert measured["groups_exact"] == max(measured[f"groups_{way}"] for way in WAYS) <= 1e-10
