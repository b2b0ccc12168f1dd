"""The average of weights: PyTorch's AveragedModel, step by step, and what a state must have to go on from it."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from manyhands.executor.averaging import KEY, WeightAverage, check_averaged, divided
from manyhands.facts.errors import BadFile, BadPlan, BadValue
from manyhands.facts.plan import BySamples, Plan, Stage


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_that_of_pytorch_to_the_bit(decay: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 5)).to(dtype)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    weights = dict(model.named_parameters())
    average = WeightAverage(decay, weights)
    for _ in range(5):
        with torch.no_grad():
            for weight in weights.values():
                weight.add_(torch.randn_like(weight))
        expected.update_parameters(model)
        average.update()
    for name, tensor in expected.module.named_parameters():
        assert torch.equal(average.tensors[name], tensor), name


def test_it_goes_on_from_a_state() -> None:
    weights = {"a": nn.Parameter(torch.randn(3)), "b": nn.Parameter(torch.randn(2, 2))}
    first, second = WeightAverage(0.5, weights), WeightAverage(0.5, weights)
    assert first.state() == {}
    first.update()
    own, averages = divided({"a/momentum_buffer": torch.zeros(3), **first.state()})
    assert set(own) == {"a/momentum_buffer"}
    second.load({**averages, "other": torch.zeros(7)})
    for average in (first, second):
        with torch.no_grad():
            weights["a"].fill_(1.0)
        average.update()
    assert all(torch.equal(first.tensors[name], tensor) for name, tensor in second.tensors.items())
    assert set(first.state()) == {"a" + KEY, "b" + KEY}


def test_a_state_that_does_not_fit_is_refused() -> None:
    average = WeightAverage(0.5, {"a": nn.Parameter(torch.randn(3)), "b": nn.Parameter(torch.randn(2))})
    with pytest.raises(BadFile, match="no average of 'b' and 0 more"):
        average.load({"a": torch.zeros(3)})
    with pytest.raises(BadFile, match=r"average of 'a' is torch.float32 \[4\]; its weight is torch.float32 \[3\]"):
        average.load({"a": torch.zeros(4), "b": torch.zeros(2)})
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(BadValue, match="between 0 and 1"):
            WeightAverage(decay, {})


def test_a_gateway_is_refused() -> None:
    stage = Stage((0, 1), ("a", "b"), BySamples((1, 1)), reduce="gateway")
    with pytest.raises(BadPlan, match=r"stages\[0\] has a gateway, which alone steps them"):
        check_averaged(Plan("net", 2, (stage,)))
    check_averaged(Plan("net", 2, (msgspec.structs.replace(stage, devices=("a",)),)))
