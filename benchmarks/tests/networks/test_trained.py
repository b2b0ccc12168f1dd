"""Modules without randomness, and plain steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from manyhands_bench.networks.trained import LENGTH, _difference, _Pairs, _pairs_of, _plain_steps, _rate, calm
from network_tasks import Small


class _Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(attention_dropout=0.1, layerdrop=0.2, hidden_size=4.0)
        self.drop_prob, self.scale = 0.3, 0.5
        self.dropout = nn.Dropout(0.4)


def test_nothing_is_dropped() -> None:
    module = calm(_Configured())
    assert vars(module.config) == {"attention_dropout": 0.0, "layerdrop": 0.0, "hidden_size": 4.0}
    assert (module.drop_prob, module.scale, module.dropout.p) == (0.0, 0.5, 0.0)
    calm_network = calm(Small()).eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(calm_network.body[3].train()(x), x)


def test_plain_steps_train() -> None:
    module, twin = Small(p=0.0).double(), Small(p=0.0).double()
    twin.load_state_dict(module.state_dict())
    inputs, targets = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    losses = _plain_steps(module, inputs, targets, 1e-3)
    assert len(losses) == 2
    assert losses != _plain_steps(twin, inputs.flip(0), targets, 1e-3)
    assert any(not torch.equal(a, b) for a, b in _pairs_of(module, twin))


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_gradient_that_is_a_little_wrong_shows_in_steps_of_this_length(scale: float) -> None:
    """However large the network's gradients are."""
    torch.manual_seed(0)
    module, twin = Small(p=0.0).double(), Small(p=0.0).double()
    twin.load_state_dict(module.state_dict())
    inputs, targets = torch.randn(8, 3, 8, 8, dtype=torch.float64), scale * torch.randn(8, 5, dtype=torch.float64)
    rate = _rate(module, inputs, targets)
    before = [weight.detach().clone() for weight in module.parameters()]
    losses = _plain_steps(twin, inputs, targets, rate)
    moved = (
        sum(float((a - b).square().sum()) for a, b in zip(before, (weight.detach() for weight in twin.parameters())))
        ** 0.5
    )
    assert moved < 4 * LENGTH
    next(module.parameters()).register_hook(lambda gradient: gradient * 1.0001)
    assert _difference(module, _plain_steps(module, inputs, targets, rate), twin, losses) > 3e-9


def test_pairs_are_samples_of_every_tensor() -> None:
    pairs = _Pairs({"a": torch.arange(3), "b": torch.ones(3, 2)}, torch.arange(3))
    inputs, target = pairs[2]
    assert (int(inputs["a"]), inputs["b"].shape, int(target)) == (2, (2,), 2)
    assert len(pairs) == 3
