"""A round's forward and backward passes as one CUDA graph: Python launches them at once, in place of every kernel.

    the first rounds    run as any round does: kernels are chosen, memory is allocated
    one round           its kernels are captured instead of launched, then launched as a graph
    from then on        inputs are put where the graph reads them, and the graph is launched

It is possible where a device computes a round from inputs to gradients without waiting for anybody. The optimizer steps
outside of the graph: learning rates change. Draws follow the step, though the graph is always the same: their keys are
in memory that each round fills (`graph.random.KeyTable`). Where an operator cannot be captured, rounds run as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from manyhands.executor.late_loss import sum_of
from manyhands.graph.random import KeyTable
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Backward, Forward, Loss, Step

ROUNDS_BEFORE = 3
"""Rounds that run as usual first: libraries choose kernels and allocate memory, which cannot be captured."""


class CapturedRound:
    """The graph of one device's passes over one graph part, once it is captured."""

    def __init__(self, weights: Weights, actions: Sequence[Action], device: torch.device) -> None:
        self._weights = weights
        self.passes = tuple(action for action in actions if isinstance(action, (Forward, Loss, Backward)))
        """The actions of the graph, the first of the round."""
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """The stream of all of the device's rounds, as a capture wants it."""
        self.failure = ""
        """Why it cannot be captured; empty: it can, as far as is known."""
        self._keys = KeyTable(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: torch.Tensor | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self._places: dict[str, int] = {}
        """Weight -> its memory's address, which the graph has."""
        self._rounds = 0

    @property
    def is_there(self) -> bool:
        """Whether there is a graph, for the weights where they are now."""
        return self._graph is not None and self._places == _places(self._weights)

    @property
    def is_due(self) -> bool:
        """Whether the next round is to be captured."""
        return not self.failure and not self.is_there and self._rounds >= ROUNDS_BEFORE

    def ran(self) -> None:
        """Count a round that ran as usual."""
        self._rounds += 1

    def capture(self, act: Callable[[Action], None], losses: list[torch.Tensor]) -> bool:
        """Capture the passes as `act` carries them out, whose losses it appends to `losses`. Inputs are in place.
        Return whether it was possible; nothing has been computed either way."""
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                self._keys.recording(),
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"),
            ):
                for action in self.passes:
                    act(action)
                total = sum_of(losses)
        except RuntimeError as error:
            self.failure = str(error) or type(error).__name__
            self._graph = None
            return False
        finally:
            losses.clear()
        self._graph, self._loss, self._places = graph, total, _places(self._weights)
        tensors = self._weights.tensors.items()
        self._gradients = {name: weight.grad for name, weight in tensors if weight.grad is not None}
        return True

    def launch(self, step: int) -> torch.Tensor:
        """Compute the loss and the gradients of a step, whose inputs are in place; return the loss."""
        assert self._graph is not None
        assert self._loss is not None
        self._keys.renew(step)
        self._graph.replay()
        for name, gradient in self._gradients.items():
            self._weights.tensors[name].grad = gradient
        return self._loss


def can_be_captured(actions: Sequence[Action]) -> bool:
    """Return whether a round first computes, alone, and then steps."""
    passes = [isinstance(action, (Forward, Loss, Backward)) for action in actions]
    steps = [isinstance(action, Step) for action in actions]
    count = sum(passes)
    return any(isinstance(action, Loss) for action in actions) and all(passes[:count]) and all(steps[count:])


def _places(weights: Weights) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in weights.tensors.items()}
