"""Shapes of recurrent operators without walking through time.

torch.export infers the shape of an LSTM by unrolling it: 256 steps, twice, with symbolic sizes, take half a minute for
an answer that is known at once. While exporting, the operators' Python kernels are replaced by their shapes. Nothing is
computed then, so nothing else changes; a torch that keeps its kernels elsewhere is left to unroll.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _lstm(inputs: Any, states: Any, weights: Any, has_biases: bool, layers: int, dropout: float, train: bool,
          bidirectional: bool, batch_first: bool) -> tuple[Any, ...]:  # fmt: skip
    made = (_output(inputs, states[0], bidirectional), *(state.new_empty(state.shape) for state in states))
    return _with_gradient(made, inputs, *states, *weights)


def _simple(inputs: Any, state: Any, weights: Any, has_biases: bool, layers: int, dropout: float, train: bool,
            bidirectional: bool, batch_first: bool) -> tuple[Any, ...]:  # fmt: skip
    made = (_output(inputs, state, bidirectional), state.new_empty(state.shape))
    return _with_gradient(made, inputs, state, *weights)


def _with_gradient(made: tuple[Any, ...], *read: Any) -> tuple[Any, ...]:
    """Mark results as autograd would: a later custom function checks whether its inputs need gradients."""
    needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read)
    return tuple(tensor.requires_grad_(needed) for tensor in made)


def _output(inputs: Any, state: Any, bidirectional: bool) -> Any:
    return inputs.new_empty((*inputs.shape[:-1], state.shape[-1] * (2 if bidirectional else 1)))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Make `aten.lstm` and its kin on fake tensors, within this context, return empty tensors of the right shape."""
    aten = torch.ops.aten
    replaced: list[tuple[Any, dict[Any, Any]]] = []
    for operator, shapes in (
        (aten.lstm.input, _lstm),
        (aten.gru.input, _simple),
        (aten.rnn_tanh.input, _simple),
        (aten.rnn_relu.input, _simple),
    ):
        kernels = getattr(operator, "py_kernels", None)
        cache = getattr(operator, "_dispatch_cache", None)
        if kernels is None or cache is None:
            continue
        replaced.append((operator, dict(kernels)))
        kernels.update(dict.fromkeys(kernels, shapes))
        cache.clear()
    try:
        yield
    finally:
        for operator, kernels in replaced:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
