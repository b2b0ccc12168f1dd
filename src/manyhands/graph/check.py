"""Checks that a graph read from outside computes what it says: every node is run on tensors that hold no memory, on the
meta device; on fake tensors where it is the processor's own kernels that tell the shapes.

Two runs, with 2 and with 3 samples, tell a size that grows with the batch from one that does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from manyhands.facts.errors import BadGraph
from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.graph import ops
from manyhands.graph.argument_rules import check_arguments
from manyhands.graph.document_reader import weights_in
from manyhands.graph.graph import Graph
from manyhands.graph.limits import LARGEST_LIST
from manyhands.graph.nodes import Node
from manyhands.graph.norm_shapes import fake_norm
from manyhands.graph.piece import CompiledNode, Context, Piece, run_steps
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights

LARGEST_RECURRENT_STEPS = 4096
"""The most time steps of a recurrent layer, which torch unrolls step by step wherever shapes are worked out."""

_one_at_a_time = threading.Lock()
"""Held while shapes are worked out: workers may be threads of one process, and PyTorch keeps shapes for the process."""

_PROBABILITY = {
    "aten.dropout.default": 1, "aten.feature_dropout.default": 1, "aten.alpha_dropout.default": 1,
    "aten.bernoulli_.float": 1, "aten.bernoulli.p": 1, "aten.scaled_dot_product_attention.default": 4,
}  # fmt: skip
"""Random operators -> the place of the argument that is their probability."""


def check_graph(graph: Graph) -> None:
    """Refuse a graph from outside whose operators could not be run, or make other tensors than it says; its loss too.

    Code that loads a graph and a worker that receives one both do this before anything is run.
    """
    if graph.loss is not None:
        check_shapes(graph.loss)
        check_loss(graph, graph.loss)
    check_shapes(graph)


def check_state(graph: Graph, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not the graph's weights by names, shapes and dtypes."""
    expected = weights_in(graph)
    for name in expected:
        if name not in state:
            raise BadGraph(f"Weight {name!r:.120} is missing.")
    check_weights(expected, state)


