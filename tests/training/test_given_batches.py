"""mh.train with a DataLoader as it is: the losses and weights of an ordinary PyTorch loop over the same loader."""

from __future__ import annotations

import csv
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import manyhands as mh
from manyhands.cli.live_rows import step_text
from manyhands.executor import checkpoint
from manyhands.facts.errors import BadData, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan, Replay, Single, Stage
from manyhands.job.ordering import WARM_UP_STEPS
from manyhands.observe.live import read_live
from manyhands.runtime.coordinator import Coordinator
from real_runs import BATCH, LAYERS, Pictures, assert_close, names, network, train, workers

pytestmark = pytest.mark.xdist_group("training")

RATE, MOMENTUM = 0.05, 0.9
OPTIMIZER = Optimizer("SGD", lr=RATE, momentum=MOMENTUM)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Random crops, flips and brightness, from all three generators."""

    def __init__(self, samples: int = 3 * BATCH) -> None:
        self.plain = Pictures(samples)

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, label = self.plain[index]
        padded = functional.pad(picture, (2, 2, 2, 2))
        row, column = torch.randint(0, 5, (2,)).tolist()
        picture = padded[:, row : row + 8, column : column + 8]
        if random.random() < 0.5:
            picture = picture.flip(-1)
        return picture * (1 + 0.1 * float(numpy.random.rand())), label


def seeded() -> None:
    torch.manual_seed(21)
    random.seed(22)
    numpy.random.seed(23)


def loop(model: nn.Module, loader: Any, epochs: int) -> list[float]:
    """Return the losses of an ordinary PyTorch loop."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM), []
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            value = functional.cross_entropy(model(inputs), targets)
            value.backward()
            optimizer.step()
            losses.append(value.item())
    return losses


def loaded(kind: str) -> DataLoader[Any]:
    seeded()
    if kind == "weighted":
        sampler = WeightedRandomSampler([1.0 + number % 3 for number in range(3 * BATCH)], 3 * BATCH)
        return DataLoader(Augmented(), BATCH, sampler=sampler, num_workers=1)
    if kind == "collate_fn":
        return DataLoader(Augmented(), BATCH, shuffle=True, collate_fn=mixed)
    return DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2)


