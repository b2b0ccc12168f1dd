"""PyTorch's units are the network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.facts.errors import BadValue
from manyhands.models.registry import build, example_batch
from manyhands_bench.pipeline.torch_pipeline import units_of
from manyhands_bench.pipeline.torch_setting import TorchSetting

pytestmark = pytest.mark.xdist_group("bench_pipeline")


TINY = TorchSetting("mobilenetv2", (3, 64, 64), 4, 2)


UNITS = 34


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
