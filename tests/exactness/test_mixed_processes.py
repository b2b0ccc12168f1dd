"""Tiles, samples and single devices in one plan, over real processes: equal to one device, done as planned.

A map of the first stage is read by the third as well, so it goes past the stage between, and its gradient comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.models.mobilenet import SqueezeExcite
from manyhands.runtime.coordinator import Coordinator
from manyhands.schedule.policy import Schedule
from real_runs import BATCH, CLASSES, Pictures, Ran, assert_close, names, train, workers

pytestmark = [
    pytest.mark.xdist_group("mixed_processes"),  # its workers are started once
    pytest.mark.usefixtures("strangers"),
]

STEPS = 4
MICRO_BATCHES = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(4) as coordinator:
        yield coordinator


class Hourglass(nn.Module):
    """Four layers: a stem, down and up again, both joined, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.down = nn.Sequential(
            nn.Conv2d(4, 6, 3, 2, 1), SqueezeExcite(6, 3, activation=nn.ReLU(), gate=nn.Sigmoid()),
            nn.ConvTranspose2d(6, 4, 2, 2),
        )  # fmt: skip
        self.joined = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU())
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        out: Tensor = self.last(self.joined(torch.cat([self.down(fine), fine], 1)))
        return out


def plan_called(kind: str, devices: tuple[str, ...]) -> Plan:
    one, two, three, four = devices
    stages: tuple[Stage, ...]
    if kind == "1f1b":  # every device in one stage
        stages = (
            Stage((0, 1), (one,), Single()),
            Stage((1, 3), (two, three), ByTiles((1,), (1, 2), None, (1,))),
            Stage((3, 4), (four,), Single()),
        )
    else:  # tiles on those that have samples next
        stages = (
            Stage((0, 1), (one, two, three), ByTiles((2, 1, 1))),
            Stage((1, 2), (two, three), BySamples((3, 1)), reduce="gateway"),
            Stage((2, 3), (four, one), ByTiles((1, 2), (1,), (2,))),
            Stage((3, 4), (four,), Single()),
        )
    return Plan("Hourglass", BATCH, stages, MICRO_BATCHES, "1f1b" if kind == "1f1b" else "gpipe")


@pytest.fixture(scope="module")
def expected(cluster: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One of the devices alone."""
    plan = Plan("Hourglass", BATCH, (Stage((0, 4), names(cluster)[:1], Single()),), MICRO_BATCHES)
    return train(cluster, plan, tmp_path_factory.mktemp("one"), model=Hourglass().double(), steps=STEPS)


class Pooled(nn.Module):
    """Five operators; pooling, the fourth, has no weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.pool(self.stem(x)).flatten(1))
        return out


@pytest.mark.quick("first of its stage")
@pytest.mark.parametrize("kind", ["helping", "first of its stage"])
def test_devices_without_weights_equal_plain_pytorch(cluster: Coordinator, tmp_path: Path, kind: str) -> None:
    """One of a stage's devices has no state at all; where it is the stage's first, snapshots ask it for that."""
    one, two, three, _ = names(cluster)
    pooling = (one, two) if kind == "helping" else (two, three)
    stages = Stage((0, 3), (one,), Single()), Stage((3, 4), pooling, ByTiles((2, 1))), Stage((4, 5), (one,), Single())
    data, module = Pictures(STEPS * 6), Pooled().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, y in zip(data.pictures.split(6), data.classes.split(6)):
        loss = functional.cross_entropy(module(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    ran = train(
        cluster, Plan("Pooled", 6, stages), tmp_path / "run", model=Pooled().double(), data=data, batch_size=6,
        steps=STEPS, shuffle=False, optimizer=Optimizer("SGD", lr=0.05, momentum=0.9), backup_every=1,
        granularity="operators",
    )  # fmt: skip
    work = Schedule(ran.result.plan, ran.planned.network).lowering.work
    assert {name for name in names(cluster) if name in work and not work[name].weights()} == {*pooling} - {one}
    assert_close(ran.state, module.state_dict())
    assert ran.result.losses == pytest.approx(losses, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_mixed_plans_equal_one_device(cluster: Coordinator, expected: Ran, tmp_path: Path, kind: str) -> None:
    plan = plan_called(kind, names(cluster))
    ran = train(cluster, plan, tmp_path / "mixed", model=Hourglass().double(), steps=STEPS)
    ran.assert_as_planned()
    assert not ran.result.traffic.differences(ran.result.logs, ran.result.plan)
    assert_close(ran.state, expected.state)
    assert ran.result.losses == pytest.approx(expected.result.losses, rel=1e-10)
