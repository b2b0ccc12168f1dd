"""PyTorch's optimiser over the weights of one group, on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from manyhands.executor.torch_optimizers import SCHEDULED, construct
from manyhands.facts.optimizer_groups import OptimizerGroup
from manyhands.graph.weights import dense_gradient, memory_order

KEPT = "kept_gradient"
"""The key of the gradients that steps without an update have kept for the next one with it."""
IN_GROUP = "group."
"""Begins the key of what an optimizer keeps in its group, not for each weight: timm's Lamb counts steps there."""
_SET_FROM_OUTSIDE = {"params", "param_names", *SCHEDULED}


class GroupStepper:
    """Steps the weights of one group, one at least. It is made anew where they are laid out anew in memory."""

    def __init__(self, group: OptimizerGroup, weights: Mapping[str, torch.Tensor]) -> None:
        self.group, self.weights = group, dict(weights)
        self._torch = construct(group, list(self.weights.values()))
        self._laid = {name: _laid(weight) for name, weight in self.weights.items()}
        self._rows = self._laid_as_rows() if self._torch.defaults.get("fused") else {}
        if self._rows:
            self._torch = construct(group, [self._stepped(name) for name in self.weights])
        self._at_first = dict(self._torch.param_groups[0])
        self._kept: dict[str, torch.Tensor] = {}
        """Weight -> the sum of the gradients that were kept; zeros after an update."""

    def _laid_as_rows(self) -> dict[str, _Row]:
        """Return, for weights in channels_last, contiguous leaves over the same memory: a fused step, which knows no
        axes, copies the gradients of others first, and takes two to three times as long."""
        rows = {}
        for name, weight in self.weights.items():
            order = memory_order(weight)
            view = weight.detach().permute(order)
            if view.is_contiguous() and not weight.is_contiguous():
                rows[name] = _Row(view.requires_grad_(), order)
        return rows

    def _stepped(self, name: str) -> torch.Tensor:
        """Return the tensor that PyTorch's optimiser has for a weight."""
        row = self._rows.get(name)
        return self.weights[name] if row is None else row.leaf

    @property
    def is_laid_anew(self) -> bool:
        """Whether a weight is no longer where it was in memory."""
        return any(_laid(weight) != self._laid[name] for name, weight in self.weights.items())

    def set_options(self, options: Mapping[str, float | tuple[float, ...]]) -> None:
        """Change options of the group, from the next step on."""
        self._torch.param_groups[0].update(options)

    def step(self) -> None:
        """Step. Weights without a gradient stay as they are."""
        for weight in self.weights.values():
            if weight.grad is not None and weight.grad.stride() != weight.stride():
                dense_gradient(weight)  # a fused step takes both for rows of numbers
        for name, row in self._rows.items():
            gradient = self.weights[name].grad
            row.leaf.grad = None if gradient is None else gradient.permute(row.order)
        self._torch.step()
        for row in self._rows.values():
            row.leaf.grad = None
        if self.group.accumulates:
            self._kept = {
                name: torch.zeros_like(weight, requires_grad=False)
                for name, weight in self.weights.items()
                if weight.grad is not None or name in self._kept
            }

    def add_kept(self, share: float) -> None:
        """Multiply the gradients by `share`, and add what was kept to them."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                weight.grad.mul_(share)
                if name in self._kept:
                    weight.grad.add_(self._kept[name])

    def keep_gradients(self) -> None:
        """Keep the gradients for the step after, in place of a step."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self._kept[name] = weight.grad.detach().clone()

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are kept for the weights now, those in use."""
        states = [*self._torch.state.values(), self._kept]
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def entries(self, name: str) -> dict[str, Any]:
        """Return what is kept for a weight, tensors with the weight's axes."""
        row = self._rows.get(name)
        kept = self._torch.state.get(self._stepped(name), {})
        entries = {
            key: row.as_weight(value) if row is not None and isinstance(value, torch.Tensor) else value
            for key, value in kept.items()
        }
        if name in self._kept:
            entries[KEPT] = self._kept[name]
        return entries | {
            IN_GROUP + key: value
            for key, value in self._torch.param_groups[0].items()
            if key not in _SET_FROM_OUTSIDE and isinstance(value, (int, float)) and self._at_first.get(key) != value
        }

    def set_entries(self, name: str, entries: Mapping[str, Any]) -> None:
        """Keep this for a weight."""
        row = self._rows.get(name)
        of_weight = {key: value for key, value in entries.items() if not key.startswith(IN_GROUP)}
        if KEPT in of_weight:
            self._kept[name] = of_weight.pop(KEPT)
        self._torch.state[self._stepped(name)] = of_weight if row is None else row.as_rows(of_weight)
        of_group = {key.removeprefix(IN_GROUP): value for key, value in entries.items() if key.startswith(IN_GROUP)}
        self._torch.param_groups[0].update(of_group)


class _Row(NamedTuple):
    """A weight in the order of its memory, for a step that goes over it number by number."""

    leaf: torch.Tensor
    order: tuple[int, ...]
    """The weight's axes in the leaf's order."""

    def as_weight(self, value: torch.Tensor) -> torch.Tensor:
        """Return a state's tensor with the weight's axes."""
        if value.dim() != len(self.order):
            return value
        return value.permute([self.order.index(axis) for axis in range(len(self.order))])

    def as_rows(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return all that is kept for a weight, with the leaf's axes."""
        return {
            key: value.permute(self.order)
            if isinstance(value, torch.Tensor) and value.dim() == len(self.order)
            else value
            for key, value in entries.items()
        }


def _laid(weight: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return where a weight's memory is, and the order in which its numbers lie there."""
    return weight.data_ptr(), weight.stride()
