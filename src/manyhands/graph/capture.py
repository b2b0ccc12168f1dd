"""nn.Module -> Graph, by torch.export in training mode with a dynamic batch.

module, example batch ──export.py──▶ ATen program ──convert.py──▶ Graph
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.nn import functional

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph.arguments import bound_arguments, in_training_mode
from manyhands.graph.chain import GRANULARITIES
from manyhands.graph.export import LossModule, export_module
from manyhands.graph.graph import Graph
from manyhands.graph.loss import combination
from manyhands.graph.misfits import target_misfit
from manyhands.graph.own_loss import OWN_LOSS, divided, labelled_arguments
from manyhands.graph.penalties import with_penalties
from manyhands.graph.tensor_trees import as_many, batch_of, exported_samples, flattened
from manyhands.graph.trees import tree_leaves, tree_map
from manyhands.graph.verify import verify as check
from manyhands.weights.mapped import stand_ins


def capture(
    module: nn.Module,
    example_batch: Any,
    *,
    loss: Callable[..., torch.Tensor] | Literal["own"] | None = None,
    target: Any = None,
    granularity: str = "blocks",
    name: str = "",
    verify: bool = False,
) -> Graph:
    """Capture `module`, called on `example_batch`, as a Graph.

    `example_batch` is a tensor, a tuple (positional arguments) or a dict (keyword arguments, or one positional dict if
    the module's forward does not take its keys). The first axis of every tensor in it is the batch. With `loss` and an
    example `target`, `loss(output, target)` is captured too, and how it combines over samples is determined (loss.py).
    With a target alone, or loss="own", the module's forward is given it as its labels and returns the loss itself
    (own_loss.py): as one number, as the entry or field `loss` of a dict or dataclass, or in a tuple. With loss="own"
    and no target, or no argument for it, forward computes its loss without labels, as an autoencoder does.
    `granularity` is "blocks" or "operators". With `verify`, loss and gradients on the example batch are compared with
    the module's own (verify.py); a graph with custom autograd functions is always verified if it has a loss.

    The module is captured in training mode and left as it was. Children put in evaluation mode by the user (frozen
    batch norm) stay so if the module as a whole is training. In evaluation the same graph runs at rest: batch norm
    uses its running statistics, a random operator is its expectation (random_ops.py), and no buffer is written, whether
    the module writes it under `if self.training` or always.

    The graph's state shares its memory with the module until it is copied (Weights.copied, store.save): training the
    module afterwards changes it. Weights on the meta device are captured too; they have no values in the state either.
    """
    _check_arguments(module, granularity, loss)
    if loss is None and target is not None:
        loss = OWN_LOSS
    if verify and loss is None:
        raise BadValue("verify=True compares gradients, and there is no loss.", hint="Pass loss= and target= too.")
    if callable(loss) and target is None:
        raise CaptureFailed("A loss was given without an example target.", hint="Pass target=example_target.")
    functions: list[str] = []
    with _buffers_kept(module), stand_ins(module) as meant, in_training_mode(module):
        name = name or type(module).__name__
        if isinstance(loss, str):
            graph = _with_own_loss(module, example_batch, target, functions, name, granularity)
        else:
            positional, keywords = bound_arguments(module, example_batch)
            graph, outputs = export_module(module, positional, keywords, functions, name=name, granularity=granularity)
            if loss is not None:
                examples = [outputs, as_many(target, example_batch)]
                graph = _with_loss(graph, module, loss, examples, functions)
    for key, tensor in graph.state.items():
        graph.state[key] = meant.get(tensor.data_ptr(), tensor) if tensor.numel() else tensor
    if loss is not None and (verify or functions):
        check(graph, module, loss, example_batch, target)
    return graph


def _with_loss(
    graph: Graph, module: nn.Module, loss: Callable[..., torch.Tensor], examples: list[Any], functions: list[str]
) -> Graph:
    """Return the graph with its loss and how that combines over samples. `examples` are an output and a target."""
    met: list[str] = []
    try:
        loss_graph, value = _export_loss(graph, loss, examples, met)
        if met:  # a custom function checks whether its inputs need gradients; ordinary operators do not
            leaves: list[torch.Tensor] = []
            flattened(examples[0], leaves, "the output")
            for leaf in leaves:
                leaf.requires_grad_(leaf.is_floating_point())
            loss_graph, value = _export_loss(graph, loss, examples, met)
    except CaptureFailed as error:
        raise target_misfit(loss, *examples) or error from error
    functions += met
    if not isinstance(value, torch.Tensor) or value.dim():
        returned = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "several values"
        raise CaptureFailed(f"The loss returns {returned}; it must return one number.", hint="Take its mean().")
    graph = with_penalties(graph, loss_graph, module)
    return msgspec.structs.replace(graph, loss_combination=combination(graph, *examples))


def _with_own_loss(
    module: nn.Module, batch: Any, target: Any, functions: list[str], name: str, granularity: str
) -> Graph:
    """Return the graph of a module without its labels, with the loss that it computes of them."""
    positional, keywords, labels = labelled_arguments(module, batch, target)
    whole, _ = export_module(
        module, positional, keywords, functions, name=name, granularity=granularity, has_own_loss=True
    )
    graph, loss = divided(whole, labels, module)
    leaves: list[torch.Tensor] = []
    flattened(batch, leaves, "the input")
    samples = exported_samples(batch_of(leaves))
    made = {spec.name: spec for node in graph.nodes for spec in node.outputs}
    outputs = tree_map(
        lambda leaf: torch.zeros(made[leaf].shape_for(samples), dtype=getattr(torch, made[leaf].dtype)),
        graph.output_tree,
    )
    graph = with_penalties(graph, loss, module)
    return msgspec.structs.replace(
        graph, loss_combination=combination(graph, outputs, as_many(() if target is None else target, batch))
    )


_PyTorchLosses = OrderedDict[Hashable, tuple[Graph, Any]]
_pytorch_losses: _PyTorchLosses = OrderedDict()
"""Graphs of PyTorch's own losses, which are as expensive to export as a small network, by all that they depend on."""
_MOST_PYTORCH_LOSSES = 64


def _export_loss(
    graph: Graph, loss: Callable[..., torch.Tensor], examples: list[Any], functions: list[str]
) -> tuple[Graph, Any]:
    specs = {spec.name: spec for specs in (graph.inputs, *(node.outputs for node in graph.nodes)) for spec in specs}
    second_axes = {
        place: (axis, specs[name].shape[axis])
        for place, name in enumerate(tree_leaves(graph.output_tree))
        if (axis := specs[name].second_batch_axis) is not None
    }

    def exported() -> tuple[Graph, Any]:
        return export_module(
            LossModule(loss), examples, {}, functions, name="loss", granularity="operators", is_loss=True,
            second_axes=second_axes,
        )  # fmt: skip

    if getattr(functional, getattr(loss, "__name__", ""), None) is not loss:
        return exported()
    key = _facts_of(loss, examples, second_axes)
    if key not in _pytorch_losses:
        _pytorch_losses[key] = exported()
        if len(_pytorch_losses) > _MOST_PYTORCH_LOSSES:
            _pytorch_losses.popitem(last=False)
    return _pytorch_losses[key]


def _facts_of(loss: Callable[..., torch.Tensor], examples: list[Any], second_axes: Mapping[Any, Any]) -> Hashable:
    """Return all that the graph of a function without a state depends on: the form of its arguments, and PyTorch's
    settings."""
    leaves: list[torch.Tensor] = []
    tree = flattened(examples, leaves, "the loss")
    tensors = tuple((leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) for leaf in leaves)
    autocast = tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in {leaf.device.type for leaf in leaves}
    )
    return (loss, repr(tree), tensors, tuple(second_axes.items()), autocast, torch.get_default_dtype())


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


def _check_arguments(module: object, granularity: str, loss: object) -> None:
    if not isinstance(module, nn.Module):
        received = f"class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise CaptureFailed(
            f"Only an nn.Module can be captured; this is {received}.", hint="Pass an instance of your module class."
        )
    if granularity not in GRANULARITIES:
        choices = " or ".join(f'"{choice}"' for choice in GRANULARITIES)
        raise BadValue(f"Granularity {granularity!r} is unknown.", hint=f"Use {choices}.")
    if not (loss is None or callable(loss) or loss == OWN_LOSS):
        raise BadValue(
            f'loss is {loss!r:.80}; it must be a function of (output, target), or "own" for the module\'s own loss.',
            hint='Write loss="own", or torch.nn.functional.cross_entropy, say.',
        )
