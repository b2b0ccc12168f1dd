"""Activations over the memory of their input: the same numbers, forward and backward, and no copy that nobody needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.graph import activations
from manyhands.graph.activations import overwriting
from manyhands.graph.capture import capture
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights

BOUNDED = "aten.hardtanh.default"


@pytest.mark.slow
@given(
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=40), st.floats(-2, 0), st.floats(0.5, 6), st.booleans()
)
def test_a_bounded_line_over_its_input_is_the_plain_one_to_the_bit(
    numbers: list[float], low: float, high: float, is_alone: bool
) -> None:
    call = overwriting(BOUNDED, is_alone=is_alone)
    assert call is not None
    seeds = torch.arange(1.0, 3 + len(numbers))
    found = []
    for least in (0, 10**9):
        data = torch.tensor([*numbers, low, high], requires_grad=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(activations, "_LEAST_ELEMENTS", least)
            made = call(data * 1.0, low, high)
            (slope,) = torch.autograd.grad(made, data, seeds.clone())
        found.append((made.detach(), slope))
    plain = torch.tensor([*numbers, low, high], requires_grad=True)
    wanted = torch.nn.functional.hardtanh(plain, low, high)
    (slope,) = torch.autograd.grad(wanted, plain, seeds)
    for one, other in found:
        assert torch.equal(one, wanted.detach())
        assert torch.equal(other, slope)


class _Copies(TorchDispatchMode):
    """Counts elements that are copied."""

    copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("aten.clone", "aten.copy_", "aten._to_copy")):
            self.copied += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.quick(every=16)
@pytest.mark.parametrize(
    "activation", [nn.ReLU6, nn.Hardswish, nn.SiLU, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Hardsigmoid, nn.Mish]
)
@pytest.mark.parametrize("least", [0, 10**9])
def test_in_training_nothing_is_copied_and_gradients_are_the_modules(
    activation: Any, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "_LEAST_ELEMENTS", least)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), activation(inplace=True), nn.Conv2d(4, 2, 1)).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    graph = capture(module, x)
    piece = Piece(graph, Weights.copied(graph))
    with _Copies() as watch:
        (made,) = piece({piece.inputs[0]: x}, Context(samples=2)).values()
    assert watch.copied == 0
    made.sum().backward()
    wanted = module(x)
    wanted.sum().backward()
    assert torch.equal(made, wanted)
    for name, parameter in module.named_parameters():
        slope = piece.weights.tensors[name].grad
        assert slope is not None
        assert parameter.grad is not None
        assert torch.equal(slope, parameter.grad)


class _Residual(nn.Module):
    """What the activation makes is read by a sum too, whose gradient goes to both of its terms as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.one(x) * 4.0)
        z = self.act(self.two(x + y))
        out: Tensor = self.act(self.one(y) + 0.1) + z
        return out


def test_a_gradient_that_others_see_too_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "_LEAST_ELEMENTS", 0)
    torch.manual_seed(0)
    module = _Residual().double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    graph = capture(module, x)
    piece = Piece(graph, Weights.copied(graph))
    (made,) = piece({piece.inputs[0]: x}, Context(samples=2)).values()
    made.square().sum().backward()
    wanted = module(x)
    wanted.square().sum().backward()
    assert torch.equal(made, wanted)
    for name, parameter in module.named_parameters():
        assert torch.equal(piece.weights.tensors[name].grad, parameter.grad)  # type: ignore[arg-type]


def test_pytorchs_own_form_would_copy() -> None:
    """Else there would be nothing to save."""
    data = torch.ones(8, requires_grad=True) * 1.0
    with _Copies() as watch:
        torch.nn.functional.relu6(data, inplace=True)
    assert watch.copied == 8
