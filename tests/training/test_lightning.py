"""mh.Trainer with a LightningModule: the real package's loop, callbacks and loggers, and one device's numbers."""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.facts.errors import BadValue
from manyhands.runtime.coordinator import Coordinator
from real_runs import kill, names, workers

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("training"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|log_every_n_steps|isinstance|sum of the).*"),
]
BATCH = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def rows(samples: int = 6 * BATCH, seed: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Calls its parts in place of itself, logs, and validates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.backbone = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.head(self.backbone(x)) * self.scale, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        out = self.head(self.backbone(x)) * self.scale
        self.log("val_loss", functional.cross_entropy(out, y), prog_bar=True)
        self.log("val_acc", (out.argmax(1) == y).double().mean())

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.backbone.parameters(), self.scale]},
            {"params": self.head.parameters(), "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}


def fitted(
    cluster: Coordinator | None, folder: Path, module: Any, data: Any = None, held_out: Any = None, **options: Any
) -> Any:
    """The real trainer after a fit: on one device, or with steps on the cluster."""
    options = {"logger": False, "enable_checkpointing": False, **QUIET, "max_epochs": 2, **options}
    given = (module, data or DataLoader(rows(), BATCH), held_out)
    if cluster is None:
        trainer = lightning.Trainer(accelerator="cpu", devices=1, **options)
        trainer.fit(*given)
        return trainer
    ours = mh.Trainer(cluster=cluster, plan="samples", folder=folder / "run", **options)
    assert ours.fit(*given) is None
    return ours.lightning


def assert_alike(found: nn.Module | dict[str, Tensor], expected: nn.Module | dict[str, Tensor]) -> None:
    states = [each.state_dict() if isinstance(each, nn.Module) else each for each in (found, expected)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[1].items():
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_it_is_the_real_loop_with_the_same_numbers(cluster: Coordinator, tmp_path: Path) -> None:
    """Clipping and accumulation with an incomplete last group, two callbacks, a logger, and validations."""
    modules, trainers, checkpoints = [], [], []
    data, held_out = rows(5 * BATCH), DataLoader(rows(2 * BATCH, seed=4), BATCH)
    for of, name in ((None, "alone"), (cluster, "shared")):
        folder = tmp_path / name
        modules.append(Classifier())
        checkpoints.append(ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=1))
        trainers.append(
            fitted(
                of, folder, modules[-1], DataLoader(data, BATCH), held_out, max_epochs=3, enable_checkpointing=True,
                gradient_clip_val=0.3, accumulate_grad_batches=2, log_every_n_steps=1, val_check_interval=2,
                callbacks=[EarlyStopping("val_loss", patience=50), LearningRateMonitor(), checkpoints[-1]],
                logger=CSVLogger(folder, name="csv", version=0),
            )
        )  # fmt: skip
    assert_alike(modules[1], modules[0])
    assert trainers[1].global_step == trainers[0].global_step == 9
    alone, shared = (logged(tmp_path / name) for name in ("alone", "shared"))
    assert len(alone) == len(shared) > 9
    for expected, found in zip(alone, shared):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert (found[key] == "") == (value == ""), key
            if value:
                assert float(found[key]) == pytest.approx(float(value), rel=1e-9), key
    assert trainers[1].callback_metrics.keys() == trainers[0].callback_metrics.keys()
    assert Path(checkpoints[1].best_model_path).name == Path(checkpoints[0].best_model_path).name
    saved = [torch.load(each.best_model_path, weights_only=False) for each in checkpoints]
    assert_alike(saved[1]["state_dict"], saved[0]["state_dict"])
    states = [each["optimizer_states"][0]["state"] for each in saved]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert_alike(states[1][number], state)
    assert "training_step" not in vars(modules[1])
    assert not modules[1]._state_dict_pre_hooks


def test_value_clipping_and_a_schedule_of_accumulation(cluster: Coordinator, tmp_path: Path) -> None:
    modules = [Classifier(), Classifier()]
    for of, module in zip((None, cluster), modules):
        fitted(
            of, tmp_path, module, gradient_clip_val=0.01, gradient_clip_algorithm="value",
            callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})],
        )  # fmt: skip
    assert_alike(modules[1], modules[0])


