"""Groups, several optimizers and schedules: the figure of the documentation, measured."""

from __future__ import annotations

import pytest
import torch

from manyhands_bench.trainer.groups import EXACT, WAYS, by_pytorch, difference, groups_exact, muon_and_adamw, no_decay


def test_what_is_compared_differs_between_optimizers() -> None:
    assert difference(by_pytorch(no_decay), by_pytorch(muon_and_adamw)) > 0.01


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_groups_are_exact() -> None:
    measured = groups_exact()
    assert measured["groups_is_exact"] is True
    assert measured["groups_exact"] == max(measured[f"groups_{way}"] for way in WAYS) <= EXACT
