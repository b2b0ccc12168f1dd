"""Samples collected into the batches that a network takes, and a batch's outputs split into the answers to its samples.

A sample is what a data set gives as an input, without the axis of samples; so is its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhands.facts.errors import BadData, BadValue
from manyhands.facts.network import TensorSpec
from manyhands.graph.graph import Graph
from manyhands.graph.sizes import at
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.trees import Fields


def named_sample(graph: Graph, sample: Any) -> dict[str, torch.Tensor]:
    """Return copies of one sample's tensors by the names of the network's inputs, in their types."""
    tensors = bound("A sample is", lambda: bind_inputs(graph, sample), sample)
    specs = {spec.name: spec for spec in graph.inputs}
    return {name: _fitting(specs[name], value) for name, value in tensors.items()}


def bound_inputs(graph: Graph, batch: Any) -> dict[str, torch.Tensor]:
    """Return a batch's tensors by the names of the network's inputs."""
    return bound("A batch's inputs are", lambda: bind_inputs(graph, batch), batch)


def bound(subject: str, bind: Callable[[], dict[str, Any]], value: Any) -> dict[str, Any]:
    """Return tensors by name, if the value is built like the example with which the network was captured."""
    try:
        return bind()
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadData(
            f"{subject} a {type(value).__name__} that does not fit the example the network was captured with "
            f"({type(error).__name__}: {error}).",
            hint="Give tensors, tuples and dicts in the same places, with the same keys.",
        ) from None


def _fitting(spec: TensorSpec, value: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"A sample's '{spec.name}' is a {type(value).__name__}; it must be a tensor.") from error
    shape, dtype = _shape(spec), getattr(torch, spec.dtype)
    if tuple(tensor.shape) != shape:
        hint = "All samples must have one shape: crop, resize or pad them."
        if tuple(tensor.shape[1:]) == shape:
            hint = "It has an axis of samples: give them one by one."
        problem = f"A sample's '{spec.name}' has shape {tuple(tensor.shape)}; the network was captured for {shape}."
        raise BadData(problem, hint=hint)
    if tensor.is_floating_point() and not dtype.is_floating_point:
        actual = str(tensor.dtype).removeprefix("torch.")
        raise BadData(f"A sample's '{spec.name}' is {actual}; it must be {spec.dtype}.")
    return tensor.detach().to("cpu", dtype, copy=True)


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of one sample."""
    shape, axis = spec.shape_for(1), spec.batch_axis
    return shape if axis is None or spec.rows_per_sample > 1 else (*shape[:axis], *shape[axis + 1 :])


def batch_of(graph: Graph, samples: Sequence[Mapping[str, torch.Tensor]], size: int) -> dict[str, torch.Tensor]:
    """Return samples side by side; the last one stands in for those that are missing."""
    rows = [*samples, *[samples[-1]] * (size - len(samples))]
    return {spec.name: _beside(spec, [row[spec.name] for row in rows]) for spec in graph.inputs}


def _beside(spec: TensorSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if spec.batch_axis is None:
        return parts[0]
    if spec.rows_per_sample > 1:
        return torch.cat(list(parts), spec.batch_axis)
    return torch.stack(list(parts), spec.batch_axis)


def refuse_pairs(graph: Graph) -> None:
    """Refuse a network of which an output holds something for every two samples: what is answered to one sample would
    depend on the others in its batch."""
    node, spec = next(
        ((n, s) for n in graph.nodes for s in n.outputs if s.name in graph.outputs and s.pairs_samples), (None, None)
    )
    if node is None or spec is None:
        return
    raise BadValue(
        f"{graph.name} returns something for every two samples ({spec.name}, {spec.shape_text}), which depends on how "
        f"samples are put into batches.{at(node.where)}",
        hint="Let forward return what belongs to each sample, such as its embedding, and compare samples afterwards.",
    )


def answers_of(graph: Graph, outputs: Mapping[str, torch.Tensor], count: int) -> list[Any]:
    """Return the answers to the first samples of a batch, each as the module would return it. They share no memory."""
    specs = graph.network.tensors

    def cut(name: str, place: int) -> torch.Tensor:
        spec, tensor = specs[name], outputs[name]
        if spec.batch_axis is None:
            return tensor.clone()
        rows = spec.rows_per_sample
        sample_rows = tensor.narrow(spec.batch_axis, place * rows, rows)
        return (sample_rows if rows > 1 else sample_rows.squeeze(spec.batch_axis)).clone()

    return [outputs_of(graph, {name: cut(name, place) for name in graph.outputs}) for place in range(count)]


def joined(graph: Graph, answers: Sequence[Any]) -> Any:
    """Return answers as the module would return them for all samples at once."""
    specs = graph.network.tensors

    def visit(tree: Any, parts: Sequence[Any]) -> Any:
        if isinstance(tree, str):
            return _beside(specs[tree], parts)
        if isinstance(tree, dict):
            items = {key: visit(branch, [part[key] for part in parts]) for key, branch in tree.items()}
            return tree.filled(items) if isinstance(tree, Fields) else items
        if isinstance(tree, (list, tuple)):
            return [visit(branch, [part[place] for part in parts]) for place, branch in enumerate(tree)]
        return tree

    return visit(graph.output_tree, answers)
