"""A way of sharing from outside on real workers: they run it where its package is installed, and refuse it by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from interleaved import NAME, ByInterleavedSamples, install

from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import Plan, Stage
from real_runs import BATCH, CLASSES, LAYERS, assert_close, names, shared, train, workers

pytestmark = [pytest.mark.xdist_group("extended_processes"), pytest.mark.usefixtures("registered")]


def undrawn() -> torch.nn.Sequential:
    """Returns batch norms and convolutions, and nothing that draws random numbers."""
    torch.manual_seed(3)
    nn = torch.nn
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)),
    ).double()


def interleaved(devices: tuple[str, ...]) -> Plan:
    return Plan("Sequential", BATCH, (Stage((0, LAYERS), devices, ByInterleavedSamples()),), micro_batches=2)


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_fork_servers: None) -> None:
    """Workers that start now have the package, as after `pip install` on their devices."""
    install(tmp_path)
    folders = [str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_workers_that_have_the_package_train_as_one_device_does(tmp_path: Path) -> None:
    with workers(2) as coordinator:
        devices = names(coordinator)
        alone = train(coordinator, shared(devices[:1], BATCH, micro_batches=2), tmp_path / "one", model=undrawn())
        ran = train(coordinator, interleaved(devices), tmp_path / "two", model=undrawn())
    ran.assert_as_planned()
    assert_close(ran.state, alone.state)


@pytest.mark.slow
def test_workers_without_the_package_refuse_the_plan_by_name(tmp_path: Path) -> None:
    with workers(2) as coordinator, pytest.raises(BadPlan, match=f"shared by '{NAME}', which is not regist") as error:
        train(coordinator, interleaved(names(coordinator)), tmp_path / "run", model=undrawn())
    assert "manyhands.sharing" in error.value.hint
