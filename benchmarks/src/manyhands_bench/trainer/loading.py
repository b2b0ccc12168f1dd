"""Training from a folder of JPEG pictures, beside training on the same samples in memory.

Both train the same network by the same plan on two local workers, one after the other, several times: a ratio is taken
of neighbours, as a machine's speed changes with time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.data.loader import Prefetcher
from manyhands.data.order import BatchOrder
from manyhands.data.pictures import load_folder, pillow
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.graph.capture import capture

SHAPE = (3, 96, 96)
SAMPLES, BATCH, CLASSES = 192, 16, 3
STEPS, REPEATS = 12, 5


@dataclass(frozen=True)
class LoaderRates:
    """Rates in samples per second."""

    loader_ratio: float
    """The rate from the folder over the rate from memory: the median over the repeats."""
    spread: float
    """The largest of these ratios less the smallest."""
    from_folder: float
    from_memory: float
    loader_alone: float
    """What the loader gives when nothing is trained: it can keep up if this is the highest."""
    data_wait_share: float
    """The part of the time of training from the folder in which all devices waited for data."""


def loader_ratio(
    *, steps: int = STEPS, repeats: int = REPEATS, width: int = 96, say: Callable[[str], None] = lambda text: None
) -> LoaderRates:
    """Measure how much of the rate of samples in memory is reached from a folder of JPEGs; `width`: channels of the
    network, which decide how long a step takes."""
    with tempfile.TemporaryDirectory() as folder, mh.Coordinator.local_cluster(mh.Cluster.local(2), threads=1) as two:
        draw_pictures(Path(folder) / "pictures")
        pictures: Any = load_folder(Path(folder) / "pictures", input_shape=SHAPE).train
        samples = [pictures[index] for index in range(len(pictures))]
        tensors = TensorDataset(torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples]))
        plan = by_halves(width, two.cluster().names)
        alone = rate_alone(pictures, steps)
        rates: dict[str, list[float]] = {"folder": [], "memory": []}
        waits = []
        for repeat in range(repeats):
            order = ("folder", "memory") if repeat % 2 else ("memory", "folder")
            for kind in order:
                result = mh.train(
                    network(width), pictures if kind == "folder" else tensors, loss=functional.cross_entropy,
                    optimizer=mh.Optimizer("SGD", lr=0.01), batch_size=BATCH, steps=steps, cluster=two, plan=plan,
                    folder=Path(folder) / f"{kind}-{repeat}", verify=False, backup_every=0,
                )  # fmt: skip
                rates[kind].append(result.throughput)
                if kind == "folder":
                    waits.append(result.data_wait_share)
            say(f"{rates['folder'][-1]:.0f} samples/s from the folder, {rates['memory'][-1]:.0f} from memory")
    ratios = [folder / memory for folder, memory in zip(rates["folder"], rates["memory"])]
    say(f"the loader alone: {alone:.0f} samples/s")
    return LoaderRates(
        statistics.median(ratios), max(ratios) - min(ratios), statistics.median(rates["folder"]),
        statistics.median(rates["memory"]), alone, statistics.median(waits),
    )  # fmt: skip


def network(width: int) -> nn.Module:
    """Return a network of plain convolutions."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        nn.Sequential(nn.Flatten(), nn.Linear(width * 36, CLASSES)),
    )


def by_halves(width: int, names: tuple[str, ...]) -> Plan:
    """Return the plan by which both devices take half of every batch."""
    batch, labels = torch.zeros(4, *SHAPE), torch.zeros(4, dtype=torch.long)
    graph = capture(network(width), batch, loss=functional.cross_entropy, target=labels, granularity="blocks")
    stage = Stage((0, len(graph.network.layers)), names, BySamples((BATCH // 2, BATCH // 2)))
    return Plan("Sequential", BATCH, (stage,))


def draw_pictures(folder: Path) -> None:
    """Write JPEGs of usual size, larger than what is trained on, in one sub-folder per class."""
    random = numpy.random.default_rng(0)
    for number in range(SAMPLES):
        place = folder / f"class-{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = pillow().fromarray(random.integers(0, 256, (12, 16, 3), numpy.uint8))
        coarse.resize((320, 240), pillow().Resampling.BICUBIC).save(place / f"{number:04d}.jpg", quality=90)


def rate_alone(pictures: Any, steps: int) -> float:
    """Return the samples per second that the loader gives when nothing else runs."""
    order = BatchOrder(len(pictures), BATCH, True, 0)
    began = time.monotonic()
    with Prefetcher(pictures, order, 0, steps) as batches:
        for _ in batches:
            pass
    return BATCH * steps / (time.monotonic() - began)
