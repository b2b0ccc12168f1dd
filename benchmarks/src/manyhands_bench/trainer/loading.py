"""Training from a folder of JPEG pictures, beside training on the same samples in memory, on two cores.

    loader   a torch.utils.data.DataLoader over the folder, with a process that decodes
    folder   the folder as it is: pictures are decoded by threads of the coordinator
    memory   the decoded pictures, as tensors

All train the same network by the same plan on two local workers, one after the other, several times: a ratio is taken
of neighbours, as a machine's speed changes with time. The processes keep to two cores, which decoding takes time from.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.data.loader import Prefetcher
from manyhands.data.order import BatchOrder
from manyhands.data.pictures import load_folder, pillow
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.graph.capture import capture
from manyhands_bench.trainer.processes import ProcessTask, printed_by

MODULE = "manyhands_bench.trainer.loading"
CORES = 2
SHAPE = (3, 96, 96)
SAMPLES, BATCH, CLASSES = 192, 16, 3
KINDS = ("loader", "folder", "memory")


@dataclass(frozen=True)
class LoadingSetting:
    """The network and the number of steps."""

    steps: int = 24
    repeats: int = 5
    width: int = 96
    """Channels of the network, which decide how long a step takes."""


@dataclass(frozen=True)
class LoaderRates:
    """Rates in samples per second."""

    loader_ratio: float
    """The rate by the DataLoader over the rate from memory: the median over the repeats."""
    loader_ratio_spread: float
    """The largest of these ratios less the smallest."""
    loader_ratio_folder: float
    """The same of the folder as it is."""
    loader_samples_per_second: float
    folder_samples_per_second: float
    memory_samples_per_second: float
    loader_alone_samples_per_second: float
    """What the DataLoader gives when nothing is trained."""
    folder_alone_samples_per_second: float
    loader_wait_share: float
    """The part of the time of training by the DataLoader in which all devices waited for data."""
    loader_keeps_up: int
    """Whether the DataLoader alone gives more than is trained from memory: else the ratio says nothing of training."""


def on_two_cores(setting: LoadingSetting = LoadingSetting()) -> dict[str, float]:
    """Return the rates as measured by a process that keeps to two cores."""
    with tempfile.TemporaryDirectory() as folder:
        return printed_by(ProcessTask(MODULE, setting, Path(folder), Path(folder) / "home"))


def main() -> None:
    """Keep to two cores, measure, and print the rates as JSON."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    setting = LoadingSetting(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(loader_rates(setting, say=lambda text: print(text, file=sys.stderr)))))


def loader_rates(setting: LoadingSetting, say: Callable[[str], None] = lambda text: None) -> LoaderRates:
    """Measure how much of the rate of samples in memory is reached from a folder of JPEGs."""
    with tempfile.TemporaryDirectory() as folder, mh.Coordinator.local_cluster(mh.Cluster.local(2), threads=1) as two:
        draw_pictures(Path(folder) / "pictures")
        pictures: Any = load_folder(Path(folder) / "pictures", input_shape=SHAPE).train
        samples = [pictures[index] for index in range(len(pictures))]
        tensors = TensorDataset(torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples]))
        plan = by_halves(setting.width, two.cluster().names)
        alone = {"loader": _rate_of_loader(pictures, setting.steps), "folder": rate_alone(pictures, setting.steps)}
        say(f"alone: {alone}")
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        waits = []
        for repeat in range(setting.repeats):
            for place in range(len(KINDS)):
                kind = KINDS[(repeat + place) % len(KINDS)]
                result = mh.train(
                    network(setting.width), data_of(kind, pictures, tensors), loss=functional.cross_entropy,
                    optimizer=mh.Optimizer("SGD", lr=0.01), batch_size=BATCH, steps=setting.steps, cluster=two,
                    plan=plan, folder=Path(folder) / f"{kind}-{repeat}", verify=False, backup_every=0,
                )  # fmt: skip
                rates[kind].append(result.throughput)
                if kind == "loader":
                    waits.append(result.data_wait_share)
            say(", ".join(f"{kind}: {rates[kind][-1]:.0f} samples/s" for kind in KINDS))
    ratios, folder_ratios = (
        [rate / memory for rate, memory in zip(rates[kind], rates["memory"], strict=True)]
        for kind in ("loader", "folder")
    )
    medians = {kind: statistics.median(each) for kind, each in rates.items()}
    return LoaderRates(
        statistics.median(ratios), max(ratios) - min(ratios), statistics.median(folder_ratios), medians["loader"],
        medians["folder"], medians["memory"], alone["loader"], alone["folder"], statistics.median(waits),
        int(alone["loader"] > medians["memory"]),
    )  # fmt: skip


def data_of(kind: str, pictures: Any, tensors: TensorDataset) -> Any:
    """Return the data of one kind of training."""
    return {"loader": data_loader(pictures), "folder": pictures, "memory": tensors}[kind]


def data_loader(pictures: Any) -> DataLoader[Any]:
    return DataLoader(
        pictures, BATCH, shuffle=True, num_workers=1, drop_last=True, persistent_workers=True, prefetch_factor=4
    )


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
    """Return the samples per second that the coordinator's threads decode when nothing else runs."""
    order = BatchOrder(len(pictures), BATCH, True, 0)
    with Prefetcher(pictures, order, 0, steps) as batches:
        return _rate(batches)


def _rate_of_loader(pictures: Any, steps: int) -> float:
    """Return the samples per second that the DataLoader gives when nothing else runs, from its second batch on."""
    loader = data_loader(pictures)
    return _rate(batch for _ in range(-(-steps // len(loader))) for batch in loader)


def _rate(batches: Iterable[Any]) -> float:
    """Return the samples per second from the second batch on: the first also waits for processes to start."""
    ends = [time.monotonic() for _ in batches]
    return BATCH * (len(ends) - 1) / (ends[-1] - ends[0])


if __name__ == "__main__":
    main()
