"""The weights a piece runs with: trainable parameters, frozen ones and buffers, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph


class Weights:
    """The tensors of a piece's weights, by name. Trainable ones are leaves that collect gradients."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        self.tensors = tensors
        self.device = torch.device(device)

    @classmethod
    def copied(cls, graph: Graph, names: Iterable[str] | None = None, device: torch.device | str = "cpu") -> Weights:
        """Copy the graph's weights (all, or those named) to a device."""
        requested = set(names) if names is not None else None
        tensors: dict[str, torch.Tensor] = {}
        for spec in graph.weights:
            if requested is None or spec.name in requested:
                copy = graph.state[spec.name].detach().to(device, copy=True)
                tensors[spec.name] = copy.requires_grad_(spec.trainable)
        return cls(tensors, device)

    @classmethod
    def shared(cls, graph: Graph, module: nn.Module) -> Weights:
        """Share the module's own parameters and buffers: training the graph trains the module."""
        module_tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        module_tensors.update(module.named_buffers(remove_duplicate=False))
        tensors = {spec.name: module_tensors.get(spec.name, graph.state[spec.name]) for spec in graph.weights}
        return cls(tensors, next((tensor.device for tensor in tensors.values()), "cpu"))

    def trainable(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    @torch.no_grad()
    def load_into(self, module: nn.Module, graph: Graph) -> None:
        """Copy parameters and buffers back into a module of the same structure."""
        targets: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        targets.update(module.named_buffers(remove_duplicate=False))
        for name, tensor in self.tensors.items():
            if name in targets:
                _copy_into(targets[name], tensor)
        for alias, name in graph.aliases.items():
            if alias in targets:
                _copy_into(targets[alias], self.tensors[name])


def _copy_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor, unless it is the target's own memory: a page of a mapped file that is written takes memory."""
    is_same = target.data_ptr() == tensor.data_ptr() and target.stride() == tensor.stride()
    if not is_same or target.dtype != tensor.dtype or target.device != tensor.device:
        target.copy_(tensor)


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as it was before a kernel laid it out for itself."""
    return weight.to_dense() if weight.is_mkldnn else weight


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's axes in the order its memory lies in: permuted so, a dense one is contiguous."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def dense_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's gradient, in the weight's own memory order; zero where none was computed."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    elif weight.grad.stride() != weight.stride():
        weight.grad = torch.empty_like(weight).copy_(weight.grad)
    return weight.grad
