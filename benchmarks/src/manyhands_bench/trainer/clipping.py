"""The distance of clipped training over devices from clipped training by plain PyTorch, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage
from manyhands.runtime.coordinator import Coordinator

BATCH, STEPS, CLASSES, LAYERS = 8, 6, 5, 3
CLIP_NORM, LEARNING_RATE, MOMENTUM = 0.6, 0.1, 0.9
DEVICES = 3


def clip_exact() -> dict[str, float]:
    """Return the largest relative difference of weights and of gradient norms to plain PyTorch, for each way of sharing
    (`clip_samples`, `clip_tiles`, ...) and over all of them (`clip_exact`)."""
    data = pictures()
    weights, norms = by_pytorch(data)
    if not max(norms) > CLIP_NORM:
        raise AssertionError("no step was clipped: the comparison would show nothing")
    differences = {}
    with TemporaryDirectory() as folder:
        with Coordinator.local_cluster(mh.Cluster.local(DEVICES), threads=1) as cluster:
            for name, plan in plans(tuple(cluster.members)).items():
                model = network()
                result = mh.train(model, data, cluster=cluster, plan=plan, folder=Path(folder) / name, **common())
                differences[name] = difference(model, result.grad_norms, weights, norms)
        model = network()
        split = mh.split_train(model, data, cut=1, bits=32, k=0, folder=Path(folder) / "split", **common())
        differences["split"] = difference(model, split.grad_norms, weights, norms)
    return {"clip_exact": max(differences.values())} | {f"clip_{name}": each for name, each in differences.items()}


def plans(devices: tuple[str, ...]) -> dict[str, Plan | str]:
    """Return a plan for each way of sharing a step among these devices."""
    samples = Stage((0, LAYERS), devices, BySamples((3, 3, 2)))
    line = tuple(Stage((place, place + 1), (name,)) for place, name in enumerate(devices))
    mixed = (Stage((0, 2), devices[:2], ByTiles((1, 1))), Stage((2, LAYERS), devices[1:], BySamples((3, 5))))
    return {
        "samples": Plan("Sequential", BATCH, (samples,)),
        "tiles": "tiles",
        "pipeline": Plan("Sequential", BATCH, line, micro_batches=4),
        "mixed": Plan("Sequential", BATCH, mixed, order="gpipe"),
    }


def common() -> dict[str, Any]:
    return {
        "loss": functional.cross_entropy, "optimizer": mh.Optimizer("SGD", lr=LEARNING_RATE, momentum=MOMENTUM),
        "batch_size": BATCH, "steps": STEPS, "shuffle": False, "clip_norm": CLIP_NORM,
    }  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, CLASSES)),
    ).double()


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    count = BATCH * STEPS
    inputs = torch.randn(count, 1, 12, 12, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (count,), generator=generator))


def by_pytorch(data: TensorDataset) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights of plain PyTorch, and the norm of every step's gradients before they were clipped."""
    model, norms = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    inputs, targets = data.tensors
    for first in range(0, BATCH * STEPS, BATCH):
        rows = slice(first, first + BATCH)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        optimizer.step()
    return model.state_dict(), norms


def difference(
    model: nn.Module, norms: list[float], expected: Mapping[str, Tensor], expected_norms: list[float]
) -> float:
    """Return the largest difference, relative to the largest number of each weight and to each norm."""
    weights = model.state_dict()
    by_weight = [float((weights[name] - other).abs().max() / other.abs().max()) for name, other in expected.items()]
    by_step = [abs(norm - other) / other for norm, other in zip(norms, expected_norms, strict=True)]
    return max(*by_weight, *by_step)
