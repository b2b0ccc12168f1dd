"""What a device holds at its fullest moment, by part: the paper's Fig. 6.2 for a run of our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from manyhands.executor.optimizers import Stepper
from manyhands.executor.runner import Runner
from manyhands.graph.weights import Weights
from manyhands.profiler.memory import PeakBytes, storage_of


class HeldBytes:
    """Counts tensor bytes while a step runs. What a kernel takes and frees inside one call is not seen."""

    def __init__(self, weights: Weights, stepper: Stepper | None, runners: Mapping[int, Runner]) -> None:
        self.weights, self.stepper, self.runners = weights, stepper, runners
        self.most_bytes = 0
        self.parts: dict[str, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        peak = PeakBytes(self._static())

        def look() -> None:
            self.most_bytes, self.parts = peak.bytes, self._parts(peak.bytes)

        peak.on_most = look
        look()
        with peak:
            yield

    def _static(self) -> list[torch.Tensor]:
        """Weights, buffers, gradients and the optimiser's state."""
        tensors = list(self.weights.tensors.values())
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        return [*tensors, *gradients, *(self.stepper.held() if self.stepper is not None else [])]

    def _parts(self, total: int) -> dict[str, int]:
        seen: set[int] = set()
        weights = _bytes(self._static(), seen)
        deltas = _bytes((tensor for runner in self.runners.values() for tensor in runner.deltas()), seen)
        features = _bytes((tensor for runner in self.runners.values() for tensor in runner.features()), seen)
        rest = max(0, total - weights - deltas - features)
        if not any(runner.elements for runner in self.runners.values()):  # autograd keeps features where none can look
            features, rest = features + rest, 0
        return {"features": features, "deltas": deltas, "weights": weights, "buffers": rest}


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Of storages not seen before, each once."""
    total = 0
    for tensor in tensors:
        address, size = storage_of(tensor)
        if address not in seen:
            seen.add(address)
            total += size
    return total
