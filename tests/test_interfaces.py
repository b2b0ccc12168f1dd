"""What people bring and take away, in real runs: loaders, streams, Lightning's way, TensorBoard, plain files."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.main import whole_app
from manyhands.executor.optimizers import validate
from manyhands.facts.errors import BadData, BadValue, NotInstalled
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.job.given_optimizer import read_optimizer
from manyhands.runtime.coordinator import Coordinator
from manyhands.training.trainer import StepLoss, configured_by
from real_runs import BATCH, LAYERS, SGD, Pictures, network, workers

pytestmark = pytest.mark.xdist_group("interfaces")  # its workers are started once
STEPS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def losses(cluster: Coordinator, folder: Path, data: Any, **options: Any) -> list[float]:
    given = {"loss": functional.cross_entropy, "optimizer": SGD, "cluster": cluster, "plan": "samples", "seed": 4}
    return mh.train(network(), data, folder=folder, **{**given, **options}).losses


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Pictures()
        yield from (data[index] for index in range(len(data)))


@pytest.mark.slow
def test_a_loader_and_a_stream_train_as_the_data_set_does(cluster: Coordinator, tmp_path: Path) -> None:
    plain = losses(cluster, tmp_path / "plain", Pictures(), batch_size=BATCH, shuffle=False)
    assert len(plain) == STEPS
    alike = pytest.approx(plain, rel=1e-12)  # shares follow measured speeds, and sums their order
    assert losses(cluster, tmp_path / "loader", DataLoader(Pictures(), batch_size=BATCH)) == alike
    assert losses(cluster, tmp_path / "stream", Streamed(), batch_size=BATCH, steps=STEPS) == alike


@pytest.mark.slow
def test_samples_laid_out_before_the_first_step_train_the_same(cluster: Coordinator, tmp_path: Path) -> None:
    """Numbers travel in every step, as the logs have it; the run's folder says what was laid out."""
    plan = Plan("Sequential", BATCH, (Stage((0, LAYERS), cluster.cluster().names, BySamples((7, 5))),))
    said: list[str] = []
    results = [
        mh.train(
            network(), Pictures(), loss=functional.cross_entropy, optimizer=SGD, cluster=cluster, plan=plan, seed=4,
            batch_size=BATCH, folder=tmp_path / feed, feed=feed, say=said.append,
        )
        for feed in ("step", "start")
    ]  # fmt: skip
    assert results[0].losses == results[1].losses
    sizes = [[one.logs[name].received_bytes["coordinator"] for name in plan.devices] for one in results]
    assert sizes[1] == [STEPS * (samples * 2 + 1) * 8 for samples in (7, 5)]  # numbers, and the loss's total
    assert sizes[0] == [STEPS * (samples * (8 * 8 * 8 + 8) + 8) for samples in (7, 5)]
    for result, came in zip(results, sizes):
        assert result.bytes_by_use["input_output"] * STEPS == sum(came)
    (laid,) = (line for line in said if "laid out" in line)
    assert laid.startswith("72 samples are laid out before the first step: 37.4 kB at ")
    events = [json.loads(line) for line in (tmp_path / "start" / "events.jsonl").read_text().splitlines()]
    (event,) = (one for one in events if one["event"] == "laid")
    assert list(event["bytes"].values()) == [6 * BATCH * (8 * 8 * 8 + 8)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("feed", [pytest.param("step", marks=pytest.mark.slow), "start"])
def test_a_label_without_an_output_is_found_before_it_is_sent(feed: str, cluster: Coordinator, tmp_path: Path) -> None:
    inputs = torch.randn(48, 6, dtype=torch.float64)
    labels = torch.zeros(48, dtype=torch.long)
    labels[41] = 12
    with pytest.raises(BadData, match="has the label 12; the network has 3 outputs, for labels from 0 to 2") as caught:
        mh.train(
            nn.Linear(6, 3).double(), TensorDataset(inputs, labels), loss=functional.cross_entropy, optimizer=SGD,
            batch_size=12, cluster=cluster, plan="samples", folder=tmp_path, feed=feed, shuffle=False,
        )  # fmt: skip
    assert ("step 3: sample 5 has" in caught.value.message) == (feed == "step")
    assert "13 outputs" in caught.value.hint


# Lightning's way


class Module(nn.Module):
    """As written for Lightning, without it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.logged: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return {"loss": loss}

    def log(self, name: str, value: Tensor) -> None:
        raise RuntimeError("there is no Lightning trainer")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows(samples: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


class ByEpoch(Module):
    """Two groups, the second without momentum, and a schedule of a function, stepped once an epoch as in Lightning."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers[0].parameters()}, {"params": self.layers[2].parameters(), "momentum": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


class OneCycle(Module):
    """Its schedule has exactly as many steps as the run, and so has none to spare for measuring."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.slow
@pytest.mark.quick("ByEpoch")
@pytest.mark.parametrize("kind", [Module, OneCycle, ByEpoch])
def test_a_module_in_lightnings_way_is_trained_exactly(
    kind: type[Module], cluster: Coordinator, tmp_path: Path
) -> None:
    module, data = kind(), rows()
    trainer = mh.Trainer(cluster=cluster, max_epochs=2, plan="samples", folder=tmp_path / "run")
    result = trainer.fit(module, DataLoader(data, batch_size=12), DataLoader(rows(20), batch_size=4))
    assert result.test is not None
    assert result.test.samples == 20
    plain = kind()
    (optimizer,), (settings,) = configured_by(plain)
    expected = []
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=12):
            loss = functional.cross_entropy(plain(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if settings["interval"] == "step":
                settings["scheduler"].step()
            expected.append(loss.item())
        if settings["interval"] == "epoch":
            settings["scheduler"].step()
    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(expected), rtol=1e-10, atol=1e-12)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-10, atol=1e-12)
    assert "forward" not in vars(module), "the module has its own methods again"
    assert "log" not in vars(module)


class Other(Module):
    """Configured by a function of itself."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def configure_optimizers(self) -> Any:
        return self.given(self)


def by_epoch(own: nn.Module) -> Any:
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def test_optimisers_as_data() -> None:
    (optimizer,), (settings,) = configured_by(Module())
    read = read_optimizer(Module(), lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))
    expected = Optimizer("SGD", lr=0.1, momentum=0.9, dampening=0, weight_decay=0, nesterov=False, maximize=False)
    assert read.optimizer == expected
    assert type(optimizer) is torch.optim.SGD
    assert settings["interval"] == "step"
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        module = Other(lambda own, kind=kind: kind(own.parameters(), lr=0.01))
        validate(read_optimizer(module, configured_by(module)[0]).optimizer)  # every option is its own
    _, (settings,) = configured_by(Other(by_epoch))
    assert settings["interval"] == "epoch", "as in Lightning"
    both = Other(
        lambda own: [torch.optim.SGD(own.layers[0].parameters(), 0.1), torch.optim.Adam(own.layers[2].parameters())]
    )
    assert len(configured_by(both)[0]) == 2
    with pytest.raises(BadValue, match="gives a NoneType"):
        configured_by(Other(lambda own: None))


