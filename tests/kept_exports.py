"""Exports of networks that a test process has exported before: hundreds of tests capture the same few networks.

A third of the suite's time was torch.export. What an export depends on is compared whole: the classes and their
`forward`, every attribute, the shapes of weights and buffers, which of them are tied, the example and PyTorch's
settings. Values of weights are no part of that, since torch.export never sees them. What cannot be compared, such as a
module with a lambda, is exported each time.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import msgspec
import torch
from torch import nn

from manyhands.graph import capture as capturing
from manyhands.graph.export import LossModule
from manyhands.graph.graph import Graph
from manyhands.graph.precision import surrounding

MOST_KEPT = 200


class KeptExports:
    """Stands in for `export_module` where `capture` calls it."""

    def __init__(self) -> None:
        self.export = capturing.export_module
        self.kept: OrderedDict[Hashable, tuple[Graph, Any, list[str]]] = OrderedDict()
        self.reused = 0

    def __call__(
        self, module: nn.Module, positional: Any, keywords: Any, functions: list[str], **options: Any
    ) -> tuple[Graph, Any]:
        key = key_of(module, positional, keywords, options)
        if key is not None and key in self.kept:
            self.kept.move_to_end(key)
            graph, outputs, met = self.kept[key]
            functions += met
            self.reused += 1
            return with_weights_of(module, graph), copy.deepcopy(
                outputs
            )  # a capture of the loss sets gradients on them
        met: list[str] = []
        graph, outputs = self.export(module, positional, keywords, met, **options)
        functions += met
        if key is not None and shares_weights(module, graph):
            self.kept[key] = (msgspec.structs.replace(graph, state=dict(graph.state)), copy.deepcopy(outputs), met)
            if len(self.kept) > MOST_KEPT:
                self.kept.popitem(last=False)
        return graph, outputs


def keep_exports() -> None:
    """Keep every export from now on, to the end of the process."""
    if not isinstance(capturing.export_module, KeptExports):
        capturing.export_module = KeptExports()  # type: ignore[assignment]


class _Facts(pickle.Pickler):
    """Writes a module with the form of its weights in their place. A weight met twice is written as the same one."""

    def __init__(self, file: io.BytesIO, formal: set[int]) -> None:
        super().__init__(file, protocol=5)
        self.formal = formal
        self.numbers: dict[int, int] = {}

    def persistent_id(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor) and id(item) in self.formal:
            number = self.numbers.setdefault(id(item), len(self.numbers))
            return ("tensor", number, type(item).__qualname__, *form_of(item))
        return None


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device), tensor.requires_grad)


def key_of(module: nn.Module, positional: Any, keywords: Any, options: dict[str, Any]) -> Hashable | None:
    """Return all that an export depends on, or None where that cannot be told."""
    if isinstance(module, LossModule) and isinstance(module.loss, nn.Module):
        return None  # its weights go by other names in the graph
    examples: list[torch.Tensor] = []
    _tensors_in((positional, keywords), examples)
    formal = {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *examples)}
    facts = io.BytesIO()
    try:
        _Facts(facts, formal).dump((module, positional, keywords, options))
    except Exception:
        return None
    children = tuple((type(child), getattr(type(child).forward, "__code__", None)) for child in module.modules())
    settings = (surrounding(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.__version__)
    return (facts.getvalue(), children, settings)


def _tensors_in(tree: Any, tensors: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
    elif isinstance(tree, dict):
        for item in tree.values():
            _tensors_in(item, tensors)
    elif isinstance(tree, list | tuple):
        for item in tree:
            _tensors_in(item, tensors)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def shares_weights(module: nn.Module, graph: Graph) -> bool:
    """Return whether the graph's weights are the module's by name; others are constants of its code."""
    weights = weights_of(module)
    return all(
        name not in weights or weights[name].data_ptr() == tensor.data_ptr() for name, tensor in graph.state.items()
    )


def with_weights_of(module: nn.Module, graph: Graph) -> Graph:
    weights = weights_of(module)
    state = {name: weights[name].detach() if name in weights else tensor for name, tensor in graph.state.items()}
    return msgspec.structs.replace(graph, state=state)
