"""The training job of every scenario, and the weights it must end with: plain PyTorch on one device, in float64.

The network has batch norm, so devices that share samples or tiles have statistics to exchange; it has no dropout, so a
plain loop, without anything of manyhands but the order of the samples, gives the weights that a job must end with.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as loss_function
from torch.utils.data import TensorDataset

from manyhands.data.order import BatchOrder
from manyhands.facts.optimizer import Optimizer
from manyhands.profiler.threads import with_threads

BATCH_SIZE = 24
SAMPLES = 20 * BATCH_SIZE
CLASSES = 5
LEARNING_RATE, MOMENTUM = 0.01, 0.9
OPTIMIZER = Optimizer("SGD", lr=LEARNING_RATE, momentum=MOMENTUM)
MICRO_BATCHES = {"samples": 1, "tiles": 1, "pipeline": 2, "mixed": 2, "split": 1}
"""Micro-batches by way of sharing. Batch norm's statistics are those of a micro-batch, so each number has a reference
of its own."""
STEPS_BETWEEN_KEPT = 100
SEED = 11

__all__ = ["BATCH_SIZE", "MICRO_BATCHES", "OPTIMIZER", "SEED", "Reference", "data", "loss_function", "network"]


def network() -> nn.Sequential:
    """Return three blocks with batch norm, one without and a linear layer, with the same weights every time."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(6 * 16, CLASSES)),
    ).to(torch.float64)


def data() -> TensorDataset:
    """Return pictures and classes drawn at random; no two samples are alike, so a batch run twice or left out shows."""
    drawing = torch.Generator().manual_seed(SEED)
    pictures = torch.randn(SAMPLES, 1, 16, 16, generator=drawing, dtype=torch.float64)
    return TensorDataset(pictures, torch.randint(CLASSES, (SAMPLES,), generator=drawing))


@dataclass
class Reference:
    """One device's training, computed as far as requested and kept every hundred steps."""

    micro_batches: int
    _kept: dict[int, tuple[nn.Module, dict[str, Any]]] = field(default_factory=dict)
    _data: TensorDataset = field(default_factory=lambda: data())

    def weights(self, steps: int) -> Mapping[str, Tensor]:
        """Return the weights and buffers after `steps` steps."""
        first = max((step for step in self._kept if step <= steps), default=0)
        model = copy.deepcopy(self._kept[first][0]) if first else network()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        if first:
            optimizer.load_state_dict(copy.deepcopy(self._kept[first][1]))
        model.train()
        with with_threads(1):  # as the workers compute; several would only wait for each other on layers so small
            for step in range(first, steps):
                self._step(model, optimizer, step)
                if (step + 1) % STEPS_BETWEEN_KEPT == 0:
                    self._kept[step + 1] = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
        return model.state_dict()

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        pictures, classes = self._data.tensors
        chosen = torch.tensor(BatchOrder(SAMPLES, BATCH_SIZE, True, SEED).indices(step))
        optimizer.zero_grad()
        for part in chosen.chunk(self.micro_batches):
            loss = loss_function(model(pictures[part]), classes[part]) / self.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def differs(self, weights: Mapping[str, Tensor], steps: int) -> float:
        """Return the largest absolute difference of any number; infinite if a tensor is missing or has another
        shape."""
        expected, worst = self.weights(steps), 0.0
        for name, tensor in expected.items():
            other = weights.get(name)
            if other is None or other.shape != tensor.shape:
                return float("inf")
            worst = max(worst, float((other.double() - tensor.double()).abs().nan_to_num(float("inf")).max()))
        return worst
