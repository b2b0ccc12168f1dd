"""Custom autograd functions as people write them, and a small network around one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Reverse(Function):
    """Gradient reversal, with a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.factor * gradient, None


reverse = Reverse.apply  # bound long before anything is captured, as people do


class StraightThrough(Function):
    """A sign whose gradient is that of a clamp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Swish(Function):
    """Keeps something computed in forward; in the style with setup_context."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * torch.sigmoid(x), torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        x, s = ctx.saved_tensors
        return gradient * (s + x * s * (1 - s))


class Linear(Function):
    """The tutorial's: gradients of a weight and a bias too, where they are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        return to_x, gradient.t() @ x, gradient.sum(0)


class Rectify(Function):
    """The tutorial's ReLU, which writes to places of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[x < 0] = 0
        return gradient


class Halves(Function):
    """Two inputs, two outputs, and gradients that are not the true ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x * 2

    @staticmethod
    def vjp(ctx: Any, of_sum: Tensor, of_double: Tensor) -> Any:
        return of_sum * 0.5 + of_double * 3, of_sum * 0.25


class Clip(Function):
    """Not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-1, 1)


class Shift(Function):
    """Linear but for a constant: only numbers show it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient + 0.1 * ctx.saved_tensors[0]


class Constant(Function):
    """A gradient from nowhere, as of an auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ones_like(gradient)


class ByNumpy(Constant):
    """A backward that leaves torch."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.from_numpy(gradient.detach().numpy() * 2)


class Dirty(Constant):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Between(nn.Module):
    """conv, a function of its output, conv, mean, linear."""

    def __init__(self, function: Callable[[Tensor], Tensor], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.function = function
        self.before, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.after, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.function(self.norm(self.before(x)))
        return self.last(torch.relu(self.after(hidden)).mean((2, 3)))


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "reverse": lambda x: reverse(x, 0.3),
    "straight-through": StraightThrough.apply,
    "swish": lambda x: Swish.apply(x)[0],
    "rectify": Rectify.apply,
    "halves": lambda x: sum(Halves.apply(x, x.detach() * 0.5 + x * 0.1)),
    "twice": lambda x: reverse(StraightThrough.apply(x), 2.0),
}
"""Functions whose gradient a graph can hold."""
