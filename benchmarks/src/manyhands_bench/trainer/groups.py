"""Training with groups of weights, several optimizers and schedules, beside plain PyTorch: float64 differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage
from manyhands.runtime.coordinator import Coordinator

BATCH, BATCHES, EPOCHS, CLASSES = 8, 4, 2, 3
WAYS = ("samples", "tiles", "pipeline", "mixed", "split")
Made = tuple[Any, Any]
"""An optimizer of PyTorch, or several, and the scheduler, or one of each."""
Make = Callable[[nn.Module], Made]


def groups_exact() -> dict[str, float]:
    """Return the largest relative difference of weights to plain PyTorch, for each way of sharing (`groups_samples`,
    ...) and over all of them (`groups_exact`)."""
    largest = dict.fromkeys(WAYS, 0.0)
    with (
        TemporaryDirectory() as folder,
        Coordinator.local_cluster(mh.Cluster.local(2), threads=1) as cluster,
    ):
        makes: tuple[Make, ...] = (no_decay, muon_and_adamw)
        for number, make in enumerate(makes):
            expected = by_pytorch(make)
            for way in WAYS[:-1]:
                model = trained(way, make, cluster, Path(folder) / f"{way}-{number}")
                largest[way] = max(largest[way], difference(model, expected))
        for number, (make, optimizer) in enumerate(split_optimizers()):
            model = network()
            mh.split_train(
                model, pictures(), cut=1, bits=32, k=0, optimizer=optimizer, folder=Path(folder) / f"split-{number}",
                **common(),
            )  # fmt: skip
            largest["split"] = max(largest["split"], difference(model, by_pytorch(make)))
    return {"groups_exact": max(largest.values())} | {f"groups_{way}": each for way, each in largest.items()}


def trained(way: str, make: Make, cluster: Coordinator, folder: Path) -> nn.Module:
    """Return the network after training on the cluster."""
    model = network()
    optimizer, scheduler = make(model)
    plan = mixed(tuple(cluster.members)) if way == "mixed" else way
    mh.train(
        model, pictures(), optimizer=optimizer, scheduler=scheduler, plan=plan, cluster=cluster, folder=folder,
        **common(),
    )  # fmt: skip
    return model


def common() -> dict[str, Any]:
    return {"loss": functional.cross_entropy, "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}


def mixed(devices: tuple[str, ...]) -> Plan:
    """Return a plan by which two devices share the convolutions in tiles and the rest by samples."""
    layers = len(mh.capture(network(), pictures().tensors[0][:4]).network.layers)
    stages = (Stage((0, 2), devices[:2], ByTiles((1, 1))), Stage((2, layers), devices[:2], BySamples((3, 5))))
    return Plan("Sequential", BATCH, stages, order="gpipe")


def no_decay(model: nn.Module) -> Made:
    """Return AdamW without decay for biases, and a cycle of rates with a highest rate for each group."""
    groups: list[dict[str, Any]] = [{"params": large(model)}, {"params": small(model), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, [0.02, 0.05], total_steps=BATCHES * EPOCHS + 1)


def muon_and_adamw(model: nn.Module) -> Made:
    """Return Muon for matrices and AdamW for the rest, each with a schedule; the second is of a function."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    return both, [lr_scheduler.StepLR(both[0], 3, 0.5), lr_scheduler.LambdaLR(both[1], lambda step: 0.9**step)]


def split_optimizers() -> list[tuple[Make, mh.Optimizer]]:
    """Return what trains a split, which takes optimizers by name alone, each with the same in PyTorch: the first of the
    two above, and Muon and AdamW without schedules."""
    cycle = ("OneCycleLR", {"max_lr": [0.02, 0.05], "total_steps": BATCHES * EPOCHS + 1})
    biases = [{"weights": ["*.bias"], "weight_decay": 0.0}]
    matrices = [{"weights": [name for name, p in network().named_parameters() if p.dim() == 2], "optimizer": "Muon",
                 "lr": 0.02}]  # fmt: skip
    return [
        (no_decay, mh.Optimizer("AdamW", lr=0.01, weight_decay=0.1, groups=biases, schedule=cycle)),
        (lambda model: (muon_and_adamw(model)[0], []), mh.Optimizer("AdamW", lr=0.01, groups=matrices)),
    ]


def by_pytorch(make: Make) -> nn.Module:
    """Return the network after the same steps in a loop."""
    model = network()
    optimizers, schedulers = (each if isinstance(each, list) else [each] for each in make(model))
    inputs, targets = pictures().tensors
    for _ in range(EPOCHS):
        for first in range(0, BATCH * BATCHES, BATCH):
            part = slice(first, first + BATCH)
            loss = functional.cross_entropy(model(inputs[part]), targets[part])
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for each in (*optimizers, *schedulers):
                each.step()
    return model


def difference(model: nn.Module, expected: nn.Module) -> float:
    """Return the largest relative difference of two networks' weights."""
    pairs = zip(model.state_dict().values(), expected.state_dict().values())
    return max(float((mine - other).norm() / other.norm()) for mine, other in pairs)


def large(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() > 1]


def small(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() <= 1]


def network() -> nn.Sequential:
    """Return convolutions, which tiles share, and linear layers, which are matrices."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(4)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    ).double()


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * BATCHES, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (BATCH * BATCHES,), generator=generator))
