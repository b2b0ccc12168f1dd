"""The effect of decoupling on accuracy (DECNN Table 2): a ResNet and its decoupled forms, real pictures, several seeds.

It is the network that is judged, so trainings are plain PyTorch, each in one process; for a seed, all see the same
pictures in the same order, with the same settings. Trainings that are already in `accuracy.jsonl` are not run again.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from manyhands.data.sets import load
from manyhands.decoupling.decouple import decouple
from manyhands.facts.errors import BadValue
from manyhands.models.resnet import ResNet
from manyhands_bench.figures import Figures, Progress

GROUPS = 4
KEPT = "accuracy.jsonl"
LEAST_TESTED = 1000
TESTED_AT_ONCE = 500
_PADDING = 4


@dataclass(frozen=True)
class DecoupledVariant:
    """A network: the original (widen 0), or decoupled."""

    widen: float = 0.0
    shuffles: int | str = 0

    def __str__(self) -> str:
        return f"x{self.widen:g}_{self.shuffles}shuffles" if self.widen else "original"


WAYS = (
    DecoupledVariant(),
    *(DecoupledVariant(widen, shuffles) for widen in (1.0, 1.5, 1.75) for shuffles in (0, 3, "all")),
)


@dataclass(frozen=True)
class Accuracy:
    """The amount and the settings of training."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    shape: tuple[int, int, int] = (3, 32, 32)
    samples: int = 50_000
    tested: int = 10_000
    epochs: int = 10
    batch: int = 512
    learning_rate: float = 0.2
    seeds: int = 3
    ways: tuple[DecoupledVariant, ...] = WAYS
    compute: str = "cpu"
    at_once: int = 1
    """Trainings side by side, each in a process of its own."""

    @property
    def text(self) -> str:
        numbers = "bfloat16" if self.compute != "cpu" else "float32"
        return (
            f"ResNet of {'+'.join(map(str, self.blocks))} blocks with a stem for small pictures, "
            f"{'x'.join(map(str, self.shape))}, {self.samples} pictures to train on and {self.tested} held out, "
            f"{self.epochs} epochs in batches of {self.batch}, SGD with one cycle up to {self.learning_rate:g}, "
            f"momentum 0.9, weight decay 5e-4, shifts and flips, {self.compute}, {numbers}; "
            f"decoupled: {GROUPS} groups, fresh weights"
        )


SHORT = Accuracy(
    (1, 1, 1, 1),
    (3, 16, 16),
    4_000,
    1_000,
    4,
    64,
    0.05,
    1,
    (DecoupledVariant(), DecoupledVariant(1.5, 0), DecoupledVariant(1.5, 3)),
)
"""An extent of a few minutes on two cores: too short to tell networks apart by a per cent."""

Rows = dict[str, list[float]]
"""Way -> accuracy of each seed."""


def bench_accuracy(setting: Accuracy, pictures: Path, out: Path | None, say: Progress) -> tuple[Figures, Rows]:
    """Return the accuracy on held-out pictures for every way and seed, as figures and as rows."""
    if not pictures.exists():
        return {"accuracy_setting": f"left out: there is no {pictures} (--pictures)"}, {}
    jobs = [(way, seed) for seed in range(setting.seeds) for way in setting.ways]
    scores_by_training = dict(_kept(setting, out))
    missing = [job for job in jobs if _key(*job) not in scores_by_training]
    for (way, seed), score in _trained(setting, pictures, missing, say):
        scores_by_training[_key(way, seed)] = score
        say(f"accuracy of {way}, seed {seed}: {score:.4f} ({len(scores_by_training)} of {len(jobs)})")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with (out / KEPT).open("a") as file:
                file.write(json.dumps({"setting": _facts(setting), "way": _key(way, seed), "accuracy": score}) + "\n")
    rows: Rows = {
        str(way): [scores_by_training[_key(way, seed)] for seed in range(setting.seeds)] for way in setting.ways
    }
    figures: Figures = {f"accuracy_{name}": statistics.fmean(scores) for name, scores in rows.items()}
    for name, scores in rows.items():
        if len(scores) > 1:
            figures[f"accuracy_{name}_deviation"] = statistics.stdev(scores)
        if name != "original":
            figures[f"accuracy_change_{name}"] = statistics.fmean(
                score - plain for score, plain in zip(scores, rows["original"], strict=True)
            )
    return figures | {
        "accuracy_setting": f"CIFAR-10, JPEG copy; {setting.text}; seeds: {setting.seeds}, means",
    }, rows


def _key(way: DecoupledVariant, seed: int) -> str:
    return f"{way} seed {seed}"


