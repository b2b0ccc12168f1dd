"""Traces an nn.Module into a torch.fx graph of layers, with the shape of every tensor. Nothing is computed.

The module is traced in training and in evaluation. Functional dropout, which has its mode written into it, becomes a
layer; anything else that differs is refused, since the rewritten network could not follow `train()` and `eval()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from manyhands.facts.errors import BadValue, CaptureFailed

SAMPLES = 2
"""The samples in the batch that finds shapes: with one, squeeze() would also remove the wrong axis."""
SIDE = 224
_DROPOUTS: dict[str, type[nn.Module]] = {
    "dropout": nn.Dropout, "dropout1d": nn.Dropout1d, "dropout2d": nn.Dropout2d, "dropout3d": nn.Dropout3d,
    "alpha_dropout": nn.AlphaDropout, "feature_alpha_dropout": nn.FeatureAlphaDropout,
}  # fmt: skip
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Tracer(fx.Tracer):
    """A tracer whose leaves are PyTorch's own layers, and layers without weights or children that look at
    `self.training`."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        forward = type(m).forward
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        if getattr(forward, "__module__", "").startswith("torch.nn"):
            return True
        bare = not any(True for _ in m.children()) and not m._parameters and not m._buffers
        return bare and "training" in getattr(getattr(forward, "__code__", None), "co_names", ())


def trace(model: nn.Module) -> fx.Graph:
    """Return the graph of a module, good for training and evaluation. Functional dropouts become layers in it."""
    if not isinstance(model, nn.Module):
        raise CaptureFailed(
            f"Only an nn.Module can be decoupled; this is a {type(model).__name__}.",
            hint="Pass an instance of your module class.",
        )
    if not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        raise CaptureFailed(
            f"{type(model).__name__} has no convolution (nn.Conv2d and the like): there are no channels to decouple.",
            hint="Decoupling is for convolutional networks.",
        )
    _check_ties(model)
    with _modes_kept(model):
        training, resting = _traced(model.train()), _traced(model.eval())
    _compare(training, resting, type(model).__name__)
    return training


def _check_ties(model: nn.Module) -> None:
    """Refuse a weight that two layers share, since it would no longer be shared."""
    owners: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            full_name = f"{path}.{name}".lstrip(".")
            if weight is not None and owners.setdefault(id(weight), full_name) != full_name:
                raise CaptureFailed(
                    f"This network cannot be decoupled: '{full_name}' and '{owners[id(weight)]}' are one weight.",
                    hint="Call one layer twice, or give both layers weights of their own.",
                )


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _traced(model: nn.Module) -> fx.Graph:
    tracer = _Tracer()
    try:
        return tracer.trace(model)
    except Exception as error:
        where = _where_stopped(tracer)
        raise CaptureFailed(
            f"{type(model).__name__} cannot be traced by torch.fx{where}: {_first_sentence(error)}.",
            hint="Its forward depends on values or sizes. Move that into a layer without weights of its own, "
            "or write it so that the same layers run for every input.",
        ) from error


def _first_sentence(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".")


def _where_stopped(tracer: fx.Tracer) -> str:
    names = [name for name in getattr(tracer, "module_stack", {}) if name]
    return f" in layer '{names[-1]}'" if names else ""


def _compare(training: fx.Graph, resting: fx.Graph, name: str) -> None:
    """Refuse what differs between both graphs, but for dropouts, of which `training` gets layers."""
    training_nodes, resting_nodes = list(training.nodes), list(resting.nodes)
    for training_node, resting_node in zip(training_nodes, resting_nodes):
        alike = (training_node.op, training_node.target) == (resting_node.op, resting_node.target)
        if alike and str((training_node.args, training_node.kwargs)) == str((resting_node.args, resting_node.kwargs)):
            continue
        if not (
            alike and training_node.op == "call_function" and getattr(training_node.target, "__name__", "") in _DROPOUTS
        ):
            raise CaptureFailed(
                f"{name} does something else in training than in evaluation, at {place(training_node)}.",
                hint="Put what depends on self.training into a layer without weights of its own.",
            )
    if len(training_nodes) != len(resting_nodes):
        raise CaptureFailed(
            f"{name} has {len(training_nodes)} operators in training and {len(resting_nodes)} in evaluation.",
            hint="Put what depends on self.training into a layer without weights of its own.",
        )
    for training_node, resting_node in zip(training_nodes, resting_nodes):
        if str((training_node.args, training_node.kwargs)) != str((resting_node.args, resting_node.kwargs)):
            training_node.meta["dropout"] = _dropout(training_node)


