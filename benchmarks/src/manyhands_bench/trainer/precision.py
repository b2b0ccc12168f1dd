"""Measures training in bfloat16: its distance to float64, the bytes that travel, and the speed of a GPU."""

from __future__ import annotations

import copy
import statistics
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
from manyhands.models import registry
from manyhands.runtime.coordinator import Coordinator

BATCH, STEPS, CLASSES, LAYERS, DEVICES = 8, 4, 5, 3, 2
LEARNING_RATE, MOMENTUM = 0.05, 0.9
GPU_MODEL, GPU_SIDE, GPU_BATCH, GPU_STEPS = "resnet50", 224, 64, 30


def bf16_noise_ratio(seeds: int = 3) -> dict[str, float]:
    """Return the distance to float64 of training in bfloat16 over devices, over that of plain PyTorch under autocast:
    the median over some seeds for each way of sharing (`bf16_noise_samples`, ...), and the largest of these
    (`bf16_noise_ratio`)."""
    ratios: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder, Coordinator.local_cluster(mh.Cluster.local(DEVICES), threads=1) as cluster:
        for seed in range(seeds):
            data = pictures(seed)
            exact = by_pytorch(network(seed).double(), data, torch.float64)
            plain = distance(by_pytorch(network(seed), data, torch.bfloat16), exact)
            for name, plan in plans(tuple(cluster.members)).items():
                model = network(seed)
                where = Path(folder) / f"{name}-{seed}"
                mh.train(model, data, cluster=cluster, plan=plan, folder=where, precision="bf16", **common())
                ratios.setdefault(name, []).append(distance(model.state_dict(), exact) / plain)
    medians = {f"bf16_noise_{name}": statistics.median(each) for name, each in ratios.items()}
    return {**medians, "bf16_noise_ratio": max(medians.values())}


def bf16_bytes_ratio() -> float:
    """Return the bytes of activations and gradients that two stages have sent each other in bfloat16, over those in
    float32."""
    sent = {}
    with TemporaryDirectory() as folder, Coordinator.local_cluster(mh.Cluster.local(DEVICES), threads=1) as cluster:
        plan = plans(tuple(cluster.members))["pipeline"]
        for precision in ("float32", "bf16"):
            result = mh.train(
                network(0), pictures(0), cluster=cluster, plan=plan, folder=Path(folder) / precision,
                precision=precision, **common(),
            )  # fmt: skip
            kinds = [log.sent_kinds for log in result.logs.values()]
            sent[precision] = sum(each.get(kind, 0) for each in kinds for kind in ("value", "gradient"))
    return sent["bf16"] / sent["float32"]


def bf16_speedup_gpu() -> float | None:
    """Return how many times as many samples per second one GPU trains in bfloat16 as in float32; None: there is no
    GPU."""
    if not torch.cuda.is_available():
        return None
    shape = (3, GPU_SIDE, GPU_SIDE)
    data = TensorDataset(torch.randn(GPU_BATCH * 4, *shape), torch.randint(0, 10, (GPU_BATCH * 4,)))
    rates = {}
    for precision in ("float32", "bf16"):
        with TemporaryDirectory() as folder:
            result = mh.train(
                registry.build(GPU_MODEL, num_classes=10), data, loss=functional.cross_entropy,
                optimizer=mh.Optimizer("SGD", lr=0.01), batch_size=GPU_BATCH, steps=GPU_STEPS,
                cluster=mh.Cluster.local(1, gpus=1), plan="single", folder=Path(folder) / precision,
                precision=precision,
            )  # fmt: skip
            rates[precision] = result.throughput
    return rates["bf16"] / rates["float32"]


def gpu_setting() -> str:
    return (
        f"{torch.cuda.get_device_name()}: {GPU_MODEL} at {GPU_SIDE}x{GPU_SIDE}, batch {GPU_BATCH}, {GPU_STEPS} steps; "
        f"float32 with TF32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'} for matrices, "
        f"{'on' if torch.backends.cudnn.allow_tf32 else 'off'} for convolutions"
    )


def plans(devices: tuple[str, ...]) -> dict[str, Plan]:
    """Return a plan for each way of sharing a step among these devices."""
    first, second = devices[:DEVICES]
    tiles = (Stage((0, 2), (first, second), ByTiles((1, 1))), Stage((2, LAYERS), (first,)))
    return {
        "samples": Plan("Sequential", BATCH, (Stage((0, LAYERS), (first, second), BySamples((5, 3))),)),
        "pipeline": Plan("Sequential", BATCH, (Stage((0, 2), (first,)), Stage((2, LAYERS), (second,)))),
        "tiles": Plan("Sequential", BATCH, tiles, order="gpipe"),
    }


def common() -> dict[str, Any]:
    return {
        "loss": functional.cross_entropy, "optimizer": mh.Optimizer("SGD", lr=LEARNING_RATE, momentum=MOMENTUM),
        "batch_size": BATCH, "steps": STEPS, "shuffle": False,
    }  # fmt: skip


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, CLASSES)),
    )


def pictures(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(100 + seed)
    count = BATCH * STEPS
    inputs = torch.randn(count, 1, 12, 12, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (count,), generator=generator))


def by_pytorch(model: nn.Module, data: TensorDataset, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weights and buffers after plain PyTorch: under autocast, or in float64 without."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    inputs, targets = data.tensors
    for first in range(0, BATCH * STEPS, BATCH):
        rows = slice(first, first + BATCH)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            given = inputs[rows] if dtype == torch.bfloat16 else inputs[rows].to(dtype)
            loss = functional.cross_entropy(model(given), targets[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def distance(weights: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of all differences."""
    apart = [
        (weights[name].double() - tensor).square().sum() for name, tensor in exact.items() if tensor.is_floating_point()
    ]
    return float(torch.stack(apart).sum().sqrt())