def test_what_a_step_may_do() -> None:
    class Peeks(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return functional.cross_entropy(self(batch[0]), batch[1]) + batch[0].mean()

    class Twice(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return functional.cross_entropy(self(batch[0]) + self(batch[0]), batch[1])

    for kind, text in ((Peeks, "input beside forward"), (Twice, "forward 2 times")):
        with pytest.raises(BadValue, match=text):
            StepLoss(kind())(torch.randn(4, 3), torch.zeros(4).long())
    with pytest.raises(BadValue, match="has no training_step"):
        mh.Trainer().fit(nn.Linear(2, 2), rows())
    with pytest.raises(BadValue, match="There is no data"):
        mh.Trainer().fit(Module())
    with pytest.raises(BadValue, match="no option accelerator"):
        mh.Trainer(accelerator="gpu")
    with pytest.raises(BadValue, match="a cluster is given"):
        mh.Trainer(devices=2, cluster=mh.Cluster.local(2))


# TensorBoard


def read_back(folder: Path) -> Any:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


@pytest.mark.slow
def test_tensorboard_reads_what_the_run_wrote(cluster: Coordinator, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    found = losses(cluster, tmp_path, Pictures(), batch_size=BATCH, tensorboard=True, test=Pictures(BATCH))
    log = read_back(tmp_path / "tensorboard")
    tags = log.Tags()
    assert [one.step for one in log.Scalars("loss")] == list(range(STEPS))
    assert [one.value for one in log.Scalars("loss")] == pytest.approx(found, rel=1e-6)
    assert all(one.value > 0 for one in log.Scalars("samples_per_second"))
    assert "staleness" not in tags["scalars"], "only with order replay"
    for name in cluster.members:
        assert log.Scalars(f"memory/{name}/peak_tensor_bytes")[0].value > 0
        assert log.Scalars(f"memory/{name}/planned_bytes")[0].value > 0
    assert 0 <= log.Scalars("test/accuracy")[0].value <= 1
    assert {"events/text_summary", "plan/text_summary"} <= set(tags["tensors"])
    told = b" ".join(one.tensor_proto.string_val[0] for one in log.Tensors("events/text_summary"))
    assert b"finished" in told
    assert b"checkpoint" in told
    data = log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"batch_size" in data
    assert b"optimizer/options/lr" in data
    for path in (tmp_path / "tensorboard").iterdir():
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, "as private as the rest of the folder"


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_log(cluster: Coordinator, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    losses(cluster, tmp_path, Pictures(), batch_size=BATCH, steps=2, tensorboard=True)
    found = losses(cluster, tmp_path, Pictures(), batch_size=BATCH, steps=4, tensorboard=True, resume=True)
    log = read_back(tmp_path / "tensorboard")
    assert [one.step for one in log.Scalars("loss")] == [0, 1, 2, 3]
    assert [one.value for one in log.Scalars("loss")] == pytest.approx(found, rel=1e-6)


def test_without_tensorboard_it_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(NotInstalled, match=r"pip install 'manyhands\[tensorboard\]'"):
        mh.train(
            network(), Pictures(), loss=functional.cross_entropy, optimizer=SGD, batch_size=BATCH,
            folder=tmp_path / "run", tensorboard=True,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


# Files that others read


PLAIN = """
import json, sys, torch
from safetensors.torch import load_file
from torch import nn
model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
    nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)),
    nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 5)),
).double()
model.load_state_dict(load_file(sys.argv[1]))
with torch.no_grad():
    answer = model.eval()(torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(2, 1, 8, 8))
print(json.dumps({"answer": answer.tolist(), "manyhands": any(name.startswith("manyhands") for name in sys.modules)}))
"""


@pytest.mark.slow
def test_a_checkpoint_loads_without_manyhands(cluster: Coordinator, tmp_path: Path) -> None:
    model = network()
    result = mh.train(
        model, Pictures(), loss=functional.cross_entropy, optimizer=SGD, batch_size=BATCH, cluster=cluster,
        plan="samples", folder=tmp_path, steps=3,
    )  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", PLAIN, str(result.checkpoint / "model.safetensors")],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    told = json.loads(ran.stdout)
    assert told["manyhands"] is False
    with torch.no_grad():
        expected = model.eval()(torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(2, 1, 8, 8))
    torch.testing.assert_close(torch.tensor(told["answer"], dtype=torch.float64), expected)


@pytest.mark.slow
def test_a_run_by_names_is_exported(cluster: Coordinator, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    from manyhands.data.sets import load
    from manyhands.training.arguments import train_config
    from manyhands.training.named import train_by_name

    result = train_by_name(train_config({"steps": 2, "share": "samples", "folder": tmp_path / "run"}), cluster)
    path = tmp_path / "digits.onnx"
    ran = CliRunner().invoke(whole_app(), ["export", str(result.folder), "--onnx", str(path), "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["bytes"] == path.stat().st_size
    test = load("digits").test
    assert test is not None
    pictures = torch.stack([test[index][0] for index in range(40)])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (answers,) = session.run(None, {session.get_inputs()[0].name: pictures.numpy()})
    from safetensors.torch import load_file

    from manyhands.models.registry import build

    model = build("tiny").eval()
    model.load_state_dict(load_file(result.checkpoint / "model.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(answers), model(pictures), rtol=1e-4, atol=1e-4)