def check_weights(expected: Mapping[str, WeightSpec], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not among the expected weights. A device may hold some of them only."""
    for name, tensor in tensors.items():
        if name not in expected:
            raise BadGraph(f"Weight {name!r:.120} is given, but the graph has no such weight.")
        spec = expected[name]
        actual = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if actual != (spec.shape, spec.dtype):
            expected_text = f"{spec.dtype}{list(spec.shape)}"
            raise BadGraph(f"Weight {name!r:.120} is {actual[1]}{list(actual[0])}; the graph says {expected_text}.")


def check_loss(graph: Graph, loss: Graph) -> None:
    """Refuse a loss that does not take what the network returns, or does not return one number."""
    positional, keywords = loss.input_tree
    if len(positional) != 2 or keywords:
        signature = f"{len(positional)} inputs and {len(keywords)} keywords"
        raise BadGraph(f"The loss takes {signature}; it must take (output, target).")
    if _form(positional[0]) != _form(graph.loss_tree):
        raise BadGraph("The loss takes an output of another structure than the network returns.")
    made = {spec.name: spec for node in graph.nodes for spec in node.outputs}
    made.update({spec.name: spec for spec in graph.inputs})
    loss_inputs = {spec.name: spec for spec in loss.inputs}
    for loss_input, output in zip(tree_leaves(positional[0]), tree_leaves(graph.loss_tree), strict=True):
        taken_spec, made_spec = loss_inputs[loss_input], made[output]
        if (taken_spec.form, taken_spec.dtype) != (made_spec.form, made_spec.dtype):
            raise BadGraph(
                f"The loss takes {_text(taken_spec)} as {loss_input!r:.80}; the network returns {_text(made_spec)}."
            )
    for name in tree_leaves(positional[1]):
        if loss_inputs[name].pairs_samples:
            raise BadGraph(f"The loss takes a target {name!r:.80} with two axes of samples; what is fed has one.")
    results = {spec.name: spec for node in loss.nodes for spec in node.outputs}
    spec = results.get(loss.output_tree) if isinstance(loss.output_tree, str) else None
    if spec is None or spec.shape or not spec.dtype.startswith(("float", "bfloat")):
        raise BadGraph(f"The loss returns {_text(spec) if spec else 'several tensors or an input'}, not one number.")


def _form(tree: Any) -> Any:
    """Return a tree without the names of its leaves."""
    if isinstance(tree, dict):
        return {key: _form(item) for key, item in tree.items()}
    return [_form(item) for item in tree] if isinstance(tree, (list, tuple)) else None


def _text(spec: TensorSpec) -> str:
    second = f" and {spec.second_batch_axis}" if spec.pairs_samples else ""
    return f"{spec.dtype}{list(spec.shape)} (batch axis {spec.batch_axis}{second})"


def check_shapes(graph: Graph) -> None:
    """Refuse a graph in which a node makes other shapes or dtypes than the graph says."""
    walk(graph, (2, 3), _compare)


def walk(graph: Graph, counts: Sequence[int], look: Callable[[Node, list[Any], int], None]) -> None:
    """Call `look` with every node in turn, what it makes of so many samples, on tensors that hold no memory, and their
    number; all nodes for each count. Arguments are checked first.

    Fake tensors take twice as long as those of the meta device, and have PyTorch load what takes a second.
    """
    is_recurrent = any(node.target in ops.RECURRENT for node in graph.nodes)
    device = torch.device("cpu" if is_recurrent else "meta")
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_recurrent else device
    with _one_at_a_time, mode, torch.no_grad():
        try:
            tensors = {spec.name: _empty(spec.shape, spec.dtype) for spec in graph.weights}
            piece = Piece(graph, Weights(tensors, device))
            steps = piece.steps(training=True)
        except Exception as error:
            raise BadGraph(f"The graph cannot be prepared: {_first_line(error)}") from error
        for samples in counts:
            _walk(graph, piece, steps, samples, look)


def _walk(
    graph: Graph, piece: Piece, steps: Sequence[CompiledNode], samples: int,
    look: Callable[[Node, list[Any], int], None],
) -> None:  # fmt: skip
    try:
        slots = piece.fresh_slots()
        by_name = {spec.name: spec for spec in graph.inputs}
        for place, name in enumerate(piece.inputs):
            slots[place] = _empty(by_name[name].shape_for(samples), by_name[name].dtype)
    except Exception as error:
        raise BadGraph(f"The graph cannot be prepared: {_first_line(error)}") from error
    for step in steps:
        try:
            _run(step, slots, samples)
        except BadGraph:
            raise
        except Exception as error:
            raise BadGraph(f"{_called(step.node)} cannot run: {_first_line(error)}") from error
        look(step.node, [slots[place] for place in step.outputs], samples)
        for place in step.frees:
            slots[place] = None


def _empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _called(node: Node) -> str:
    return f"Node {node.name!r:.80} ({node.target})"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _run(step: CompiledNode, slots: list[Any], samples: int) -> None:
    """Run a node; if its cost grows with a size rather than with its text, check that size first."""
    node = step.node
    arguments = step.build(slots, samples)
    try:
        check_arguments(node.target, arguments)
    except BadGraph as error:
        raise BadGraph(f"{_called(node)} is refused: {error}.") from error
    if node.target in ops.RECURRENT:
        _run_recurrent(step, slots, samples)
        return
    if node.target in _PROBABILITY:
        _check_probability(node)
    if node.several:
        _check_parts(node, arguments)
    if (made := fake_norm(node.target, arguments)) is not None:
        slots[step.outputs[0]] = made
        return
    run_steps([replace(step, frees=())], slots, samples, Context(samples=samples))


def _check_probability(node: Node) -> None:
    place = _PROBABILITY[node.target]
    probability = node.arguments[place] if len(node.arguments) > place else 0.0
    if isinstance(probability, bool) or not isinstance(probability, (int, float)) or not 0 <= probability <= 1:
        raise BadGraph(f"{_called(node)} draws with probability {probability!r:.80}; it must be 0 to 1.")


def _check_parts(node: Node, arguments: list[Any]) -> None:
    """Refuse absurdly many results of an operator that returns as many tensors as a size says."""
    name = node.target.split(".")[1]
    count = 0
    if name == "unbind":
        count = arguments[0].shape[arguments[1] if len(arguments) > 1 else 0]
    elif name == "chunk":
        count = arguments[1]
    elif name == "split" and isinstance(arguments[1], int):
        count = arguments[0].shape[arguments[2] if len(arguments) > 2 else 0] // max(1, arguments[1])
    if count > LARGEST_LIST:
        raise BadGraph(f"{_called(node)} makes {count} tensors; at most {LARGEST_LIST} are taken.")


def _run_recurrent(step: CompiledNode, slots: list[Any], samples: int) -> None:
    """Run one time step in place of all: shapes do not depend on how many there are, time does."""
    node = step.node
    arguments = step.build(slots, samples)
    x = arguments[0]
    batch_first = bool(arguments[8]) and x.dim() == 3
    axis = 1 if batch_first else 0
    steps = x.shape[axis]
    if steps > LARGEST_RECURRENT_STEPS:
        raise BadGraph(f"{_called(node)} runs {steps} steps; at most {LARGEST_RECURRENT_STEPS} are taken.")
    arguments[0] = x.narrow(axis, 0, min(1, steps))
    first, *others = step.call(*arguments, **(step.options(slots, samples) if step.options else {}))
    shape = list(first.shape)
    shape[axis] = steps
    for place, value in zip(step.outputs, [first.new_empty(shape), *others], strict=True):
        slots[place] = value


def _compare(node: Node, values: list[Any], samples: int) -> None:
    for made, spec in zip(values, node.outputs, strict=True):
        if not isinstance(made, torch.Tensor):
            raise BadGraph(f"{_called(node)} makes fewer tensors than it says.")
        actual = (tuple(made.shape), str(made.dtype).removeprefix("torch."))
        if actual != (spec.shape_for(samples), spec.dtype):
            raise BadGraph(
                f"{_called(node)} makes {actual[1]}{list(actual[0])} of {samples} samples; "
                f"the graph says {spec.dtype}{list(spec.shape_for(samples))}."
            )
