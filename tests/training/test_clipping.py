"""clip_norm and clip_value of mh.train: equal to PyTorch's, logged, the same after a loss and when resumed."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.facts.errors import BadValue
from manyhands.facts.plan import Plan
from manyhands.runtime.coordinator import Coordinator
from manyhands.training.config import TrainConfig
from real_runs import (
    BATCH,
    SGD,
    Pictures,
    Ran,
    assert_close,
    in_line,
    kill,
    names,
    network,
    restart,
    shared,
    train,
    workers,
)

pytestmark = pytest.mark.xdist_group("clipping")  # its workers are started once
STEPS, NORM = 6, 0.7


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(3) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms of plain PyTorch."""
    return by_pytorch(lambda weights: float(nn.utils.clip_grad_norm_(weights, NORM)))


def by_pytorch(clip: Any) -> tuple[dict[str, Tensor], list[float]]:
    model, data, norms = network(dropout=0.0), Pictures(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    assert SGD.schedule[0] == ("StepLR", {"step_size": 4, "gamma": 0.7})
    for step in range(STEPS):
        samples = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
        x, y = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        norms.append(clip(list(model.parameters())))
        optimizer.step()
        schedule.step()
    return model.state_dict(), norms


def clipped(cluster: Coordinator, plan: Plan | str, folder: Path, **options: Any) -> Ran:
    given = {"clip_norm": NORM, "steps": STEPS, "shuffle": False, "model": network(dropout=0.0), **options}
    return train(cluster, plan, folder, **given)


def written_norms(folder: Path) -> list[float]:
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row["grad_norm"]) for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.quick("samples")
@pytest.mark.parametrize("way", ["samples", "line", "auto"])
def test_training_clips_as_pytorch(
    cluster: Coordinator, expected: tuple[dict[str, Tensor], list[float]], tmp_path: Path, way: str
) -> None:
    devices = names(cluster)
    plans: dict[str, Any] = {"samples": shared(devices, 3, 4, 5), "line": in_line(devices), "auto": "auto"}
    plan = plans[way]
    if way == "line":  # batch norm takes its statistics over the whole batch
        plan = Plan(plan.network, BATCH, plan.stages)
    ran = clipped(cluster, plan, tmp_path)
    ran.assert_as_planned()
    weights, norms = expected
    assert_close(ran.state, weights)
    assert min(norms) < NORM < max(norms) or min(norms) > NORM
    assert ran.result.grad_norms == pytest.approx(norms, rel=1e-10, abs=0)
    assert written_norms(tmp_path) == ran.result.grad_norms
    assert ran.result.plan.gradient_norm


@pytest.mark.slow
def test_values_are_clipped_as_by_pytorch(cluster: Coordinator, tmp_path: Path) -> None:
    weights, _ = by_pytorch(lambda weights: nn.utils.clip_grad_value_(weights, 0.02))
    ran = clipped(cluster, shared(names(cluster), 3, 4, 5), tmp_path, clip_norm=None, clip_value=0.02)
    assert_close(ran.state, weights)
    assert ran.result.grad_norms == []
    assert not ran.result.plan.gradient_norm


@pytest.mark.slow
def test_a_run_that_loses_a_worker_has_the_same_norms(
    cluster: Coordinator, expected: tuple[dict[str, Tensor], list[float]], tmp_path: Path
) -> None:
    def lose(step: int, loss: float, seconds: float) -> None:
        if step == 2:
            kill(cluster, names(cluster)[1])

    try:
        ran = clipped(cluster, shared(names(cluster), 3, 4, 5), tmp_path, on_step=lose, backup_every=1)
    finally:
        restart(cluster)
    weights, norms = expected
    assert len(ran.result.recoveries) == 1
    assert len(ran.result.plan.devices) == 2
    assert_close(ran.state, weights)
    assert ran.result.grad_norms == pytest.approx(norms, rel=1e-10, abs=0)
    assert written_norms(tmp_path) == ran.result.grad_norms


@pytest.mark.slow
def test_a_resumed_run_goes_on_clipping(
    cluster: Coordinator, expected: tuple[dict[str, Tensor], list[float]], tmp_path: Path
) -> None:
    plan = shared(names(cluster), 3, 4, 5)
    clipped(cluster, plan, tmp_path, steps=3)
    for limits in ({"clip_norm": 2 * NORM}, {"clip_norm": None}, {"clip_norm": None, "clip_value": 1.0}):
        with pytest.raises(BadValue, match=r"was started with clip_(norm|value) = .*; it is now"):
            clipped(cluster, plan, tmp_path, resume=True, **limits)
    ran = clipped(cluster, plan, tmp_path, resume=True)
    weights, norms = expected
    assert_close(ran.state, weights)
    assert ran.result.grad_norms == pytest.approx(norms, rel=1e-10, abs=0)


def test_limits_that_are_refused() -> None:
    with pytest.raises(BadValue, match="clip_norm is 0; it must be more than 0"):
        TrainConfig(clip_norm=0)
    with pytest.raises(BadValue, match="order in which both would be applied") as refused:
        TrainConfig(clip_norm=1.0, clip_value=1.0)
    assert refused.value.hint == "Give one of them."
