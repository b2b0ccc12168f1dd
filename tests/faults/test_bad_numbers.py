"""Numbers that stop being numbers, and data that cannot be trained on, in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.executor import checkpoint
from manyhands.facts.errors import BadData, BadValue, DataNotFinite, NotFinite
from manyhands.facts.optimizer import Optimizer
from manyhands.job import workload
from manyhands.runtime.coordinator import Coordinator
from real_runs import BATCH, CLASSES, Pictures, Square, in_line, names, shared, train, workers

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("bad_numbers")]  # its workers are started once


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def squares() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Sequential(Square(), nn.Linear(8, 8)), nn.Linear(8, CLASSES)
    ).double()


def plain() -> nn.Sequential:
    """No batch norm: micro-batches would be normalised by themselves."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, CLASSES)
    ).double()


def spoilt(first: int, number: float) -> Pictures:
    """One sample, and no earlier one, holds a number that becomes none."""
    return Pictures(change=lambda i, x, y: (torch.full_like(x, number) if i == first else x, y))


@pytest.mark.parametrize("is_piped", [False, True], ids=["samples", "pipeline"])
@pytest.mark.parametrize(
    ("number", "said"), [(1e200, "layer 0.1"), (float("nan"), "the input ")], ids=["overflow", "nan"]
)
def test_a_loss_that_is_none_ends_the_run(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_piped: bool, number: float, said: str
) -> None:
    monkeypatch.setattr(workload, "CHECKPOINT_SECONDS", 0.0)
    plan = in_line(names(cluster)) if is_piped else shared(names(cluster), 5, 7)
    data = spoilt(3 * BATCH + 1, number)
    with pytest.raises(NotFinite) as found:
        train(cluster, plan, tmp_path, model=squares(), data=data, steps=6, shuffle=False)
    assert "at step 3" in found.value.message
    assert f"it began in {said}" in found.value.message
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert str(newest) in found.value.hint
    assert isinstance(found.value, DataNotFinite) is (said == "the input ")
    assert "Once the data is fixed, go on with: " in found.value.hint
    assert ("lower learning rate" in found.value.hint) is (said != "the input ")
    loaded = checkpoint.load(newest)
    assert 1 <= loaded.step <= 3
    assert all(bool(torch.isfinite(t).all()) for t in loaded.model.values())


def test_weights_that_overflow_are_no_checkpoint(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the step was still a number; its update is not."""
    monkeypatch.setattr(workload, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(NotFinite) as found:
        train(
            cluster, shared(names(cluster), 5, 7), tmp_path, model=squares(), steps=50,
            optimizer=Optimizer("SGD", lr=1e30),
        )  # fmt: skip
    assert "step" in found.value.message
    assert "layer" in found.value.message
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert all(bool(torch.isfinite(t).all()) for t in checkpoint.load(newest).model.values())


def test_going_on_unchanged_is_not_advised(cluster: Coordinator, tmp_path: Path) -> None:
    """It comes to the same numbers, and another learning rate is refused: what the hint says to type is a new run."""
    one = {"model": squares(), "steps": 50, "shuffle": False}
    plan = shared(names(cluster)[:1], BATCH)  # of several, any may be the first to see it
    with pytest.raises(NotFinite) as found:
        train(cluster, plan, tmp_path / "run", optimizer=Optimizer("SGD", lr=1e30), **one)
    with pytest.raises(NotFinite) as again:
        train(cluster, plan, tmp_path / "run", optimizer=Optimizer("SGD", lr=1e30), resume=True, **one)
    assert again.value.message == found.value.message
    assert "unchanged, the run comes to the same numbers again" in found.value.hint
    assert not any(line.startswith("Go on with") for line in found.value.hint.splitlines())
    lower = Optimizer("SGD", lr=1e29)
    assert f"mh.train(..., optimizer=mh.{lower!r}, folder='{tmp_path / 'run'}-2')" in found.value.hint
    with pytest.raises(BadValue, match="It would not go on as it was"):
        train(cluster, plan, tmp_path / "run", optimizer=lower, resume=True, **one)


def test_a_sample_that_cannot_be_loaded(cluster: Coordinator, tmp_path: Path) -> None:
    def change(index: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if index == 30:
            raise OSError("the disk is gone")
        return x, y

    with pytest.raises(BadData, match="Sample 30 cannot be loaded: OSError: the disk is gone") as found:
        train(cluster, shared(names(cluster), 5, 7), tmp_path, data=Pictures(change=change))
    assert "Checkpoint: " in found.value.hint


def test_samples_of_another_shape(cluster: Coordinator, tmp_path: Path) -> None:
    data = Pictures(change=lambda i, x, y: (x[:, :4] if i == 30 else x, y))
    with pytest.raises(BadData, match=r"sample 30 has the shape \(1, 4, 8\)"):
        train(cluster, shared(names(cluster), 5, 7), tmp_path / "one", data=data, shuffle=False)
    data = Pictures(change=lambda i, x, y: (x[:, :4] if i >= 24 else x, y))
    with pytest.raises(BadData, match=r"\(12, 1, 4, 8\); the network was captured with \(12, 1, 8, 8\)"):
        train(cluster, shared(names(cluster), 5, 7), tmp_path / "all", data=data, shuffle=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["samples", "line", "preloaded", "single"])
def test_ignored_targets_are_shared_exactly(cluster: Coordinator, tmp_path: Path, kind: str) -> None:
    """The mean is over the others: each device is given their number."""
    data = Pictures(change=lambda i, x, y: (x, torch.tensor(-100) if 24 <= i < 31 else y))
    plans = {"line": in_line(names(cluster)), "single": "single"}
    ran = train(
        cluster, plans.get(kind, shared(names(cluster), 5, 7)), tmp_path / kind, data=data,
        model=plain(), shuffle=False, **({"feed": "start"} if kind == "preloaded" else {}),
    )  # fmt: skip
    model = plain()
    stepper = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 4, 0.7)
    for step in range(6):
        rows = [data[i] for i in range(step * BATCH, (step + 1) * BATCH)]
        stepper.zero_grad()
        loss = functional.cross_entropy(model(torch.stack([x for x, _ in rows])), torch.stack([y for _, y in rows]))
        loss.backward()
        stepper.step()
        schedule.step()
        assert ran.result.losses[step] == pytest.approx(loss.item(), rel=1e-10)
