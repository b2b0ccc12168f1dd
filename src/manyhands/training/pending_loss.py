"""The loss of a step that may be under way: a number that is waited for when it is read."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any, Protocol

import torch


class LossSource(Protocol):
    """The training that losses come from."""

    def awaited(self, future: Future[float]) -> float:
        """Return a step's loss, after waiting for it."""

    def expect_no_gradients(self) -> None:
        """Make gradients in this process tell whoever reads them that they are not here."""


@functools.total_ordering
class PendingLoss:
    """The loss of a step of a user's own loop. Reading it waits for the step; until then the loop may go on.

    It computes and compares as a float. `backward()` computes nothing: the step that gave it has gone all the way.
    """

    def __init__(self, step: int, future: Future[float], source: LossSource) -> None:
        self.step = step
        """The number of the step, from 0."""
        self._future, self._source = future, source

    @property
    def is_ready(self) -> bool:
        """Whether the step is done, so that reading the loss does not wait."""
        return self._future.done()

    def item(self) -> float:
        """Return the loss, after waiting for the step; raise what went wrong in it."""
        return self._future.result() if self._future.done() else self._source.awaited(self._future)

    def backward(self) -> None:
        """Compute nothing: the workers have done it. Whoever then reads a gradient here gets an error."""
        self._source.expect_no_gradients()

    def detach(self) -> PendingLoss:
        return self

    cpu = detach

    def tolist(self) -> float:
        return self.item()

    def __float__(self) -> float:
        return self.item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.asarray(self.item(), dtype=dtype)

    def __repr__(self) -> str:
        return (
            f"{self.item()!r}" if self.is_ready and self._future.exception() is None else f"<loss of step {self.step}>"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __hash__(self) -> int:
        return hash(self.item())

    def __eq__(self, other: object) -> bool:
        number = _number(other)
        return NotImplemented if number is None else self.item() == number

    def __lt__(self, other: Any) -> bool:
        number = _number(other)
        return NotImplemented if number is None else self.item() < number

    def __add__(self, other: Any) -> Any:
        return self.item() + _plain(other)

    def __radd__(self, other: Any) -> Any:
        return _plain(other) + self.item()

    def __sub__(self, other: Any) -> Any:
        return self.item() - _plain(other)

    def __rsub__(self, other: Any) -> Any:
        return _plain(other) - self.item()

    def __mul__(self, other: Any) -> Any:
        return self.item() * _plain(other)

    def __rmul__(self, other: Any) -> Any:
        return _plain(other) * self.item()

    def __truediv__(self, other: Any) -> Any:
        return self.item() / _plain(other)

    def __rtruediv__(self, other: Any) -> Any:
        return _plain(other) / self.item()

    def __neg__(self) -> float:
        return -self.item()

    def __abs__(self) -> float:
        return abs(self.item())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.item(), digits)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, PendingLoss) else value


def _number(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (PendingLoss, int, float)) else None