def _facts(setting: Accuracy) -> dict[str, Any]:
    """Return the settings on which a training's outcome depends."""
    apart = ("seeds", "ways", "at_once")
    return json.loads(json.dumps({name: value for name, value in asdict(setting).items() if name not in apart}))  # type: ignore[no-any-return]


def _kept(setting: Accuracy, out: Path | None) -> Iterator[tuple[str, float]]:
    if out is None or not (out / KEPT).exists():
        return
    for line in (out / KEPT).read_text().splitlines():
        record = json.loads(line)
        if record["setting"] == _facts(setting):
            yield record["way"], record["accuracy"]


Job = tuple[DecoupledVariant, int]


def _trained(setting: Accuracy, path: Path, jobs: list[Job], say: Progress) -> Iterable[tuple[Job, float]]:
    if not jobs:
        return
    with tempfile.TemporaryDirectory() as folder:
        say(f"unpacking {setting.samples + setting.tested} pictures")
        _unpack(setting, path, Path(folder))
        if setting.at_once == 1:
            for job in jobs:
                say(f"training {_key(*job)}")
                yield job, train(setting, Path(folder), *job)
            return
        with ProcessPoolExecutor(setting.at_once, get_context("spawn")) as pool:
            futures = {pool.submit(train, setting, Path(folder), *job): job for job in jobs}
            for future in as_completed(futures):
                yield futures[future], future.result()


def _unpack(setting: Accuracy, path: Path, folder: Path) -> None:
    """Decode the pictures once, for all trainings."""
    sets = load(path, input_shape=setting.shape)
    if sets.test is None or setting.tested < LEAST_TESTED:
        raise BadValue(f"{path} has no held-out pictures, or fewer than {LEAST_TESTED} are asked for.")
    for name, data, count in (("train", sets.train, setting.samples), ("test", sets.test, setting.tested)):
        rows = [data[index] for index in range(count)]
        numpy.save(folder / f"{name}_x.npy", torch.stack([row[0] for row in rows]).numpy())
        numpy.save(folder / f"{name}_y.npy", numpy.array([int(row[1]) for row in rows]))


def network(setting: Accuracy, way: DecoupledVariant) -> nn.Module:
    model = ResNet(setting.blocks, bottleneck=False, num_classes=10, small_images=True)
    if not way.widen:
        return model
    return decouple(model, GROUPS, way.shuffles, way.widen, inputs=setting.shape)  # type: ignore[arg-type]


def train(setting: Accuracy, folder: Path, way: DecoupledVariant, seed: int) -> float:
    """Train once, and return the accuracy on held-out pictures."""
    device = torch.device(setting.compute)
    torch.manual_seed(seed)
    model = network(setting, way).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, y = (torch.from_numpy(numpy.load(folder / f"train_{axis}.npy")).to(device) for axis in "xy")
    steps = setting.epochs * (setting.samples // setting.batch)
    optimizer = torch.optim.SGD(
        model.parameters(), setting.learning_rate, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setting.learning_rate, total_steps=steps, pct_start=0.25)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for batch, labels in _batches(setting, x, y, generator):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            loss = cross_entropy(model(batch), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return _tested(model, folder, device)


def _batches(setting: Accuracy, x: Tensor, y: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs, each epoch in another order: half of a batch is flipped, and either half is
    shifted as a whole at random."""
    side, half = setting.shape[-1], setting.batch // 2
    shift = _PADDING * side // 32
    for _ in range(setting.epochs):
        order = torch.randperm(len(x), generator=generator)
        for first in range(0, len(x) - setting.batch + 1, setting.batch):
            chosen = order[first : first + setting.batch].to(x.device)
            parts = []
            for part in (x[chosen[:half]], x[chosen[half:]]):
                row, column = torch.randint(0, 2 * shift + 1, (2,), generator=generator).tolist()
                parts.append(pad(part, (shift,) * 4)[..., row : row + side, column : column + side])
            batch = torch.cat([parts[0].flip(-1), parts[1]]).contiguous(memory_format=torch.channels_last)
            yield batch, y[chosen]


@torch.no_grad()
def _tested(model: nn.Module, folder: Path, device: torch.device) -> float:
    model.eval()
    x, y = (torch.from_numpy(numpy.load(folder / f"test_{axis}.npy")).to(device) for axis in "xy")
    right = 0
    for first in range(0, len(x), TESTED_AT_ONCE):
        batch = x[first : first + TESTED_AT_ONCE].contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            right += int((model(batch).argmax(1) == y[first : first + TESTED_AT_ONCE]).sum())
    return right / len(x)