def _dropout(node: fx.Node) -> nn.Module:
    arguments = dict(zip(("input", "p", "training", "inplace"), node.args)) | dict(node.kwargs)
    return _DROPOUTS[node.target.__name__](arguments.get("p", 0.5), arguments.get("inplace", False))  # type: ignore[union-attr]


def place(node: fx.Node) -> str:
    """Return a text that names a layer for the user: its path, and the operator; outside of all layers, the one before
    it."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(node.target) if node.op == "call_module" else next(reversed(list(stack)), "")
    operator_text = "" if node.op == "call_module" else f"operator {operator_name(node)}"
    if not path and operator_text:
        return operator_text + _after(node)
    return f"layer '{path or node.name}'" + (f" ({operator_text})" if operator_text else "")


def _after(node: fx.Node) -> str:
    """Return the last layer on the way to an operator."""
    while node.op != "call_module" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return f" after layer '{node.target}'" if node.op == "call_module" else ""


def operator_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def example(model: nn.Module, inputs: Any = None) -> Tensor:
    """Return a batch without numbers, of the shape of `inputs`: a tensor with samples first, or the shape of one
    sample.

    If the shape has no channels (rows and columns alone), the batch has those of the first convolution.
    """
    first = next(module for module in model.modules() if isinstance(module, CONVOLUTIONS))
    spatial = len(first.kernel_size)
    if isinstance(inputs, Tensor):
        shape = tuple(inputs.shape[1:])
    elif inputs is None:
        shape = (SIDE,) * spatial
    elif isinstance(inputs, (tuple, list)) and all(isinstance(extent, int) for extent in inputs):
        shape = tuple(inputs)
    else:
        raise BadValue(
            f"inputs must be one tensor with samples first, or the shape of one sample, not a {type(inputs).__name__}.",
            hint="Decoupling is for networks that read one picture: inputs=(3, 224, 224).",
        )
    if len(shape) == spatial and not isinstance(inputs, Tensor):
        shape = (first.in_channels, *shape)
    if not shape or any(extent < 1 for extent in shape):
        raise BadValue(f"inputs of shape {shape} have no picture in them.", hint="Write inputs=(3, 224, 224).")
    return torch.empty(SAMPLES, *shape, dtype=first.weight.dtype, device="meta")


def propagate(module: fx.GraphModule, batch: Tensor) -> None:
    """Write the shape of every tensor into its node (`shape_of`)."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    needed = [node for node in placeholders if not node.args]
    if len(needed) > 1:
        names = ", ".join(str(node.target) for node in needed)
        raise CaptureFailed(
            f"The network takes several inputs ({names}).", hint="Only networks that read one picture are decoupled."
        )
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    with _modes_kept(module), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        module.eval()
        _Shapes(module).run(torch.empty(batch.shape, dtype=batch.dtype, device=device))


class _Shapes(fx.Interpreter):
    """An interpreter that runs a graph on tensors without numbers, and notes what every node makes."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and len(args) == 1 and not kwargs
        if is_norm and args[0].shape[1] == module.num_features:
            return args[0]  # of the same shape; calling torch takes longer than everything else
        return super().call_module(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except Exception as error:
            raise CaptureFailed(
                f"The network does not take this input, at {place(n)}: {_first_sentence(error)}.",
                hint="Give the shape of one sample: inputs=(channels, height, width).",
            ) from error
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        n.meta["makes"] = len(leaves)
        n.meta["made"] = (tuple(result.shape), result.dtype) if isinstance(result, Tensor) else None
        return result


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of the one tensor a node makes; None where it makes something else."""
    made = node.meta.get("made")
    return made[0] if made is not None else None


def makes_tensors(node: fx.Node) -> bool:
    return bool(node.meta.get("makes"))
