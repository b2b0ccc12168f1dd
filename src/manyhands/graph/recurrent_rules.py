"""The exact form of a recurrent layer's arguments: states and weights, layer by layer and direction by direction.

oneDNN's LSTM takes the sizes of its weights from those of the input and the states and reads so many numbers, however
many there are. Every size is therefore checked before each call, on the tensors that the call is made with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from manyhands.facts.errors import BadGraph

_GATES = {"aten.lstm.input": 4, "aten.gru.input": 3, "aten.rnn_tanh.input": 1, "aten.rnn_relu.input": 1}


def check_recurrent(target: str, arguments: Sequence[Any]) -> None:
    """Raise BadGraph unless states and parameters are what aten.lstm.input or one of its kin takes."""
    data, states, weights, has_biases, layers, dropout, _, is_bidirectional, batch_first = arguments
    _check_tensor("its input", data, 3)
    length, batch, features = data.shape if not batch_first else (data.shape[1], data.shape[0], data.shape[2])
    directions = 2 if is_bidirectional else 1
    if not 1 <= layers <= len(weights) or length < 1 or features < 1:
        raise BadGraph(
            f"{layers} layers with {len(weights)} weights over {length} steps of {features} features; "
            f"each must be 1 or more, with at least one weight a layer"
        )
    if not 0 <= dropout <= 1:
        raise BadGraph(f"dropout is {dropout!r:.40}; it must be 0 to 1")
    hidden, cell = _states(target, states)
    for name, state in (("hidden", hidden), ("cell", cell)):
        _check_shape(f"its {name} state", state, (layers * directions, batch, state.shape[-1]), data)
    shapes = list(_weight_shapes(_GATES[target], layers, directions, bool(has_biases), features,
                                 cell.shape[-1], hidden.shape[-1]))  # fmt: skip
    if len(weights) != len(shapes):
        raise BadGraph(f"{len(weights)} weights; {layers} layers in {directions} directions have {len(shapes)}")
    for place, (weight, shape) in enumerate(zip(weights, shapes, strict=True)):
        _check_shape(f"its weight {place}", weight, shape, data)


def _states(target: str, states: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden and the cell state; layers without cells have the hidden state for both."""
    if target == "aten.lstm.input":
        if len(states) != 2:
            raise BadGraph(f"{len(states)} states; an LSTM has 2")
    else:
        states = (states, states)
    for state in states:
        _check_tensor("a state", state, 3)
        if state.shape[-1] < 1:
            raise BadGraph(f"a state has the shape {list(state.shape)}; its last axis must be 1 or more")
    return states[0], states[1]


def _weight_shapes(
    gates: int, layers: int, directions: int, has_biases: bool, features: int, cell: int, hidden: int
) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a layer's weights in PyTorch's order. A hidden state of another size than the cell's is a
    projection of it (LSTM only)."""
    for layer in range(layers):
        read = features if layer == 0 else hidden * directions
        for _ in range(directions):
            yield gates * cell, read
            yield gates * cell, hidden
            if has_biases:
                yield (gates * cell,)
                yield (gates * cell,)
            if hidden != cell:
                yield hidden, cell


def _check_tensor(name: str, value: Any, rank: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise BadGraph(f"{name} is {value!r:.40}; it must be a tensor")
    if value.dim() != rank or not value.is_floating_point():
        raise BadGraph(f"{name} is {value.dtype} {list(value.shape)}; it must be floats in {rank} axes")


def _check_shape(name: str, value: Any, shape: tuple[int, ...], like: torch.Tensor) -> None:
    _check_tensor(name, value, len(shape))
    if tuple(value.shape) != shape or value.dtype != like.dtype:
        raise BadGraph(
            f"{name} is {value.dtype} {list(value.shape)}; with this input it must be {like.dtype} {list(shape)}"
        )
