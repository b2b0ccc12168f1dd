"""The memory that a device holds at its fullest moment, by part: the paper's Fig. 6.2 for a run of our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from manyhands.executor.averaging import WeightAverage
from manyhands.executor.optimizers import Stepper
from manyhands.executor.runner import Runner
from manyhands.graph.peak_bytes import PeakBytes, storage_of
from manyhands.graph.weights import Weights


class TensorMemory:
    """Counts tensor bytes while a step runs. What a kernel takes and frees inside one call is not seen."""

    def __init__(
        self,
        weights: Weights,
        stepper: Stepper | None,
        average: WeightAverage | None,
        runners: Mapping[int, Runner],
    ) -> None:
        self.weights, self.stepper, self.average, self.runners = weights, stepper, average, runners
        self.peak_bytes = 0
        self.parts: dict[str, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        peak = PeakBytes(self._static())

        def note_peak() -> None:
            self.peak_bytes, self.parts = peak.bytes, self._parts(peak.bytes)

        peak.on_most = note_peak
        note_peak()
        with peak:
            yield

    def _static(self) -> list[torch.Tensor]:
        """Return weights, buffers, gradients, the optimizer's state and the weights' average."""
        tensors = list(self.weights.tensors.values())
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        averages = self.average.tensors.values() if self.average is not None else ()
        return [*tensors, *gradients, *(self.stepper.state_tensors() if self.stepper is not None else []), *averages]

    def _parts(self, total: int) -> dict[str, int]:
        counted: set[int] = set()
        weights = _bytes(self._static(), counted)
        gradients = _bytes(
            (tensor for runner in self.runners.values() for tensor in runner.feature_gradients()), counted
        )
        features = _bytes((tensor for runner in self.runners.values() for tensor in runner.features()), counted)
        buffers = max(0, total - weights - gradients - features)
        if not any(runner.elements for runner in self.runners.values()):  # autograd keeps features out of sight
            features, buffers = features + buffers, 0
        return {"features": features, "deltas": gradients, "weights": weights, "buffers": buffers}


def _bytes(tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
    """Return the bytes of storages not counted before, each counted once."""
    total = 0
    for tensor in tensors:
        address, size = storage_of(tensor)
        if address not in counted:
            counted.add(address)
            total += size
    return total
