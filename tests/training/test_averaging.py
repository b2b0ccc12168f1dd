"""ema= of mh.train: PyTorch's AveragedModel, in checkpoints, after a loss and when resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from manyhands.facts.errors import BadPlan, BadValue
from manyhands.runtime.coordinator import Coordinator
from real_runs import BATCH, Pictures, Ran, assert_close, in_line, kill, names, network, restart, shared, train, workers

pytestmark = pytest.mark.xdist_group("averaging")  # its workers are started once
STEPS, DECAY = 6, 0.6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(3) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """The averaged state of plain PyTorch."""
    model, data = network(dropout=0.0), Pictures()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    for step in range(STEPS):
        samples = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
        x, y = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        averaged.update_parameters(model)
    return averaged.module.state_dict()


def averaged(cluster: Coordinator, plan: Any, folder: Path, **options: Any) -> Ran:
    given = {"ema": DECAY, "steps": STEPS, "shuffle": False, "model": network(dropout=0.0), **options}
    return train(cluster, plan, folder, **given)


@pytest.mark.slow
@pytest.mark.quick("samples")
@pytest.mark.parametrize("way", ["samples", "pipeline"])
def test_the_average_is_that_of_pytorch(
    cluster: Coordinator, expected: dict[str, Tensor], tmp_path: Path, way: str
) -> None:
    devices = names(cluster)
    ran = averaged(cluster, shared(devices, 3, 4, 5) if way == "samples" else "pipeline", tmp_path, micro_batches=1)
    ema = ran.result.ema
    assert ema is not None
    assert_close(ema, expected)
    assert any(not torch.equal(ema[name], tensor) for name, tensor in ran.state.items())
    network().load_state_dict(ema)
    assert_close(load_file(ran.result.checkpoint / "ema.safetensors"), expected)
    assert_close(load_file(ran.result.checkpoint / "model.safetensors"), ran.state)


@pytest.mark.slow
def test_a_run_that_loses_a_worker_has_the_same_average(
    cluster: Coordinator, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    """A pipeline: what the lost one averaged is in the copy that another keeps."""

    def lose(step: int, loss: float, seconds: float) -> None:
        if step == 2:
            kill(cluster, names(cluster)[1])

    plan = in_line(names(cluster))
    plan = type(plan)(plan.network, BATCH, plan.stages)
    try:
        ran = averaged(cluster, plan, tmp_path, on_step=lose, backup_every=1)
    finally:
        restart(cluster)
    assert len(ran.result.recoveries) == 1
    assert ran.result.ema is not None
    assert_close(ran.result.ema, expected)


@pytest.mark.slow
def test_a_resumed_run_goes_on_averaging(cluster: Coordinator, expected: dict[str, Tensor], tmp_path: Path) -> None:
    plan = shared(names(cluster), 3, 4, 5)
    averaged(cluster, plan, tmp_path, steps=3)
    for decay in (None, 0.5):
        with pytest.raises(BadValue, match=f"was started with ema = 0.6; it is now {decay}"):
            averaged(cluster, plan, tmp_path, resume=True, ema=decay)
    ran = averaged(cluster, plan, tmp_path, resume=True)
    assert ran.result.ema is not None
    assert_close(ran.result.ema, expected)


def test_a_gateway_is_refused(cluster: Coordinator, tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match="has a gateway, which alone steps them"):
        averaged(cluster, shared(names(cluster), 3, 4, 5), tmp_path, reduce="gateway")
