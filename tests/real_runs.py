"""Runs over real worker processes: small networks and data, sessions that tests share, what a run must have done."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.executor.messages import COORDINATOR
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.files.documents import read_document
from manyhands.job import base as job
from manyhands.job.result import TrainResult
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.processes import WorkerProcess
from manyhands.schedule.feeding import samples_of
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.policy import Schedule
from manyhands.schedule.tiles import TileGeometry
from manyhands.session import measuring

CLASSES = 5
LAYERS = 3
BATCH = 12
TOLERANCE = 1e-10
SGD = Optimizer("SGD", lr=0.05, momentum=0.9, schedule=[("StepLR", {"step_size": 4, "gamma": 0.7})])
ADAM = Optimizer("Adam", lr=1e-3)


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Drawn pictures and classes. `change` may spoil a sample, or fail to load it."""

    def __init__(
        self,
        samples: int = 6 * BATCH,
        *,
        dtype: torch.dtype = torch.float64,
        change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.pictures = torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
        self.classes = torch.randint(0, CLASSES, (samples,), generator=generator)
        self.change = change

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = (self.pictures[index], self.classes[index])
        return self.change(index, *sample) if self.change is not None else sample


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def network(*, dropout: float = 0.3, dtype: torch.dtype = torch.float64, seed: int = 3) -> nn.Sequential:
    """Convolutions without biases before batch norms, dropout, a linear layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, CLASSES)),
    ).to(dtype)


def shared(devices: tuple[str, ...], *samples: int, **options: Any) -> Plan:
    """One stage, so many samples for each device."""
    stage = Stage((0, LAYERS), devices, BySamples(samples) if len(samples) > 1 else Single())
    return Plan("Sequential", sum(samples), (stage,), **options)


def piped(devices: tuple[str, ...], **options: Any) -> Plan:
    """The first layer shared unequally by two devices, the rest on a third; two micro-batches."""
    stages = (Stage((0, 1), devices[:2], BySamples((2, 4))), Stage((1, LAYERS), devices[2:], Single()))
    return Plan("Sequential", BATCH, stages, micro_batches=2, **options)


def in_line(devices: tuple[str, ...]) -> Plan:
    """One layer after another."""
    stages = tuple(
        Stage((place, place + 1 if place + 1 < len(devices) else LAYERS), (name,), Single())
        for place, name in enumerate(devices)
    )
    return Plan("Sequential", BATCH, stages, micro_batches=2)


def trained_alone(steps: int) -> dict[str, Tensor]:
    """The weights of `network(dropout=0.0)` after some steps of plain PyTorch, with SGD at a rate of 0.05."""
    model, data = network(dropout=0.0), Pictures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        rows = [row % len(data) for row in range(step * BATCH, (step + 1) * BATCH)]
        optimizer.zero_grad()
        functional.cross_entropy(model(data.pictures[rows]), data.classes[rows]).backward()
        optimizer.step()
    return model.state_dict()


@contextlib.contextmanager
def workers(count: int, *, pictures: bool = False, **options: Any) -> Iterator[Coordinator]:
    """Local workers for many runs, which measure little and draw nothing unless asked to."""
    patch = pytest.MonkeyPatch()
    if not pictures:
        patch.setattr(job.Job, "write_pictures", lambda *_: None)
    patch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    try:
        with Coordinator.local_cluster(mh.Cluster.local(count), threads=1, **options) as coordinator:
            yield coordinator
    finally:
        patch.undo()


def names(coordinator: Coordinator) -> tuple[str, ...]:
    return tuple(coordinator.members)


def pid(coordinator: Coordinator, name: str) -> int:
    return coordinator.members[name].facts.pid


def kill(coordinator: Coordinator, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid(coordinator, name), number)


def restart(coordinator: Coordinator) -> None:
    """Workers that were lost join again under their names."""
    gone = [member.name for member in coordinator.members.values() if member.is_lost]
    for name in gone:
        process = coordinator.local.processes.pop(name)
        process.kill()
        process.wait(10)
    coordinator.start_workers([WorkerProcess((name,)) for name in gone], 1, 60)


@dataclass
class Ran:
    """A finished training run."""

    result: TrainResult
    planned: PlannedRun
    model: nn.Module

    @property
    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def assert_as_planned(self) -> None:
        """Every device did its actions over its share, and the bytes between processes are the plan's."""
        result = self.result
        schedule, steps = Schedule(result.plan, self.planned.network), result.steps
        assert set(result.logs) == set(result.plan.devices)
        expected = {pair: size * steps for pair, size in result.planned_bytes.items() if size}
        assert _between({(d, to): n for d, log in result.logs.items() for to, n in log.sent_bytes.items()}) == expected
        came = {(of, d): n for d, log in result.logs.items() for of, n in log.received_bytes.items()}
        assert _between(came) == expected
        for device, log in result.logs.items():
            assert log.rounds == log.same_actions == steps
            assert log.refused_frames == 0
            assert log.actions == [str(action) for action in schedule.every_action(device)]
            geometries = schedule.lowering.work[device].geometries
            rounds = steps * result.plan.micro_batches
            first, last = samples_of(geometries[0], device)
            assert log.samples == (last - first) * rounds
            assert log.operators == sum(geometry.last - geometry.first for geometry in geometries) * rounds
            assert log.elements == sum(computed_elements(geometry, device) for geometry in geometries) * rounds
        written = read_document(result.folder / "devices.json")
        assert isinstance(written, dict)
        assert written["devices"] == {name: log.to_dict() for name, log in result.logs.items()}
        assert {(one["from"], one["to"]): one["bytes_per_step"] for one in written["planned"]} == result.planned_bytes


def computed_elements(geometry: StageGeometry, device: str) -> int:
    """Elements of maps that a device computes as its tile in one pass, by the plan."""
    if not isinstance(geometry, TileGeometry):
        return 0
    made = [made for op in geometry.ops for made in op.outputs if any(name in geometry.maps for name in op.inputs)]
    boxes = geometry.computed[device]
    return sum(boxes[name].volume for name in made if name in geometry.maps and name in boxes)


def _between(counts: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    return {pair: size for pair, size in counts.items() if size and COORDINATOR not in pair}


def train(
    cluster: Any, plan: Any, folder: Path, *, model: nn.Module | None = None, data: Any = None, **options: Any
) -> Ran:
    """`mh.train` with what most tests want."""
    found: list[PlannedRun] = []
    model = model if model is not None else network()
    given = {"loss": functional.cross_entropy, "optimizer": SGD, "batch_size": BATCH, "seed": 5, **options}
    asked = given.pop("on_planned", None)

    def planned(one: PlannedRun) -> None:
        found.append(one)
        if asked is not None:
            asked(one)

    result = mh.train(
        model, data if data is not None else Pictures(), cluster=cluster, plan=plan, folder=folder,
        on_planned=planned, **given,
    )  # fmt: skip
    return Ran(result, found[0], model)


def assert_close(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Weights and buffers, to rounding."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        scale = float(other[name].abs().max()) or 1.0
        difference = float((tensor - other[name]).abs().max()) / scale
        assert difference <= tolerance, (name, difference)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Weights and buffers, to the last bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def marked(mark: str) -> list[psutil.Process]:
    """Processes with this text in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MANYHANDS_MARK") == mark:
                found.append(process)
    return found
