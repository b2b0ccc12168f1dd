"""mh.train is never silently wrong: it honours what changes gradients, or refuses it, and checks itself first."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from custom_functions import reverse
from manyhands.facts.errors import BadValue, CaptureFailed, ManyhandsError
from manyhands.graph.capture import capture
from manyhands.graph.verify import Verified
from manyhands.job import self_check as verifying
from manyhands.job.self_check import SelfChecks
from manyhands.runtime.coordinator import Coordinator
from real_runs import workers

pytestmark = pytest.mark.xdist_group("verifying")
BATCH, STEPS, RATE = 8, 3, 0.2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.three(torch.tanh(self.two(reverse(torch.tanh(self.one(x)), 0.5))))


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (BATCH * STEPS,), generator=generator))


def trained(module: nn.Module, folder: Path, cluster: Any, loss: Any = functional.cross_entropy, **options: Any) -> Any:
    return mh.train(
        module, rows(), loss=loss, optimizer=mh.Optimizer("SGD", lr=RATE), batch_size=BATCH, shuffle=False,
        cluster=cluster, folder=folder, **options,
    )  # fmt: skip


def penalised(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: (
        functional.cross_entropy(output, target) + 0.1 * sum(p.pow(2).sum() for p in module.parameters())
    )


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["samples", "pipeline"])
def test_reversed_gradients_and_a_penalty_train_as_in_pytorch(cluster: Coordinator, tmp_path: Path, plan: str) -> None:
    module, plain = Net(), Net()
    trained(module, tmp_path / "run", cluster, penalised(module), plan=plan, micro_batches=1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for x, y in torch.utils.data.DataLoader(rows(), batch_size=BATCH):
        optimizer.zero_grad()
        penalised(plain)(plain(x), y).backward()
        optimizer.step()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-12, atol=1e-13)
    (check,) = [event for event in events(tmp_path / "run") if event["event"] == "verified"]
    assert check["samples"] == 4
    assert 0 < check["seconds"] < 60
    assert check["largest_relative_difference"] <= 1e-9


@pytest.mark.slow
def test_a_check_that_was_not_made_is_said(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    trained(Net(), tmp_path / "no", cluster, plan="samples", verify=False, say=said.append)
    assert not any("not compared" in line for line in said)
    assert any("verify=False" in event.get("text", "") for event in events(tmp_path / "no"))
    monkeypatch.setattr(verifying, "_bytes", lambda network, samples: 10**15)
    trained(Net(), tmp_path / "full", cluster, plan="samples", say=said.append)
    (line,) = [line for line in said if "not compared" in line]
    assert "1.0 PB" in line or "1,000 TB" in line or "TB" in line


def hooked(hook: Callable[[nn.Module], object]) -> nn.Module:
    module = Net()
    hook(module)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "parameter": (
        lambda: hooked(lambda m: m.one.weight.register_hook(torch.neg)),
        r"The parameter 'one.weight' has a gradient hook",
    ),
    "accumulated": (
        lambda: hooked(lambda m: m.two.bias.register_post_accumulate_grad_hook(lambda p: None)),
        r"(?s)The parameter 'two.bias' has a post-accumulate hook \(<lambda>\).*test_self_check.py:",
    ),
    "module": (
        lambda: hooked(lambda m: m.two.register_full_backward_hook(lambda *_: None)),
        r"(?s)The module 'two' has a backward hook.*test_self_check.py:",
    ),
    "before": (
        lambda: hooked(lambda m: m.register_full_backward_pre_hook(lambda *_: None)),
        r"The module Net has a backward pre-hook",
    ),
    "frozen": (lambda: Net().requires_grad_(False), r"nothing to train in Net: none of its 6 parameters"),
    "empty": (lambda: nn.Flatten(), r"nothing to train in Flatten: it has no parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_workers_cannot_do_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ManyhandsError, match=words):
        trained(make(), tmp_path / "run", mh.Cluster.local(1))
    assert not (tmp_path / "run").exists()


@pytest.mark.quick(every=7)
@pytest.mark.parametrize(("batch_size", "samples"), [(1, 1), (2, 2), (3, 2), (4, 2), (7, 3), (8, 4), (64, 4)])
def test_it_takes_no_longer_than_a_step_of_the_run(batch_size: int, samples: int) -> None:
    graph = capture(Net(), torch.zeros(2, 6, dtype=torch.float64))
    assert verifying._samples(batch_size, graph.network) == samples


def test_a_large_network_is_checked_on_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(Net(), torch.zeros(2, 6, dtype=torch.float64))
    monkeypatch.setattr(verifying, "LARGE_MACS", 1)
    assert [verifying._samples(batch_size, graph.network) for batch_size in (1, 2, 64)] == [1, 2, 2]


def test_autocast_around_training_is_refused(tmp_path: Path) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(BadValue, match=r"under torch.autocast"):
        trained(Net(), tmp_path / "run", mh.Cluster.local(1))


@pytest.mark.slow
def test_a_difference_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    factors = iter(range(1, 100))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) * next(factors)

    with pytest.raises(CaptureFailed, match="in the loss function"):
        trained(Net(), tmp_path / "run", mh.Cluster.local(1), loss)
    assert not (tmp_path / "run").exists()


# Lightning's hooks


class Step(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Manual(Step):
    automatic_optimization = False


class Hooked(Step):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise AssertionError("never called")


class Clipping(Step):
    def configure_gradient_clipping(self, *_: Any) -> None:
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Manual, "Manual sets automatic_optimization = False"),
        (Hooked, r"(?s)Hooked overrides on_before_optimizer_step.*test_self_check.py:"),
        (Clipping, "Clipping overrides configure_gradient_clipping"),
    ],
)
def test_hooks_of_lightning_are_refused(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(BadValue, match=words):
        mh.Trainer(devices=1, batch_size=BATCH).fit(kind(), rows())


class Validated(Step):
    def __init__(self) -> None:
        super().__init__()
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("never called")


@pytest.mark.slow
def test_setup_is_called_and_a_validation_step_is_warned_of(cluster: Coordinator, tmp_path: Path) -> None:
    module = Validated()
    trainer = mh.Trainer(cluster=cluster, batch_size=BATCH, folder=tmp_path / "run")
    with pytest.warns(UserWarning, match="validation_step of Validated will not be called"):
        trainer.fit(module, rows(), rows())
    assert module.stages == ["fit"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mh.Trainer(cluster=cluster, batch_size=BATCH, folder=tmp_path / "again").fit(Validated(), rows())


def test_checks_leave_cores_to_the_workers_that_are_measured_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def check() -> Verified:
        threads.append(torch.get_num_threads())
        return Verified(1, 0.0, 0.0)

    for cores in (2, 8):
        monkeypatch.setattr("manyhands.job.self_check.usable_cores", lambda cores=cores: cores)
        with SelfChecks([check]) as checks:
            checks.result()
    assert threads == [1, 2]
