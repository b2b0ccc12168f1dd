"""The measurement of clipping: what it compares with, and that it would notice."""

from __future__ import annotations

import pytest
import torch

from manyhands_bench.trainer.clipping import CLIP_NORM, by_pytorch, clip_exact, difference, network, pictures


def test_a_difference_is_noticed() -> None:
    weights, norms = by_pytorch(pictures())
    assert max(norms) > CLIP_NORM
    model = network()
    model.load_state_dict(weights)
    assert difference(model, norms, weights, norms) == 0
    assert difference(model, [norms[0] * 1.01, *norms[1:]], weights, norms) == pytest.approx(0.01)
    with torch.no_grad():
        next(model.parameters()).mul_(1.001)
    assert difference(model, norms, weights, norms) == pytest.approx(0.001)


@pytest.mark.slow
def test_every_way_of_sharing_is_exact() -> None:
    found = clip_exact()
    ways = {"clip_samples", "clip_tiles", "clip_pipeline", "clip_mixed", "clip_split"}
    assert set(found) == {*ways, "clip_exact"}
    assert found["clip_exact"] == max(found[way] for way in ways) <= 1e-10