def mixed(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Every picture with a little of another one: a collate_fn that does more than to stack."""
    pictures = torch.stack([picture for picture, _ in samples])
    return 0.9 * pictures + 0.1 * pictures[torch.randperm(len(samples))], torch.stack([label for _, label in samples])


@pytest.mark.quick("augmented-samples")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("augmented", "samples"), ("augmented", "tiles"), ("augmented", "pipeline"), ("weighted", "samples"),
        ("collate_fn", "pipeline"),
    ],
)  # fmt: skip
def test_a_loader_trains_as_an_ordinary_loop_over_it(
    cluster: Coordinator, tmp_path: Path, kind: str, plan: str
) -> None:
    plain, model = network(dropout=0.0), network(dropout=0.0)
    wanted = loop(plain, loaded(kind), 2)
    ran = train(
        cluster, plan, tmp_path, model=model, data=loaded(kind), batch_size=None, epochs=2, optimizer=OPTIMIZER,
        micro_batches=1,
    )  # fmt: skip
    torch.testing.assert_close(torch.tensor(ran.result.losses), torch.tensor(wanted), rtol=1e-10, atol=1e-12)
    assert_close(ran.state, plain.state_dict())
    assert 0 <= ran.result.data_wait_share <= 1


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_batches_it_would_have_had(cluster: Coordinator, tmp_path: Path) -> None:
    plain, model = network(dropout=0.0), network(dropout=0.0)
    wanted = loop(plain, loaded("augmented"), 2)
    options: dict[str, Any] = {"batch_size": None, "optimizer": OPTIMIZER, "plan": "samples"}
    train(cluster, folder=tmp_path, model=network(dropout=0.0), data=loaded("augmented"), steps=4, **options)
    other = loaded("augmented")
    torch.manual_seed(77)  # the process that resumes is another
    random.seed(77)
    said: list[str] = []
    ran = train(
        cluster, folder=tmp_path, model=model, data=other, steps=6, resume=True, say=said.append, **options
    )  # fmt: skip
    assert any("1 batch(es) that were trained are skipped" in text for text in said), said
    torch.testing.assert_close(torch.tensor(ran.result.losses), torch.tensor(wanted), rtol=1e-10, atol=1e-12)
    assert_close(ran.state, plain.state_dict())
    with pytest.raises(BadValue, match="started with samples = in batches as given; it is now 36"):
        train(cluster, folder=tmp_path, data=Augmented(), steps=9, resume=True, **{**options, "batch_size": BATCH})


def with_rest(rest: int = 5) -> DataLoader[Any]:
    """Two whole batches in an epoch, and one of what is left."""
    seeded()
    return DataLoader(Augmented(2 * BATCH + rest), BATCH, shuffle=True)


def scheduled(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def loop_with_rest(model: nn.Module, epochs: int) -> tuple[list[float], list[float]]:
    """Return the losses of an ordinary loop, and those of a validation after every epoch."""
    (optimizer, scheduler), loader, held_out = scheduled(model), with_rest(), Pictures(29)
    losses, validated = [], []
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        with torch.no_grad():
            validated.append(functional.cross_entropy(model.eval()(held_out.pictures), held_out.classes).item())
        model.train()
    return losses, validated


@pytest.mark.slow
@pytest.mark.quick("pipeline")
@pytest.mark.parametrize("plan", ["samples", "tiles", "pipeline"])
def test_a_smaller_last_batch_is_trained_as_an_ordinary_loop_does(
    cluster: Coordinator, tmp_path: Path, plan: str
) -> None:
    """With a schedule per epoch and a validation after each; resumed just before the last batch of the first."""
    plain, model, other = (network(dropout=0.0) for _ in range(3))
    losses, validated = loop_with_rest(plain, 2)
    options: dict[str, Any] = {
        "batch_size": None, "validate": Pictures(29), "validate_every": "epoch", "micro_batches": 1,
    }  # fmt: skip
    for trained, steps in ((other, 2), (model, 6)):
        optimizer, scheduler = scheduled(trained)
        ran = train(
            cluster, plan, tmp_path, model=trained, data=with_rest(), optimizer=optimizer, steps=max(steps, 3),
            scheduler={"scheduler": scheduler, "interval": "epoch"}, resume=steps > 2,
            callbacks=[] if trained is model else [StopAfter(2)], **options,
        )  # fmt: skip
    torch.testing.assert_close(torch.tensor(ran.result.losses), torch.tensor(losses), rtol=1e-10, atol=1e-12)
    assert [one.metrics["loss"] for one in ran.result.validation] == pytest.approx(validated, rel=1e-10)
    assert_close(ran.state, plain.state_dict())
    assert ran.result.plan.batch_size == BATCH
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(6))
    samples = [round(float(row["samples_per_second"]) * float(row["seconds"])) for row in rows]
    assert samples == [BATCH, BATCH, 5] * 2


def test_memory_is_counted_in_a_whole_batch(cluster: Coordinator, tmp_path: Path) -> None:
    """The step in which it would be counted is that of the smaller one."""
    loader = DataLoader(Pictures(BATCH + 5), BATCH)
    ran = train(cluster, "samples", tmp_path, model=network(dropout=0.0), data=loader, batch_size=None, steps=3)
    assert all(log.rounds == 2 and log.peak_bytes > 0 for log in ran.result.logs.values())


class StopAfter(mh.Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, context: mh.CallbackContext) -> None:
        if context.steps_done == self.steps:
            context.stop("enough")


@pytest.mark.slow
def test_a_smaller_last_batch_that_cannot_be_trained_is_refused_before_the_first_step(
    cluster: Coordinator, tmp_path: Path
) -> None:
    def by_plan(name: str, plan: Any, text: str, **options: Any) -> None:
        with pytest.raises(BadData, match=text):
            train(cluster, plan, tmp_path / name, batch_size=None, optimizer=OPTIMIZER, **options)
        assert not (tmp_path / name).exists()

    first, second = names(cluster)
    norms = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)).double()
    by_plan(
        "norm", "samples", r"(?s)The last batch of an epoch has 1 sample\(s\).*one value per channel.*drop_last=True",
        model=norms, data=with_rest(1),
    )  # fmt: skip
    stages = (Stage((0, 1), (first,), Single()), Stage((1, LAYERS), (second,), Single()))
    replayed = Plan("Sequential", 2 * BATCH, stages, micro_batches=2, order="replay", replay=Replay(k=0))
    by_plan("replay", replayed, r"(?s)has 5 sample\(s\).*order is replay", data=with_rest(), model=network(dropout=0.0))


class Stream(IterableDataset[Any]):
    """Endless."""

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            yield {"x": torch.full((6,), number % 7 / 7, dtype=torch.float64), "labels": torch.tensor(number % 3)}
            number += 1


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": functional.cross_entropy(logits, labels), "logits": logits}
        )


@pytest.mark.slow
def test_an_endless_stream_of_dicts_with_the_models_own_loss(cluster: Coordinator, tmp_path: Path) -> None:
    plain, model = OwnLoss(), OwnLoss()
    optimizer, wanted = torch.optim.SGD(plain.parameters(), lr=RATE, momentum=MOMENTUM), []
    for batch, _ in zip(DataLoader(Stream(), 6), range(5)):
        optimizer.zero_grad()
        value = plain(**batch)["loss"]
        value.backward()
        optimizer.step()
        wanted.append(value.item())
    ran = train(
        cluster, "samples", tmp_path, model=model, data=Stream(), batch_size=6, steps=5, loss=None, optimizer=OPTIMIZER
    )
    torch.testing.assert_close(torch.tensor(ran.result.losses), torch.tensor(wanted), rtol=1e-10, atol=1e-12)
    assert_close(ran.state, plain.state_dict())


class Broken(Augmented):
    def __init__(self, how: str) -> None:
        super().__init__(6 * BATCH)
        self.how = how

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, label = super().__getitem__(index)
        if index < 4 * BATCH:
            return picture, label
        if self.how == "raises":
            raise ValueError("a broken record")
        if self.how == "dies":
            os._exit(1)
        return picture[:, :6], label


@pytest.mark.quick("raises")
@pytest.mark.parametrize(
    ("how", "workers_of_loader", "text"),
    [
        ("raises", 1, r"(?s)batch of step 4 .*ValueError: a broken record\n  at .*test_given_batches\.py:\d+"),
        ("dies", 1, r"A worker of the DataLoader died before the batch of step [0-4]"),
        ("another shape", 0, r"batch of step 4 has the shapes \(\(12, 1, 6, 8\).*; the first had \(\(12, 1, 8, 8\)"),
    ],
    ids=["raises", "dies", "another shape"],
)
def test_what_goes_wrong_names_the_step_and_keeps_the_last_checkpoint(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, workers_of_loader: int, text: str
) -> None:
    monkeypatch.setattr("manyhands.job.workload.CHECKPOINT_SECONDS", 1e-9)  # one after every step
    timeout = 3 if workers_of_loader else 0
    loader = DataLoader(Broken(how), BATCH, num_workers=workers_of_loader, timeout=timeout)
    with pytest.raises(BadData, match=text) as caught:
        train(cluster, "samples", tmp_path, model=network(dropout=0.0), data=loader, batch_size=None)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert str(newest) in caught.value.hint
    assert not list(tmp_path.glob("kept-batches-*"))


class SlowerThanTraining(mh.Callback):
    """Batches that each take four times as long as the step before took, however slow the machine is."""

    def __init__(self) -> None:
        self.stepped, self.handed = threading.Event(), 0

    def on_step(self, context: mh.CallbackContext) -> None:
        self.stepped.set()

    def batches(self) -> Iterator[Any]:
        for batch in DataLoader(Pictures(BATCH), BATCH):
            self.stepped.clear()
            handed_over = time.monotonic()
            yield batch
            assert self.stepped.wait(120)
            self.handed += 1
            if self.handed > WARM_UP_STEPS:  # the first steps wait for what is prepared, and are not counted
                time.sleep(max(0.1, 4 * (time.monotonic() - handed_over)))


@pytest.mark.slow
def test_a_run_that_waits_for_its_data_says_so(cluster: Coordinator, tmp_path: Path) -> None:
    said: list[str] = []
    slow = SlowerThanTraining()
    ran = train(
        cluster, "samples", tmp_path, model=network(dropout=0.0), data=slow.batches, batch_size=None, steps=14,
        optimizer=OPTIMIZER, say=said.append, callbacks=[slow],
    )  # fmt: skip
    assert 0.4 < ran.result.data_wait_share <= 1
    assert any(text.startswith("Data is the bottleneck") for text in said)
    live = read_live(tmp_path)
    assert live is not None
    assert live.data_wait > 0.4
    assert "waits for data" in step_text(live)


def refused(text: str, data: Any, **options: Any) -> None:
    given = {"loss": functional.cross_entropy, "optimizer": OPTIMIZER, **options}
    with pytest.raises((BadValue, BadData), match=text):
        mh.train(network(), data, **given)


def test_what_is_refused_before_anything_starts() -> None:
    loader = DataLoader(Augmented(), BATCH)
    refused(r"(?s)its epochs have no known end.*steps=1000", Stream(), batch_size=4, loss=None)
    refused(r"batch_size is 5; the batches of the DataLoader have 12", loader, batch_size=5)
    refused(r"(?s)lengths is for samples.*loader\.dataset", loader, lengths=(3,))
    refused(r"(?s)shuffle is for samples", loader, shuffle=True)
    refused(r"(?s)feed='start' is for samples", loader, feed="start")