def test_training_goes_on_from_lightnings_checkpoint(cluster: Coordinator, tmp_path: Path) -> None:
    """A fit on the cluster, and another from its checkpoint there: as one on one device."""
    plain, half, module = Classifier(), Classifier(), Classifier()
    fitted(None, tmp_path, plain, max_epochs=2)
    fitted(cluster, tmp_path / "a", half, max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    trainer = mh.Trainer(
        cluster=cluster, plan="samples", max_epochs=2, logger=False, enable_checkpointing=False, **QUIET
    )
    trainer.fit(module, DataLoader(rows(), BATCH), ckpt_path=tmp_path / "half.ckpt")
    assert_alike(module, plain)


class Watching(Classifier):
    """Looks at its weights after every batch; its second input goes into the network, not into the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        a, b = batch
        near = (self(a) - self(b.double()[:, None].expand(-1, 6))).square().mean()
        self.log("near", near.detach())
        return {"loss": near, "other": near * 2}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.head.weight.detach().clone())


def test_hooks_see_the_weights_of_their_batch(cluster: Coordinator, tmp_path: Path) -> None:
    plain, module = Watching(), Watching()
    trainers = [fitted(of, tmp_path, each, max_epochs=1) for of, each in ((None, plain), (cluster, module))]
    assert len(module.seen) == len(plain.seen) == 6
    for found, expected in zip(module.seen, plain.seen):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    near = [float(trainer.callback_metrics["near"]) for trainer in trainers]
    assert near[1] == pytest.approx(near[0], rel=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lower_precisions_train(cluster: Coordinator, tmp_path: Path, precision: str) -> None:
    module = Classifier().float()
    data = [(x.float(), y) for x, y in rows(4 * BATCH)]
    held_out = DataLoader(data, BATCH)
    trainer = fitted(cluster, tmp_path, module, DataLoader(data, BATCH), held_out, precision=precision)
    assert trainer.callback_metrics["train_loss_epoch"] < 1.2
    assert trainer.callback_metrics["val_loss"] < 1.2
    assert module.head.weight.dtype == torch.float32


class Killing(lightning.Callback):  # type: ignore[misc, name-defined]
    """Kills a worker after a batch, in the midst of an update."""

    def __init__(self, cluster: Coordinator) -> None:
        self.cluster, self.victim = cluster, names(cluster)[1]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == 2:
            kill(self.cluster, self.victim)


def test_a_worker_that_is_lost_is_not_noticed_by_the_loop(tmp_path: Path) -> None:
    plain, module = Classifier(), Classifier()
    fitted(None, tmp_path, plain, accumulate_grad_batches=2)
    with workers(2) as cluster:
        killing = Killing(cluster)
        fitted(cluster, tmp_path, module, accumulate_grad_batches=2, callbacks=killing)
        assert cluster.members[killing.victim].is_lost, "the fault must fire"
    assert_alike(module, plain)


def test_modules_of_the_other_package(cluster: Coordinator, tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    made = type("Classifier", (other.LightningModule,), {k: v for k, v in vars(Classifier).items() if k != "__init__"})
    module, plain = made(), Classifier()
    for name, part in plain.named_children():
        setattr(module, name, copy.deepcopy(part))
    module.scale = copy.deepcopy(plain.scale)
    fitted(cluster, tmp_path, module, max_epochs=1)
    fitted(None, tmp_path, plain, max_epochs=1)
    assert_alike(module, plain)


# What cannot be kept


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Zeroing(Classifier):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        raise AssertionError("never called")


class Clipping(Classifier):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        raise AssertionError("never called")


class ByEpoch(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class Numbered(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class Measuring(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = pytest.importorskip("torchmetrics").MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.accuracy(loss)
        return loss


class LeavingOut(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()


class Faster(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.param_groups[0]["lr"] *= 2
        optimizer.step()


class Changing(Classifier):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            with torch.no_grad():
                self.head.weight.mul_(2)


class Freezing(Classifier):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.head.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Manual, {}, "Manual sets automatic_optimization = False"),
        (Zeroing, {}, r"(?s)Zeroing overrides on_before_zero_grad.*test_lightning.py:"),
        (Clipping, {}, "Clipping overrides configure_gradient_clipping"),
        (Classifier, {"callbacks": StochasticWeightAveraging(0.1)}, "StochasticWeightAveraging is not honoured"),
        (Classifier, {"callbacks": [mh.EarlyStopping()]}, "EarlyStopping of manyhands is no callback of lightning"),
        (Classifier, {"accumulate_grad_batches": 2, "precision": "16-mixed"}, "accumulate_grad_batches with"),
        (Classifier, {"epochs": 3}, "no option epochs"),
        (ByEpoch, {}, "reads trainer.current_epoch"),
        (Numbered, {}, "uses batch_idx"),
        (Measuring, {}, "updates the metric 'accuracy'"),
        (LeavingOut, {}, "update of the last step was left out"),
        (Faster, {}, "changed between a step and its update"),
        (Changing, {}, "'head.weight' was changed here"),
        (Freezing, {}, "'requires_grad' was changed here|'head.weight' was changed here"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    cluster: Coordinator, tmp_path: Path, kind: Any, options: dict[str, Any], words: str
) -> None:
    module = kind()
    with pytest.raises(BadValue, match=words) as refused:
        fitted(cluster, tmp_path, module, **options)
    assert refused.value.hint
    assert "training_step" not in vars(module)
    assert not type(vars(module)["_trainer"]).__module__.startswith("manyhands")


def test_an_incomplete_last_batch_is_trained_exactly(cluster: Coordinator, tmp_path: Path) -> None:
    plain, module = Classifier(), Classifier()
    data = DataLoader(rows(2 * BATCH + 5), BATCH)
    found = [
        fitted(of, tmp_path, each, data, accumulate_grad_batches=2, gradient_clip_val=0.3).callback_metrics
        for of, each in ((None, plain), (cluster, module))
    ]
    assert_alike(module, plain)
    assert found[1]["train_loss_epoch"] == pytest.approx(float(found[0]["train_loss_epoch"]), rel=1e-9)


class Wordy(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self.head(self.backbone(x)) * self.scale
        loss = functional.cross_entropy(out, y)
        self.log_dict({"train_loss": loss, "accuracy": (out.argmax(1) == y).double().mean()})
        return loss


def test_what_is_not_logged_is_named(cluster: Coordinator, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="logs 'accuracy', which will not be logged"):
        trainer = fitted(cluster, tmp_path, Wordy(), max_epochs=1)
    assert "accuracy" not in trainer.callback_metrics
    assert "train_loss" in trainer.callback_metrics
