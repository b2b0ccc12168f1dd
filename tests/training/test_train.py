"""mh.train: its arguments, what it returns, and what it refuses before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import manyhands as mh
from manyhands.facts.errors import BadData, BadPlan, BadValue, ManyhandsError, UnknownName
from manyhands.facts.optimizer import Optimizer
from manyhands.files.documents import write_document
from manyhands.runtime.coordinator import Coordinator
from real_runs import ADAM, BATCH, CLASSES, SGD, Pictures, assert_close, names, network, shared, train, workers

pytestmark = pytest.mark.xdist_group("training")  # its workers are started once


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


@pytest.mark.slow
@pytest.mark.quick("auto")
@pytest.mark.parametrize("strategy", ["auto", "single", "samples", "pipeline"])
def test_strategies_by_name(cluster: Coordinator, tmp_path: Path, strategy: str) -> None:
    ran = train(cluster, strategy, tmp_path, steps=3)
    ran.assert_as_planned()
    used = set(ran.result.plan.devices)
    if strategy in ("samples", "pipeline"):
        assert used == set(names(cluster)), "a named strategy uses every device"
    if strategy == "single":
        assert len(used) == 1
    if strategy == "auto":
        assert ran.planned.alternatives
    assert len(ran.result.losses) == 3
    assert ran.result.folder == tmp_path
    assert ran.result.throughput > 0
    assert ran.planned.steps == 3


@pytest.mark.slow
def test_local_workers_a_cluster_file_and_a_plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.session.measuring.MEASURE_SECONDS", 0.1)
    facts = {"kind": "local", "gflops": 10, "memory": "1 GB"}
    devices = [{"name": name, **facts} for name in ("left", "right")]
    write_document(tmp_path / "home.yaml", {"devices": devices, "link": {"rate": "1 GB/s", "delay": "50 us"}})
    write_document(tmp_path / "plan.yaml", shared(("left", "right"), 4, 8).to_dict())
    said: list[str] = []
    ran = train(
        str(tmp_path / "home.yaml"), tmp_path / "plan.yaml", tmp_path / "run", epochs=2, say=said.append,
        test=Pictures(7),
    )  # fmt: skip
    ran.assert_as_planned()
    assert set(ran.result.logs) == {"left", "right"}
    assert len(ran.result.losses) == 2 * 6
    assert ran.result.test is not None
    assert ran.result.test.samples == 7
    assert (tmp_path / "run" / "workers" / "left.log").exists()


def test_epochs_leave_out_what_does_not_fill_a_batch(cluster: Coordinator, tmp_path: Path) -> None:
    ran = train(cluster, "samples", tmp_path, data=Pictures(2 * BATCH + 5), epochs=3)
    assert len(ran.result.losses) == 6


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.a(x))
        return {"hidden": hidden, "out": self.b(hidden)}


def pair_loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(output["out"], target["out"]) + 0.1 * (output["hidden"] ** 2).mean()


class Rows(Dataset[Any]):
    """Map-style data of nested targets; floats in another type than the model's."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        x = torch.sin(torch.arange(6, dtype=torch.float32) + index)
        return x, {"out": x[:3] * 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer("AdamW", lr=1e-2, weight_decay=0.1, schedule=[("CosineAnnealingLR", {"T_max": 5})]),
        Optimizer("RMSprop", lr=1e-2, momentum=0.5),
    ],
    ids=lambda one: one.name,
)
def test_any_loss_data_and_optimiser(cluster: Coordinator, tmp_path: Path, optimizer: Optimizer) -> None:
    torch.manual_seed(2)
    model = Pair().double()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ran = train(
        cluster, "samples", tmp_path, model=model, data=Rows(), loss=pair_loss, optimizer=optimizer, steps=8,
        shuffle=False,
    )  # fmt: skip
    ran.assert_as_planned()
    plain = Pair().double()
    plain.load_state_dict(start)
    kind: Any = getattr(torch.optim, optimizer.name)
    stepper = kind(plain.parameters(), **optimizer.options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, 5) if optimizer.schedule else None
    for step in range(8):
        rows = [Rows()[step % 4 * BATCH + place] for place in range(BATCH)]
        stepper.zero_grad()
        target = {"out": torch.stack([y["out"] for _, y in rows]).double()}
        loss = pair_loss(plain(torch.stack([x for x, _ in rows]).double()), target)
        loss.backward()
        stepper.step()
        if schedule is not None:
            schedule.step()
        assert ran.result.losses[step] == pytest.approx(loss.item(), rel=1e-10)
    assert_close(ran.state, plain.state_dict())


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None


