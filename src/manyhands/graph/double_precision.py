"""A graph that computes in float64 throughout, so that rounding explains no difference."""

from __future__ import annotations

import msgspec
import torch

from manyhands.facts.network import TensorSpec
from manyhands.graph import ops
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import (
    Argument,
    Enum,
    Node,
)


def cast_to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


_ROUNDED = frozenset({"float32", "float16", "bfloat16"})


def in_double(graph: Graph) -> Graph:
    """Return the same graph, and its loss, computing in float64 throughout, so that rounding explains nothing."""
    return msgspec.structs.replace(
        graph,
        inputs=tuple(_double_spec(spec) for spec in graph.inputs),
        nodes=tuple(_double_node(node) for node in graph.nodes),
        state={name: cast_to_double(tensor) for name, tensor in graph.state.items()},
        loss=in_double(graph.loss) if graph.loss is not None else None,
    )


def _double_spec(spec: TensorSpec) -> TensorSpec:
    return msgspec.structs.replace(spec, dtype="float64") if spec.dtype in _ROUNDED else spec


def _double_node(node: Node) -> Node:
    options = {key: _double_argument(argument) for key, argument in node.options.items()}
    makes = node.target in ops.CREATION and node.outputs[0].dtype in _ROUNDED
    if makes and any(argument.name == "dtype" for argument in ops.resolve(node.target)._schema.arguments):
        options["dtype"] = Enum("float64")
    return msgspec.structs.replace(
        node,
        arguments=tuple(_double_argument(argument) for argument in node.arguments),
        options=options,
        outputs=tuple(_double_spec(spec) for spec in node.outputs),
    )


def _double_argument(argument: Argument) -> Argument:
    if isinstance(argument, (list, tuple)):
        return tuple(_double_argument(item) for item in argument)
    return Enum("float64") if isinstance(argument, Enum) and argument.name in _ROUNDED else argument
