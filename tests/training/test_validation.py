"""Validation, metrics and callbacks of `mh.train` over real workers, against plain PyTorch doing the same."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.data.order import BatchOrder
from manyhands.executor import checkpoint
from manyhands.facts.errors import BadData, BadValue, UnknownName
from manyhands.files.documents import read_document
from manyhands.runtime.coordinator import Coordinator
from real_runs import BATCH, Pictures, assert_same, names, network, piped, shared, train, workers

pytestmark = pytest.mark.xdist_group("validation")  # its workers are started once

SEED = 5
EPOCH_STEPS = 6
HELD_OUT = Pictures(29)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(3) as coordinator:
        yield coordinator


class Counted:
    """A metric as torchmetrics has them: the part of samples whose class is among the two best."""

    def __init__(self) -> None:
        self.right = self.all = self.resets = 0

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.right += int(top2(predictions, targets) * len(targets) + 0.5)
        self.all += len(targets)

    def compute(self) -> Tensor:
        return torch.tensor(self.right / self.all, dtype=torch.float64)

    def reset(self) -> None:
        self.right = self.all = 0
        self.resets += 1


def top2(predictions: Tensor, targets: Tensor) -> float:
    return float((predictions.topk(2).indices == targets[:, None]).any(1).double().mean())


class Noted(mh.Callback):
    """Every call, with what it was told; its state is how many steps it has seen."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.contexts: list[mh.CallbackContext] = []
        self.seen = 0

    def note(self, event: str, context: mh.CallbackContext) -> None:
        self.calls.append((event, context.steps_done))
        self.contexts.append(context)

    def on_start(self, context: mh.CallbackContext) -> None:
        self.note("start", context)

    def on_step(self, context: mh.CallbackContext) -> None:
        self.seen += 1
        self.note("step", context)

    def on_epoch(self, context: mh.CallbackContext) -> None:
        self.note("epoch", context)

    def on_validation(self, context: mh.CallbackContext) -> None:
        self.note("validation", context)

    def on_end(self, context: mh.CallbackContext) -> None:
        self.note("end", context)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def plainly_trained(steps: int, every: int, parts: int) -> list[dict[str, float]]:
    """What PyTorch alone has at each validation: batch norm over each of the parts of a batch."""
    model, data, order = network(dropout=0.0), Pictures(), BatchOrder(len(Pictures()), BATCH, True, SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for rows in torch.tensor(order.indices(step)).chunk(parts):
            (functional.cross_entropy(model(data.pictures[rows]), data.classes[rows]) / parts).backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                outputs = model.eval()(HELD_OUT.pictures)
            model.train()
            found.append(
                {
                    "loss": functional.cross_entropy(outputs, HELD_OUT.classes).item(),
                    "accuracy": float((outputs.argmax(1) == HELD_OUT.classes).double().mean()),
                    "top2": top2(outputs, HELD_OUT.classes),
                }
            )
    return found


@pytest.mark.slow
@pytest.mark.quick("samples")
@pytest.mark.parametrize("kind", ["samples", "pipeline"])
def test_it_equals_plain_pytorch_at_every_validation(cluster: Coordinator, tmp_path: Path, kind: str) -> None:
    plan = shared(names(cluster)[:2], 8, 4) if kind == "samples" else piped(names(cluster))
    counted, noted = Counted(), Noted()
    ran = train(
        cluster, plan, tmp_path / "run", model=network(dropout=0.0), epochs=2,
        validate=DataLoader(HELD_OUT, batch_size=7), validate_every=4, metrics={"top2": top2, "counted": counted},
        callbacks=[noted], verify=False,
    )  # fmt: skip
    expected = plainly_trained(2 * EPOCH_STEPS, 4, plan.micro_batches)
    assert [one.steps_done for one in ran.result.validation] == [4, 8, 12]
    assert [one.epoch for one in ran.result.validation] == [0, 1, 1]
    for one, wanted in zip(ran.result.validation, expected):
        assert one.samples == len(HELD_OUT)
        assert one.metrics == pytest.approx({**wanted, "counted": wanted["top2"]}, rel=1e-10)
    assert counted.resets == 3
    ran.assert_as_planned()  # of the steps, in whichever generation
    events = ["start", *["step"] * 4, "validation", "step", "step", "epoch", "step", "step", "validation"]
    events += [*["step"] * 4, "epoch", "validation", "end"]
    assert [event for event, _ in noted.calls] == events
    rates = [context.learning_rate for (event, _), context in zip(noted.calls, noted.contexts) if event == "step"]
    assert rates == pytest.approx([0.05] * 4 + [0.05 * 0.7] * 4 + [0.05 * 0.7**2] * 4)
    end = noted.contexts[-1]
    assert end.model is ran.model
    assert end.error is None
    assert end.metrics == ran.result.validation[-1].metrics
    with open(ran.result.folder / "validation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["top2"]) for row in rows] == [one.metrics["top2"] for one in ran.result.validation]


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_was(cluster: Coordinator, tmp_path: Path) -> None:
    """The weights, the results and the state of callbacks are those of a run without a break."""
    plan = shared(names(cluster)[:2], 8, 4)

    def run(folder: str, epochs: int, **options: Any) -> tuple[Any, Noted, mh.EarlyStopping]:
        noted, stopping = Noted(), mh.EarlyStopping(patience=9)
        found = train(
            cluster, plan, tmp_path / folder, epochs=epochs, validate=HELD_OUT, metrics={"top2": top2}, verify=False,
            callbacks=[noted, stopping, mh.CSV(tmp_path / folder / "all.csv")], **options,
        )  # fmt: skip
        return found, noted, stopping

    whole, noted, stopping = run("whole", 3)
    run("parts", 1)
    parts, noted_again, stopping_again = run("parts", 3, resume=True)
    assert_same(whole.state, parts.state)
    assert [(one.steps_done, one.metrics) for one in whole.result.validation] == [
        (one.steps_done, one.metrics) for one in parts.result.validation
    ]
    assert [one.steps_done for one in parts.result.validation] == [6, 12, 18]
    assert noted_again.calls[0] == ("start", 6)
    assert noted_again.seen == noted.seen == 18
    assert stopping_again.state_dict() == stopping.state_dict()

    def without_seconds(folder: str) -> list[list[str]]:
        with open(tmp_path / folder / "all.csv", newline="") as file:
            return [row[:3] + row[4:] for row in csv.reader(file)]

    assert without_seconds("parts") == without_seconds("whole")


@pytest.mark.slow
def test_it_stops_early_and_keeps_the_best(cluster: Coordinator, tmp_path: Path) -> None:
    """At a rate this high the loss grows; the best is of the first validation, and loads into the plain module."""
    optimizer = mh.Optimizer("SGD", lr=3.0)
    best = mh.BestCheckpoint()
    ran = train(
        cluster, shared(names(cluster)[:2], 8, 4), tmp_path / "run", optimizer=optimizer, epochs=5, validate=HELD_OUT,
        validate_every=2, verify=False, callbacks=[best, mh.EarlyStopping(patience=2)],
    )  # fmt: skip
    result, losses = ran.result, [one.metrics["loss"] for one in ran.result.validation]
    assert result.stopped_because is not None
    assert result.stopped_because.startswith("loss has not been better than ")
    assert result.steps == result.validation[-1].steps_done == len(result.losses) < 5 * EPOCH_STEPS
    assert result.checkpoint.name == f"step-{result.steps:06d}"
    assert losses.index(min(losses)) == len(losses) - 3
    assert best.best == min(losses)
    assert result.best_checkpoint == tmp_path / "run" / "best"
    assert checkpoint.load(result.best_checkpoint).step == result.validation[len(losses) - 3].steps_done
    model = network()
    model.load_state_dict(load_file(result.best_checkpoint / "model.safetensors"))
    found = mh.evaluate(model, HELD_OUT, loss=functional.cross_entropy, cluster=cluster)
    assert found.loss == pytest.approx(min(losses), rel=1e-10)
    assert_same(load_file(result.checkpoint / "model.safetensors"), ran.state)


class Raising(mh.Callback):
    def __init__(self, event: str, at: int = 0) -> None:
        self.event, self.at = event, at

    def on_step(self, context: mh.CallbackContext) -> None:
        if self.event == "on_step" and context.step == self.at:
            raise RuntimeError("no more room")

    def on_validation(self, context: mh.CallbackContext) -> None:
        if self.event == "on_validation":
            context.metrics["missing"]

    def on_end(self, context: mh.CallbackContext) -> None:
        if self.event == "on_end":
            raise RuntimeError("no more room")


def broken(predictions: Any, targets: Any) -> float:
    raise ValueError("one class only")


@pytest.mark.parametrize(
    ("options", "message", "saved"),
    [
        ({"callbacks": [Raising("on_step", 2)]},
         "The callback Raising raised in on_step, after step 2: RuntimeError", 3),
        ({"callbacks": [Raising("on_validation")]},
         "The callback Raising raised in on_validation, after step 3: KeyError: 'missing'", 4),
        ({"callbacks": [Raising("on_end")]}, "The callback Raising raised in on_end, after step 5: RuntimeError", 6),
        ({"metrics": {"auc": broken}},
         "The metric 'auc' raised ValueError: one class only, at the validation after step 3", 4),
        ({"metrics": {"auc": lambda predictions, targets: "high"}}, "The metric 'auc' returned a str", 4),
    ],
    ids=["step", "validation", "end", "metric", "no number"],
)  # fmt: skip
@pytest.mark.quick("step")
def test_what_raises_ends_the_run_with_a_checkpoint(
    cluster: Coordinator, tmp_path: Path, options: dict[str, Any], message: str, saved: int
) -> None:
    noted = Noted()
    with pytest.raises(BadValue) as raised:
        train(
            cluster, shared(names(cluster)[:2], 8, 4), tmp_path / "run", validate=HELD_OUT, validate_every=4,
            verify=False, **{**options, "callbacks": [*options.get("callbacks", ()), noted]},
        )  # fmt: skip
    assert message in raised.value.message
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert checkpoint.load(newest).step >= saved
    assert f"Checkpoint: {newest}" in raised.value.hint
    assert "resume=" in raised.value.hint
    assert noted.calls[-1][0] == "end"
    assert noted.contexts[-1].error is (raised.value if saved < EPOCH_STEPS else None)


@pytest.mark.slow
def test_after_a_metric_that_raised_it_is_validated_first(cluster: Coordinator, tmp_path: Path) -> None:
    def run(metric: Any, **options: Any) -> Any:
        return train(
            cluster, shared(names(cluster)[:2], 8, 4), tmp_path / "run", validate=HELD_OUT, validate_every=4,
            verify=False, metrics={"top2": metric}, **options,
        )  # fmt: skip

    with pytest.raises(BadValue, match="The metric 'top2' raised"):
        run(broken)
    result = run(top2, resume=True).result
    assert [one.steps_done for one in result.validation] == [4]
    assert len(result.losses) == EPOCH_STEPS


@pytest.mark.quick(every=17)
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"validate_every": "epochs", "validate": HELD_OUT}, BadValue, "validate_every is 'epochs'"),
        ({"validate_every": 0, "validate": HELD_OUT}, BadValue, "validate_every is 0"),
        ({"validate_every": True, "validate": HELD_OUT}, BadValue, "validate_every is True"),
        ({"validate_every": 7, "validate": HELD_OUT}, BadValue, "validate_every is 7; the run has 6 steps"),
        ({"validate_every": 2}, BadValue, "there is no held-out data to validate on"),
        ({"metrics": {"top2": top2}}, BadValue, "metrics are computed at validations"),
        ({"validate": HELD_OUT, "metrics": {"loss": top2}}, BadValue, "cannot be called 'loss'"),
        ({"validate": HELD_OUT, "metrics": {"top2": Counted}}, BadValue, "is the class Counted"),
        ({"validate": HELD_OUT, "metrics": {"top2": 3}}, BadValue, "is a int"),
        ({"validate": HELD_OUT, "callbacks": [mh.EarlyStopping("los", mode="min")]}, UnknownName, "'los'"),
        ({"callbacks": [mh.EarlyStopping()]}, BadValue, "goes by the metric 'loss' of a validation; this job has none"),
        ({"callbacks": [mh.EarlyStopping]}, BadValue, "has the class EarlyStopping"),
        ({"callbacks": [print]}, BadValue, "callbacks has a builtin_function_or_method"),
        ({"callbacks": mh.CSV("a.csv")}, BadValue, "callbacks is a CSV"),
        ({"validate": TensorDataset(torch.zeros(4, 1, 9, 8), torch.zeros(4).long())}, BadData,
         r"input of a sample of the held-out data is float32 \(1, 9, 8\); that of the training data is float64 "
         r"\(1, 8, 8\)"),
        ({"validate": TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4))}, BadData, "target of a sample"),
        ({"validate": Pictures(0)}, BadData, "held-out data set is empty"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        train(mh.Cluster.local(2), "samples", tmp_path / "run", verify=False, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_log_for_tensorboard_has_validations(cluster: Coordinator, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran = train(
        cluster, shared(names(cluster)[:2], 8, 4), tmp_path / "run", test=HELD_OUT, validate_every="epoch",
        callbacks=[mh.TensorBoard()], verify=False,
    )  # fmt: skip
    log = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    log.Reload()
    (event,) = log.Scalars("validation/loss")
    assert event.step == EPOCH_STEPS - 1
    assert event.value == pytest.approx(ran.result.validation[0].metrics["loss"])
    assert ran.result.test is not None
    assert ran.result.test.loss == pytest.approx(ran.result.validation[0].metrics["loss"], rel=1e-12)
    assert read_document(ran.result.checkpoint / "state.json")["facts"]["callbacks"]["validated"] == EPOCH_STEPS


@pytest.mark.slow
def test_samples_of_several_lengths_are_validated_at_the_longest(cluster: Coordinator, tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.last = nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.last(self.table(ids).sum(1))

    generator = torch.Generator().manual_seed(2)

    def samples(count: int, longest: int) -> list[tuple[Tensor, Tensor]]:
        lengths = [1 + place % longest for place in range(count)]
        return [(torch.randint(1, 11, (n,), generator=generator), torch.tensor(n % 3)) for n in lengths]

    held_out, model = samples(13, 7), Words().double()
    ran = train(
        cluster, "samples", tmp_path / "run", model=model, data=samples(24, 8), batch_size=8, lengths=(4, 8),
        optimizer=mh.Optimizer("SGD", lr=0.1), validate=held_out, verify=False,
    )  # fmt: skip
    with torch.no_grad():
        outputs = torch.cat([model(ids[None]) for ids, _ in held_out])
    loss = functional.cross_entropy(outputs, torch.stack([label for _, label in held_out]))
    assert ran.result.validation[-1].metrics["loss"] == pytest.approx(loss.item(), rel=1e-10)
