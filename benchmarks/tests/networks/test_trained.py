"""Modules without randomness, and plain steps."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from manyhands_bench.networks.trained import _Pairs, _pairs_of, _plain_steps, calm
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
    losses = _plain_steps(module, inputs, targets)
    assert len(losses) == 2
    assert losses != _plain_steps(twin, inputs.flip(0), targets)
    assert any(not torch.equal(a, b) for a, b in _pairs_of(module, twin))


def test_pairs_are_samples_of_every_tensor() -> None:
    pairs = _Pairs({"a": torch.arange(3), "b": torch.ones(3, 2)}, torch.arange(3))
    inputs, target = pairs[2]
    assert (int(inputs["a"]), inputs["b"].shape, int(target)) == (2, (2,), 2)
    assert len(pairs) == 3