class Judging(nn.Module):
    """A network that computes its own loss where it is given labels, with a parameter that only the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b, self.c = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Answer:
        hidden = torch.tanh(self.b(torch.tanh(self.a(pixels.flatten(1)))))
        answer = Answer(self.c(hidden))
        if labels is not None:
            answer.loss = functional.cross_entropy(answer.logits, labels.view(-1)) * self.scale.exp()
        return answer


@pytest.mark.slow
@pytest.mark.quick("pipeline")
@pytest.mark.parametrize("way", ["samples", "pipeline"])
def test_a_network_that_computes_its_own_loss(cluster: Coordinator, tmp_path: Path, way: str) -> None:
    model, plain, data = Judging(), Judging(), Pictures(4 * BATCH)
    ran = train(
        cluster, way, tmp_path, model=model, data=data, loss=None, steps=6, shuffle=False, test=Pictures(7),
        optimizer=Optimizer("SGD", lr=0.2, momentum=0.9), verify=True,
    )  # fmt: skip
    ran.assert_as_planned()
    assert len(ran.result.plan.stages) == (2 if way == "pipeline" else 1)
    stepper = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for step in range(6):
        first = step % 4 * BATCH
        stepper.zero_grad()
        loss = plain(data.pictures[first : first + BATCH], data.classes[first : first + BATCH]).loss
        loss.backward()
        stepper.step()
        assert ran.result.losses[step] == pytest.approx(loss.item(), rel=1e-10)
    assert_close(ran.state, plain.state_dict())
    with torch.no_grad():
        wanted = plain(Pictures(7).pictures, Pictures(7).classes)
    assert ran.result.test is not None
    assert ran.result.test.loss == pytest.approx(wanted.loss.item(), rel=1e-9)
    right = (wanted.logits.argmax(1) == Pictures(7).classes).double().mean().item()
    assert ran.result.test.accuracy == pytest.approx(right)
    evaluated = mh.evaluate(model, Pictures(7), loss="own", cluster=cluster)
    assert evaluated.loss == pytest.approx(wanted.loss.item(), rel=1e-9)


@pytest.mark.slow
def test_a_loss_of_a_field_of_the_output(cluster: Coordinator, tmp_path: Path) -> None:
    """The loss gets the dataclass itself, in training and in evaluation; without it accuracy is that of `logits`."""
    ran = train(
        cluster, "samples", tmp_path, model=Judging(), loss=lambda out, y: functional.cross_entropy(out.logits, y),
        steps=2, test=Pictures(7),
    )  # fmt: skip
    plain = mh.evaluate(ran.model, Pictures(7), cluster=cluster)
    with torch.no_grad():
        logits = ran.model(Pictures(7).pictures).logits
    assert ran.result.test is not None
    assert ran.result.test.loss == pytest.approx(functional.cross_entropy(logits, Pictures(7).classes).item(), rel=1e-9)
    right = (logits.argmax(1) == Pictures(7).classes).double().mean().item()
    assert plain.accuracy == ran.result.test.accuracy == pytest.approx(right)


def test_what_is_refused_at_once(tmp_path: Path) -> None:
    """Before any process is started."""

    cases: list[tuple[type[ManyhandsError], str, dict[str, Any]]] = [
        (BadValue, "batch_size is 0", {"batch_size": 0}),
        (BadValue, "epochs is True", {"epochs": True}),
        (BadValue, "steps is 0", {"steps": 0}),
        (BadValue, "batch_norm is 'global'", {"batch_norm": "global"}),
        (BadValue, "optimizer is a str", {"optimizer": "SGD"}),
        (BadValue, "loss is a str", {"loss": "mse"}),
        (BadValue, "model is a str", {"model": "resnet"}),
        (BadData, "72 samples; a batch has 100", {"batch_size": 100}),
        (BadValue, "its epochs have no known end", {"data": iter(())}),
        (BadData, "Epoch 0 of the <lambda> gave no batches", {"data": lambda: iter(()), "steps": 1}),
        (BadValue, "batch_size is not given", {"batch_size": None}),
        (BadValue, "seed", {"seed": -1}),
        (UnknownName, "SGDD", {"optimizer": Optimizer("SGDD")}),
    ]
    for kind, text, changed in cases:
        given: dict[str, Any] = {
            "model": network(), "data": Pictures(), "loss": functional.cross_entropy, "optimizer": SGD,
            "batch_size": BATCH, "folder": tmp_path, **changed,
        }  # fmt: skip
        model, data = given.pop("model"), given.pop("data")
        with pytest.raises(kind) as found:
            mh.train(model, data, **given)
        assert text in str(found.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_plans_that_do_not_fit(cluster: Coordinator, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="no plan file or strategy called 'sample'"):
        train(cluster, "sample", tmp_path / "a")
    with pytest.raises(BadPlan, match=r"batches of 10; batch_size is 12"):
        train(cluster, shared(names(cluster), 4, 6), tmp_path / "b")
    with pytest.raises(ManyhandsError, match="nobody"):
        train(cluster, shared(("nobody", "else"), 4, 8), tmp_path / "c")
    with pytest.raises(BadPlan, match="does not train"):
        train(cluster, shared(names(cluster), 4, 8, order="stream"), tmp_path / "d")


@pytest.mark.slow
def test_a_named_strategy_may_have_local_statistics(cluster: Coordinator, tmp_path: Path) -> None:
    ran = train(cluster, "samples", tmp_path, steps=2, batch_norm="local", optimizer=ADAM)
    assert ran.result.plan.batch_norm == "local"
    ran.assert_as_planned()


@pytest.mark.slow
def test_a_tensor_data_set(cluster: Coordinator, tmp_path: Path) -> None:
    data = Pictures()
    model = network(dropout=0.0)
    one = train(cluster, "samples", tmp_path / "a", data=TensorDataset(data.pictures, data.classes), steps=2)
    two = train(cluster, "samples", tmp_path / "b", data=data, steps=2)
    assert one.result.losses == pytest.approx(two.result.losses, rel=1e-10)
    assert model.training
