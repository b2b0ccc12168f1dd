"""A learning rate that falls where the validation's loss no longer does: as in a loop, and so when a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import manyhands as mh

BATCH, SAMPLES, EPOCHS = 8, 32, 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[mh.Coordinator]:
    with mh.Coordinator.local_cluster(mh.Cluster.local(2)) as coordinator:
        yield coordinator


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def rows(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=generator))


def made(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    return optimizer, ReduceLROnPlateau(optimizer, factor=0.3, patience=0)


def by_pytorch() -> tuple[nn.Module, list[float]]:
    model = network()
    optimizer, scheduler = made(model)
    (inputs, targets), (held_out, classes) = rows(1).tensors, rows(2).tensors
    rates = []
    for _ in range(EPOCHS):
        for first in range(0, SAMPLES, BATCH):
            rates.append(optimizer.param_groups[0]["lr"])
            part = slice(first, first + BATCH)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[part]), targets[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            scheduler.step(functional.cross_entropy(model(held_out), classes))
    return model, rates


def train(cluster: mh.Coordinator, folder: Path, **options: Any) -> tuple[nn.Module, Any]:
    model = network()
    optimizer, scheduler = made(model)
    settings: dict[str, Any] = {"epochs": EPOCHS, "validate": rows(2), "validate_every": "epoch", **options}
    mh.train(
        model, rows(1), loss=functional.cross_entropy, optimizer=optimizer, batch_size=BATCH, shuffle=False,
        scheduler={"scheduler": scheduler, "monitor": "loss"}, plan="samples", cluster=cluster, folder=folder,
        **settings,
    )  # fmt: skip
    return model, optimizer


@pytest.mark.slow
def test_a_plateau_is_that_of_a_loop(cluster: mh.Coordinator, tmp_path: Path) -> None:
    expected, rates = by_pytorch()
    assert len(set(rates)) > 2, "the rate falls"
    straight, optimizer = train(cluster, tmp_path / "straight")
    assert optimizer.param_groups[0]["lr"] <= rates[-1]
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(straight.state_dict()[name], tensor, rtol=1e-10, atol=1e-12)
    train(cluster, tmp_path / "stopped", epochs=None, steps=9)  # one step after a validation
    resumed, _ = train(cluster, tmp_path / "stopped", resume=True)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
