"""The self-check: silent where graph and module agree, and where they do not, an error that names the layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.verify import Verified, verify

CLASSES = torch.tensor([0, 2, 1, 0])


def pictures() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def convolutional(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
    return nn.Sequential(*body, *layers, nn.Flatten(), nn.Linear(6 * 64, 3))


def checked(module: nn.Module, batch: Any = None, target: Any = None, loss: Any = F.cross_entropy) -> Verified:
    batch, target = pictures() if batch is None else batch, CLASSES if target is None else target
    return verify(capture(module, batch, loss=loss, target=target), module, loss, batch, target)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full_like(x, 0.8))
        return x * kept + 0.1 * torch.randn_like(x) + 0.1 * torch.rand_like(x)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "layers",
    [
        (),
        (nn.Dropout(0.3), nn.Conv2d(6, 6, 1), nn.Dropout2d(0.4), nn.AlphaDropout(0.2), nn.Dropout(1.0)),
        (Noisy(), nn.Dropout(0.5)),
    ],
    ids=["still", "dropouts", "noise"],
)
def test_agreement_to_the_last_bits(layers: tuple[nn.Module, ...]) -> None:
    """Random layers too: the module is made to draw what the graph draws."""
    found = checked(convolutional(*layers))
    assert not found.note
    assert found.difference <= 1e-6
    assert found.samples == 4
    assert 0 < found.seconds < 60


@pytest.mark.slow
def test_attention_with_dropout_and_a_second_opinion() -> None:
    """Another kernel rounds otherwise than the module's: float64 decides."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    found = checked(nn.Sequential(layer, nn.Flatten(), nn.Linear(80, 3)), torch.randn(4, 5, 16))
    assert not found.note
    assert found.difference <= 1e-6


def test_nothing_is_changed() -> None:
    module = convolutional(nn.Dropout(0.5))
    module.eval()
    module[1].train()
    module[1].weight.grad = torch.ones(6)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    modes = [child.training for child in module.modules()]
    checked(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert [child.training for child in module.modules()] == modes
    assert torch.equal(module[1].weight.grad, torch.ones(6))
    assert module[0].weight.grad is None
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_hook_is_found_by_its_gradient() -> None:
    module = convolutional(nn.Conv2d(6, 6, 1))
    module[3].weight.register_hook(lambda gradient: gradient * (1 + 1e-5))
    with pytest.raises(CaptureFailed, match=r"the first layer with another gradient is 3 \(3.weight differs by 1e-05"):
        checked(module)


def test_a_hook_on_a_module_is_found_before_the_layers_it_feeds() -> None:
    """Layers after the hook get the right gradients: going back from the loss, the first that does not is named."""
    module = convolutional(nn.Conv2d(6, 6, 1))
    module[3].register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 2,))
    with pytest.raises(CaptureFailed, match=r"the first layer with another gradient is 0 \(0.weight"):
        checked(module)


class Counting(nn.Module):
    """Computes something else in every call."""

    count = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.count)


def test_another_value_is_found_where_it_is_made() -> None:
    with pytest.raises(CaptureFailed, match=r"(?s)does not compute what the module does.*first in 3 \(test_verify.py:"):
        checked(convolutional(Counting()))


def test_a_changing_loss_is_found() -> None:
    factors = itertools.count(1)
    with pytest.raises(CaptureFailed, match="in the loss function"):
        checked(convolutional(), loss=lambda o, t: F.cross_entropy(o, t) * next(factors))


class Running(nn.Module):
    """A buffer written by what Python decides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().mean((0, 2, 3)) * next(self.calls))
        return x


def test_a_buffer_written_otherwise_is_found() -> None:
    with pytest.raises(CaptureFailed, match=r"the buffer 3.seen is written otherwise"):
        checked(convolutional(Running()))


def test_on_demand() -> None:
    module = convolutional(nn.Conv2d(6, 6, 1))
    module[3].bias.register_hook(torch.neg)
    assert capture(module, pictures(), loss=F.cross_entropy, target=CLASSES).loss is not None
    with pytest.raises(CaptureFailed, match="another gradient"):
        capture(module, pictures(), loss=F.cross_entropy, target=CLASSES, verify=True)
    with pytest.raises(BadValue, match="there is no loss"):
        capture(module, pictures(), verify=True)
