"""Measures how fast an optimiser's step passes over memory, on a few of a network's weights."""

from __future__ import annotations

import torch

from manyhands.executor.boxes import dtype_of
from manyhands.executor.optimizers import slots, steps_seconds
from manyhands.facts.network import Network
from manyhands.facts.optimizer import Optimizer

MOST_BYTES = 32 * 2**20
"""Of weights that are stepped: more than the caches hold, and done in some hundredths of a second."""
_STEPS = 3


def quick_bytes_per_second(network: Network, optimizer: Optimizer, torch_device: str = "cpu") -> float:
    """Return the bytes per second that a step reads and writes, the best of a few; 0 where nothing is trained.

    The smallest weights are stepped, up to MOST_BYTES of them, at least one.
    """
    device = torch.device(torch_device)
    weights: dict[str, torch.Tensor] = {}
    byte_count = 0
    for name, spec in sorted(network.weights.items(), key=lambda item: item[1].bytes):
        if spec.trainable and (not weights or byte_count + spec.bytes <= MOST_BYTES):
            weights[name] = torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=device).requires_grad_()
            byte_count += spec.bytes
    if not byte_count:
        return 0.0
    seconds = steps_seconds(optimizer, weights, device, _STEPS)
    return byte_count * (3 + 2 * slots(optimizer)) / max(min(seconds), 1e-9)
