"""Several steps of a loop that make one update: the sum of their gradients lives on the workers, and survives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from manyhands.executor.rates import Accumulation
from manyhands.facts.plan import ByTiles, Plan, Single, Stage
from manyhands.runtime.coordinator import Coordinator
from manyhands.training.prepare import PreparedStep
from manyhands.training.prepare_config import PrepareConfig
from real_runs import BATCH, LAYERS, Pictures, kill, names, network, shared, workers

pytestmark = pytest.mark.xdist_group("training")

CLIP = 0.05
GROUPS = (3, 2, 1)
"""Steps of each update."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(x, y) for x, y in DataLoader(Pictures(sum(GROUPS) * BATCH), BATCH)]


def accumulations() -> list[Accumulation]:
    return [Accumulation(1 / size, place == size - 1) for size in GROUPS for place in range(size)]


def made(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def alone() -> tuple[nn.Module, list[float]]:
    """One device, in plain PyTorch."""
    model, losses = network(dropout=0.0), []
    optimizer = made(model)
    for (x, y), accumulation in zip(batches(), accumulations()):
        loss = functional.cross_entropy(model(x), y)
        (loss * accumulation.share).backward()
        if accumulation.updates:
            assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def prepared(cluster: Coordinator, folder: Path, model: nn.Module, plan: Any, **options: Any) -> PreparedStep:
    options = {"cluster": cluster, "plan": plan, "folder": folder / "run", "clip_norm": CLIP, **options}
    config = PrepareConfig.from_keywords("a test", options)
    return PreparedStep(config, model, functional.cross_entropy, made(model), None, is_accumulated=True)


def plans(devices: tuple[str, ...]) -> dict[str, Plan]:
    stages = (Stage((0, 1), devices[:1], Single()), Stage((1, LAYERS), devices[1:], Single()))
    tiled = (Stage((0, 2), devices, ByTiles((1, 1), (1,))), Stage((2, LAYERS), devices[:1], Single()))
    return {
        "samples": shared(devices, 5, 7),
        "pipeline": Plan("Sequential", BATCH, stages),
        "tiles": Plan("Sequential", BATCH, tiled),
    }


def assert_alike(model: nn.Module, plain: nn.Module) -> None:
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("plan", ["samples", "pipeline", "tiles"])
def test_several_steps_make_one_update(cluster: Coordinator, tmp_path: Path, plan: str) -> None:
    """A pause in the midst of an update takes its gradients along."""
    plain, losses = alone()
    model = network(dropout=0.0)
    found = []
    with prepared(cluster, tmp_path, model, plans(names(cluster))[plan]) as step:
        for number, ((x, y), accumulation) in enumerate(zip(batches(), accumulations())):
            found.append(step.push(x, y, accumulation))
            if number == 1:
                assert torch.equal(step.state_dict()["2.2.weight"], network(dropout=0.0)[2][2].weight)
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=1e-10)
    assert_alike(model, plain)


@pytest.mark.slow
def test_a_worker_that_is_lost_in_the_midst_of_an_update(tmp_path: Path) -> None:
    plain, losses = alone()
    model = network(dropout=0.0)
    found = []
    with workers(2) as cluster, prepared(cluster, tmp_path, model, "samples") as step:
        victim = names(cluster)[1]
        for number, ((x, y), accumulation) in enumerate(zip(batches(), accumulations())):
            found.append(step.push(x, y, accumulation))
            if number == 1:
                found[-1].item()
                kill(cluster, victim)
        found[-1].item()
        assert cluster.members[victim].is_lost, "the fault must fire"
        step.state_dict()
        assert [fact["devices"] for fact in step.recoveries] == [[names(cluster)[0]]]
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=1e-10)
    assert_alike(model, plain)
