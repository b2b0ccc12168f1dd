"""`mh.train` with PyTorch's own optimizers and schedulers: as in a loop, and so when a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.facts.errors import BadValue

BATCH, SAMPLES, EPOCHS = 8, 32, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[mh.Coordinator]:
    with mh.Coordinator.local_cluster(mh.Cluster.local(2)) as coordinator:
        yield coordinator


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(),
        nn.Linear(8, 3),
    ).double()  # fmt: skip


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(pictures, torch.randint(0, 3, (SAMPLES,), generator=generator))


def made(model: nn.Module) -> tuple[Any, Any]:
    """No decay for biases; a rate by a function, stepped once in an epoch."""
    kernels = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": kernels}, {"params": biases, "weight_decay": 0.0}], lr=0.01)
    return optimizer, lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch)])


def loop(model: nn.Module, optimizer: Any, scheduler: Any, epochs: int = EPOCHS) -> None:
    pictures, classes = data().tensors
    for _ in range(epochs):
        for first in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            part = slice(first, first + BATCH)
            functional.cross_entropy(model(pictures[part]), classes[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        scheduler.step()


def train(cluster: Any, model: nn.Module, optimizer: Any, scheduler: Any, **options: Any) -> Any:
    given = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "plan": "samples", **options}
    return mh.train(
        model, data(), loss=functional.cross_entropy, optimizer=optimizer, scheduler=scheduler, cluster=cluster, **given
    )


def assert_alike(ours: nn.Module, theirs: nn.Module, optimizer: Any, expected: Any) -> None:
    """Weights, and all that the optimizers keep."""
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
        for key, value in expected.state[other].items():
            torch.testing.assert_close(torch.as_tensor(optimizer.state[mine][key]), value, rtol=1e-10, atol=1e-14)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in expected.param_groups]


@pytest.mark.slow
def test_a_run_and_then_a_loop_and_another_run(cluster: mh.Coordinator, tmp_path: Path) -> None:
    """What a run leaves in the model, the optimizer and the scheduler is what a loop leaves in them."""
    model, plain = network(), network()
    optimizer, scheduler = made(model)
    expected, theirs = made(plain)
    settings = {"scheduler": scheduler, "interval": "epoch"}
    train(cluster, model, optimizer, settings, folder=tmp_path / "first")
    loop(plain, expected, theirs)
    assert_alike(model, plain, optimizer, expected)
    loop(model, optimizer, scheduler, 1)
    loop(plain, expected, theirs, 1)
    train(cluster, model, optimizer, settings, folder=tmp_path / "second", epochs=1)
    loop(plain, expected, theirs, 1)
    assert_alike(model, plain, optimizer, expected)
    assert scheduler.last_epoch == theirs.last_epoch


@pytest.mark.slow
@pytest.mark.parametrize("how", ["samples", "pipeline", "tiles"])
def test_each_way_of_sharing(cluster: mh.Coordinator, tmp_path: Path, how: str) -> None:
    model, plain = network(), network()
    optimizer, scheduler = made(model)
    expected, theirs = made(plain)
    train(cluster, model, optimizer, {"scheduler": scheduler, "interval": "epoch"}, folder=tmp_path, plan=how)
    loop(plain, expected, theirs)
    assert_alike(model, plain, optimizer, expected)


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal(cluster: mh.Coordinator, tmp_path: Path) -> None:
    def run(folder: str, **options: Any) -> tuple[nn.Module, Any]:
        model = network()
        optimizer, scheduler = made(model)
        settings = {"scheduler": scheduler, "interval": "epoch"}
        return model, train(cluster, model, optimizer, settings, folder=tmp_path / folder, **options).plan

    straight, plan = run("straight")
    run("stopped", epochs=None, steps=6, plan=plan)  # in the midst of the second epoch
    resumed, _ = run("stopped", epochs=EPOCHS, resume=True, plan=plan)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    model = network()
    others = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(BadValue, match=r"started with the optimizer AdamW\(.*with 1 more group") as caught:
        train(cluster, model, others, None, folder=tmp_path / "stopped", resume=True, epochs=4)
    assert "groups" in caught.value.hint
    another, _ = made(model)
    decayed = lr_scheduler.ExponentialLR(another, 0.9)
    with pytest.raises(BadValue, match=r"learning rates and momenta were .* by the schedule given now"):
        train(cluster, model, another, decayed, folder=tmp_path / "stopped", resume=True, epochs=4)


def test_a_plateau_without_validation_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="ReduceLROnPlateau needs the 'loss' of a validation"):
        train(None, network(), mh.Optimizer("SGD", lr=0.1), lr_scheduler.ReduceLROnPlateau, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_function_that_raises_in_the_midst(cluster: mh.Coordinator, tmp_path: Path) -> None:
    def rate(step: int) -> float:
        return 1.0 if step < 6 else 1 / 0

    with pytest.raises(BadValue, match="The schedule LambdaLR cannot go on after step 5: division by zero"):
        train(
            cluster, network(), mh.Optimizer("SGD", lr=0.1), lambda o: lr_scheduler.LambdaLR(o, rate), folder=tmp_path
        )
    assert list((tmp_path / "checkpoints").iterdir()), "the last checkpoint is kept"


class Signs(torch.optim.Optimizer):
    """An optimizer of another package than PyTorch: steps by the gradient's sign."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["last"] = parameter.grad.clone()
                    parameter -= group["lr"] * parameter.grad.sign()


def test_a_worker_refuses_what_it_was_not_allowed(cluster: mh.Coordinator, tmp_path: Path) -> None:
    """The workers of this cluster were started before anything was allowed."""
    model = network()
    name = f"{Signs.__module__}.Signs"
    with pytest.raises(mh.ManyhandsError, match="was not allowed here") as caught:
        train(cluster, model, Signs(model.parameters()), None, folder=tmp_path, allow_optimizers=[name])
    assert f"--allow-optimizer {name}" in caught.value.hint
