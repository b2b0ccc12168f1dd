"""nn.Module -> Graph, by torch.export in training mode with a dynamic batch.

module, example batch ──export.py──▶ ATen program ──convert.py──▶ Graph
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph.arguments import bound_arguments, in_training_mode
from manyhands.graph.chain import GRANULARITIES
from manyhands.graph.export import LossModule, export_module
from manyhands.graph.graph import Graph
from manyhands.graph.loss import combination
from manyhands.graph.misfits import target_misfit
from manyhands.graph.penalties import with_penalties
from manyhands.graph.tensor_trees import as_many
from manyhands.graph.verify import verify as check


def capture(
    module: nn.Module,
    example_batch: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    target: Any = None,
    granularity: str = "blocks",
    name: str = "",
    verify: bool = False,
) -> Graph:
    """Capture `module`, called on `example_batch`, as a Graph.

    `example_batch` is a tensor, a tuple (positional arguments) or a dict (keyword arguments, or one positional dict if
    the module's forward does not take its keys). The first axis of every tensor in it is the batch. With `loss` and an
    example `target`, `loss(output, target)` is captured too, and how it combines over samples is determined (loss.py).
    `granularity` is "blocks" or "operators". With `verify`, loss and gradients on the example batch are compared with
    the module's own (verify.py); a graph with custom autograd functions is always verified if it has a loss.

    The module is captured in training mode and left as it was. Children put in evaluation mode by the user (frozen
    batch norm) stay so if the module as a whole is training. In evaluation the same graph runs at rest: batch norm
    uses its running statistics, a random operator is its expectation (random_ops.py), and no buffer is written, whether
    the module writes it under `if self.training` or always.

    The graph's state shares its memory with the module until it is copied (Weights.copied, store.save): training the
    module afterwards changes it.
    """
    _check_arguments(module, granularity)
    if verify and loss is None:
        raise BadValue("verify=True compares gradients, and there is no loss.", hint="Pass loss= and target= too.")
    functions: list[str] = []
    with _buffers_kept(module), in_training_mode(module):
        positional, keywords = bound_arguments(module, example_batch)
        graph, outputs = export_module(
            module, positional, keywords, functions, name=name or type(module).__name__, granularity=granularity
        )
        if loss is not None:
            if target is None:
                raise CaptureFailed("A loss was given without an example target.", hint="Pass target=example_target.")
            examples = [outputs, as_many(target, example_batch)]
            graph = _with_loss(graph, module, loss, examples, functions)
    if loss is not None and (verify or functions):
        check(graph, module, loss, example_batch, target)
    return graph


def _with_loss(
    graph: Graph, module: nn.Module, loss: Callable[..., torch.Tensor], examples: list[Any], functions: list[str]
) -> Graph:
    """Return the graph with its loss and how that combines over samples. `examples` are an output and a target."""
    met: list[str] = []
    try:
        loss_graph, value = _export_loss(loss, examples, met)
        if met:  # a custom function checks whether its inputs need gradients; ordinary operators do not
            for leaf in tree_flatten(examples[0])[0]:
                leaf.requires_grad_(leaf.is_floating_point())
            loss_graph, value = _export_loss(loss, examples, met)
    except CaptureFailed as error:
        raise target_misfit(loss, *examples) or error from error
    functions += met
    if not isinstance(value, torch.Tensor) or value.dim():
        returned = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "several values"
        raise CaptureFailed(f"The loss returns {returned}; it must return one number.", hint="Take its mean().")
    graph = with_penalties(graph, loss_graph, module)
    return msgspec.structs.replace(graph, loss_combination=combination(graph, *examples))


def _export_loss(loss: Callable[..., torch.Tensor], examples: list[Any], functions: list[str]) -> tuple[Graph, Any]:
    return export_module(LossModule(loss), examples, {}, functions, name="loss", granularity="operators", is_loss=True)


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers afterwards: a capture that failed may have left stand-ins of its own in their
    place."""
    before = [(child, dict(child._buffers)) for child in module.modules()]
    try:
        yield
    finally:
        for child, buffers in before:
            child._buffers.update(buffers)


def _check_arguments(module: object, granularity: str) -> None:
    if not isinstance(module, nn.Module):
        received = f"class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise CaptureFailed(
            f"Only an nn.Module can be captured; this is {received}.", hint="Pass an instance of your module class."
        )
    if granularity not in GRANULARITIES:
        choices = " or ".join(f'"{choice}"' for choice in GRANULARITIES)
        raise BadValue(f"Granularity {granularity!r} is unknown.", hint=f"Use {choices}.")
