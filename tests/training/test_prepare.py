"""mh.prepare: a loop of one's own trains exactly as one device, whatever is done between its steps."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.facts.errors import BadData, BadPlan, BadValue, ManyhandsError
from manyhands.facts.plan import ByTiles, Plan, Replay, Single, Stage
from manyhands.runtime.coordinator import Coordinator
from manyhands.training.prepare import PreparedStep, prepare
from real_runs import BATCH, LAYERS, Pictures, kill, names, network, shared, workers

pytestmark = pytest.mark.xdist_group("training")

SGD = mh.Optimizer("SGD", lr=0.05, momentum=0.9)
Batches = list[tuple[Tensor, Tensor]]
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def batches(count: int = 6) -> Batches:
    return [(x, y) for x, y in DataLoader(Pictures(count * BATCH), BATCH)]


def alone(
    given: Batches, model: nn.Module | None = None, clip_norm: float | None = None
) -> tuple[nn.Module, list[float]]:
    """One device, in plain PyTorch."""
    model = model or network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, y in given:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if clip_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip_norm) > clip_norm
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def assert_alike(model: nn.Module | State, plain: nn.Module) -> None:
    state = model.state_dict() if isinstance(model, nn.Module) else model
    assert state.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def prepared(cluster: Coordinator, folder: Path, plan: Plan | str = "samples", **options: Any) -> PreparedStep:
    model = options.pop("model", None) or network(dropout=0.0)
    return prepare(model, functional.cross_entropy, SGD, cluster=cluster, plan=plan, folder=folder / "run", **options)


def plans(devices: tuple[str, ...]) -> dict[str, Plan]:
    stages = (Stage((0, 1), devices[:1], Single()), Stage((1, LAYERS), devices[1:], Single()))
    tiled = (Stage((0, 2), devices, ByTiles((1, 1), (1,))), Stage((2, LAYERS), devices[:1], Single()))
    return {
        "samples": shared(devices, 5, 7),
        "pipeline": Plan("Sequential", BATCH, stages),
        "tiles": Plan("Sequential", BATCH, tiled),
    }


@pytest.mark.slow
@pytest.mark.quick("pipeline")
@pytest.mark.parametrize("plan", ["samples", "pipeline", "tiles"])
def test_a_loop_trains_exactly_as_one_device(cluster: Coordinator, tmp_path: Path, plan: str) -> None:
    given = batches()
    plain, losses = alone(given)
    model = network(dropout=0.0)
    with prepared(cluster, tmp_path, plans(names(cluster))[plan], model=model) as step:
        found = [step(batch) for batch in given]
        assert step.plan is not None
        assert [stage.share.by for stage in step.plan.stages]
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=1e-12)
    assert_alike(model, plain)
    assert step.steps_done == len(given)
    assert step.folder == tmp_path / "run"
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + len(given)


def with_rests(count: int = 6) -> Batches:
    """Every third batch has fewer samples, as the last of an epoch."""
    return [(x[:5], y[:5]) if number % 3 == 2 else (x, y) for number, (x, y) in enumerate(batches(count))]


@pytest.mark.quick("tiles")
@pytest.mark.parametrize("plan", ["samples", "pipeline", "tiles"])
def test_smaller_batches_are_trained_exactly(cluster: Coordinator, tmp_path: Path, plan: str) -> None:
    """Some are waited for and others not; the state is read between, and the run is resumed before a smaller one."""
    given = with_rests(7)
    plain, losses = alone(given)
    model, found = network(dropout=0.0), []
    with prepared(cluster, tmp_path, plans(names(cluster))[plan]) as step:
        found += [step(batch) for batch in given[:3]]
        assert_alike(step.state_dict(), alone(given[:3])[0])
        found += [float(step(batch)) for batch in given[3:5]]
    with prepared(cluster, tmp_path, plans(names(cluster))[plan], model=model, resume=True, example=given[0]) as step:
        found += [step(batch) for batch in given[5:]]
        assert step.plan is not None
    assert step.plan.batch_size == BATCH
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=1e-12)
    assert_alike(model, plain)


def test_one_sample_with_batch_norm_over_single_values_is_refused_and_the_loop_goes_on(
    cluster: Coordinator, tmp_path: Path
) -> None:
    def norms() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)).double()

    given, model = batches(2), norms()
    (x, y), rest = given[0], (given[1][0][:2], given[1][1][:2])
    with prepared(cluster, tmp_path, model=model) as step:
        step(x, y)
        with pytest.raises(BadData, match=r"step 1 has 1 sample\(s\).*one value per channel") as refused:
            step(x[:1], y[:1])
        assert "drop_last=True" in refused.value.hint
        step(rest)
    assert_alike(model, alone([(x, y), rest], norms())[0])


def test_gradients_are_clipped_in_a_loop_too(cluster: Coordinator, tmp_path: Path) -> None:
    given = with_rests(3)
    plain, losses = alone(given, clip_norm=0.01)
    model = network(dropout=0.0)
    with prepared(cluster, tmp_path, model=model, clip_norm=0.01) as step:
        assert [float(step(batch)) for batch in given] == pytest.approx(losses, abs=1e-12)
    assert_alike(model, plain)


def test_evaluating_between_steps_changes_nothing(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(4)
    half, _ = alone(given[:2])
    plain, _ = alone(given)
    model = network(dropout=0.0)
    x, y = batches(1)[0]
    half.eval()
    with torch.no_grad():
        expected = half(x[:5])
    with prepared(cluster, tmp_path, model=model) as step:
        for number, batch in enumerate(given):
            if number == 2:
                result = step.evaluate(x[:5], y[:5])
                torch.testing.assert_close(result.output, expected, rtol=1e-10, atol=1e-10)
                assert result.loss == pytest.approx(float(functional.cross_entropy(expected, y[:5])), abs=1e-10)
                assert result.accuracy == pytest.approx(float((expected.argmax(1) == y[:5]).double().mean()))
                half.train()
                assert_alike(step.state_dict(), half)
            step(batch)
    assert_alike(model, plain)


@pytest.mark.slow
def test_the_module_itself_has_the_current_weights_when_it_is_used(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(3)
    model = network(dropout=0.0)
    with prepared(cluster, tmp_path, model=model) as step:
        for number, batch in enumerate(given):
            step(batch)
            if number == 0:
                plain, _ = alone(given[:1])
                plain.eval(), model.eval()
                torch.testing.assert_close(model(given[1][0]), plain(given[1][0]), rtol=1e-10, atol=1e-10)
                model.train()
            if number == 1:
                assert_alike(copy.deepcopy(model[2]).state_dict(), alone(given[:1])[0][2])  # a copy: as last loaded
                assert_alike(model[2].state_dict(), alone(given[:2])[0][2])
                torch.save(model, io.BytesIO())
    assert_alike(model, alone(given)[0])
    assert not model._forward_pre_hooks
    assert not model._state_dict_pre_hooks


class PartlyUsed(nn.Module):
    """Has a weight that its forward does not read, and that no device holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(dropout=0.0)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_weight_that_is_not_used_does_not_keep_the_state_back(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(3)
    plain, _ = alone(given, PartlyUsed())
    model = PartlyUsed()
    with prepare(
        model, functional.cross_entropy, SGD, cluster=cluster, plan="samples", folder=tmp_path / "run"
    ) as step:
        for batch in given:
            step(batch)
            step.state_dict()
    assert_alike(model, plain)


def test_losses_behave_as_numbers(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(2)
    _, losses = alone(given)
    with prepared(cluster, tmp_path) as step:
        first, second = step(given[0]), step(*given[1])
        assert (first + second) / 2 == pytest.approx(sum(losses) / 2)
        assert sum([first, second]) == pytest.approx(sum(losses))
        assert first.item() == first.detach().tolist() == first
        assert (first < second) == (losses[0] < losses[1])
        assert f"{first:.3f}" == f"{losses[0]:.3f}"
        assert abs(-first) == round(first, 30) == float(first)
        assert first.is_ready
        assert bool(torch.isclose(torch.tensor(losses[1], dtype=torch.float64) - second, torch.zeros((), dtype=float)))
        first.backward()
    with pytest.raises(BadValue, match="closed"):
        step(given[0])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("behind", [0, 2])
def test_a_worker_that_is_lost_in_the_loop_costs_nothing(tmp_path: Path, behind: int) -> None:
    """Batches are overwritten as soon as the step returns: those that are run again were kept."""
    given = batches(8)
    plain, losses = alone(given)
    model = network(dropout=0.0)
    buffer = (torch.empty_like(given[0][0]), torch.empty_like(given[0][1]))
    with workers(2) as cluster, prepared(cluster, tmp_path, model=model, backup_every=0) as step:
        victim, found = names(cluster)[1], []
        for number, (x, y) in enumerate(given):
            buffer[0].copy_(x), buffer[1].copy_(y)
            found.append(step(buffer))
            if number == 4:
                found[number - behind].item()
                kill(cluster, victim)
        found[-1].item()
        assert cluster.members[victim].is_lost, "the fault must fire"
        step.state_dict()
        recovered = step.recoveries
        assert [fact["devices"] for fact in recovered] == [[names(cluster)[0]]]
    assert [float(loss) for loss in found] == pytest.approx(losses, abs=1e-10)
    assert_alike(model, plain)


@pytest.mark.slow
def test_an_error_in_the_loop_leaves_a_trained_model_and_no_process(tmp_path: Path) -> None:
    given = batches(3)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    model = network(dropout=0.0)
    during: set[int] = set()

    def loop() -> None:
        with prepare(
            model, functional.cross_entropy, SGD, cluster=mh.Cluster.local(2), folder=tmp_path / "a", plan="samples",
            verify=False, example=given[0],
        ) as step:  # fmt: skip
            during.update(workers_of(step))
            for number, batch in enumerate(given):
                step(batch)
                if number == 1:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert len(during) == 2
    assert not any(psutil.pid_exists(pid) and pid not in before for pid in during)
    assert_alike(model, alone(given[:2])[0])


def workers_of(step: PreparedStep) -> set[int]:
    assert step._training is not None
    return {member.facts.pid for member in step._training.job.session.coordinator.members.values()}


@pytest.mark.slow
def test_forgetting_to_close(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(2)
    model = network(dropout=0.0)

    def loop() -> None:
        step = prepared(cluster, tmp_path, model=model)
        for batch in given:
            step(batch)

    loop()
    gc.collect()
    assert_alike(model, alone(given)[0])
    assert not [thread for thread in threading.enumerate() if thread.name == "training"]


@pytest.mark.slow
def test_preparing_a_module_again_closes_the_step_before(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(2)
    model = network(dropout=0.0)
    first = prepared(cluster, tmp_path / "a", model=model)
    first(given[0])
    second = prepared(cluster, tmp_path / "b", model=model)
    assert_alike(model, alone(given[:1])[0])
    second(given[1])
    with pytest.raises(BadValue, match="closed"):
        first(given[0])
    second.close()
    assert second.steps_done == 1


def test_a_batch_that_does_not_fit_is_refused_and_the_loop_goes_on(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(3)
    (x, y), model = given[0], network(dropout=0.0)
    with prepared(cluster, tmp_path, model=model, example=given[0]) as step:
        step(given[0])
        with pytest.raises(BadData, match="has 13 samples; the loop began with batches of 12") as refused:
            step(torch.cat([x, x[:1]]), torch.cat([y, y[:1]]))
        assert "example=" in refused.value.hint
        with pytest.raises(BadData, match=r"has shape \(12, 1, 9, 8\)"):
            step(torch.zeros(12, 1, 9, 8), y)
        with pytest.raises(BadData, match="sample 0 has the label 77"):
            step(x, torch.full_like(y, 77))
        with pytest.raises(BadData, match=r"'target' has shape \(12, 1\)"):
            step(x, y[:, None])
        with pytest.raises(BadData, match="'target' is float64; it must be int64"):
            step(x, y.double())
        with pytest.raises(BadData, match="not a pair"):
            step(x)
        with pytest.raises(BadData, match="3 values"):
            step(x, y, y)
        for batch in given[1:]:
            step(batch)
    assert_alike(model, alone(given)[0])


def test_numbers_that_are_not_finite_end_the_loop_with_the_last_checkpoint(
    cluster: Coordinator, tmp_path: Path
) -> None:
    given = batches(2)
    model = network(dropout=0.0)
    step = prepared(cluster, tmp_path, model=model)
    step(given[0])
    step.state_dict()  # a checkpoint
    loss = step(torch.full_like(given[1][0], float("nan")), given[1][1])
    with pytest.raises(ManyhandsError, match="finite"):
        loss.item()
    with pytest.raises(ManyhandsError, match="finite"):
        step(given[1])
    assert_alike(model, alone(given[:1])[0])


def test_plans_without_a_loss_after_each_step_are_refused(cluster: Coordinator, tmp_path: Path) -> None:
    first, second = names(cluster)
    stages = (Stage((0, 1), (first,), Single()), Stage((1, LAYERS), (second,), Single()))
    replayed = Plan("Sequential", 4 * BATCH, stages, micro_batches=4, order="replay", replay=Replay(k=2))
    with pytest.raises(BadPlan, match="loss of each step before the next"):
        prepared(cluster, tmp_path, replayed, example=batches(1)[0])
    with pytest.raises(BadValue, match="optimizer is not given"):
        prepare(network(), functional.cross_entropy)
    with pytest.raises(BadValue, match=r"mh\.prepare has no option epochs"):
        prepare(network(), functional.cross_entropy, SGD, epochs=3)  # type: ignore[call-arg]


@pytest.mark.slow
def test_a_loop_resumes_at_its_checkpoint(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(4)
    with prepared(cluster, tmp_path) as step:
        for batch in given[:2]:
            step(batch)
    model = network(dropout=0.0, seed=9)
    with prepared(cluster, tmp_path, model=model, resume=True, example=given[0]) as step:
        assert step.steps_done == 2
        assert_alike(step.state_dict(), alone(given[:2])[0])
        for batch in given[step.steps_done :]:
            step(batch)
    assert_alike(model, alone(given)[0])


@pytest.mark.slow
def test_a_loop_with_all_its_lines_trains_alike(cluster: Coordinator, tmp_path: Path) -> None:
    """PyTorch's optimizer and scheduler as they were, with groups; what else was in the loop does nothing."""
    given = batches(6)

    def made(model: nn.Module) -> tuple[Any, Any]:
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]  # type: ignore[index]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    plain, model = network(dropout=0.0), network(dropout=0.0)
    optimizer, scheduler = made(plain)
    losses = []
    for number, (x, y) in enumerate(given):
        optimizer.zero_grad()
        plain[1].requires_grad_(False)
        loss = functional.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        if number % 2:
            scheduler.step()
        losses.append(loss.item())
    plain[1].requires_grad_(True)
    expected = optimizer.state_dict()
    optimizer, scheduler = made(model)
    step = prepare(model, functional.cross_entropy, optimizer, cluster=cluster, plan="samples", folder=tmp_path / "run")
    for number, (x, y) in enumerate(given):
        optimizer.zero_grad()
        loss = step((x, y))
        loss.backward()
        if number == 3:
            with pytest.raises(BadValue, match="Gradients are summed and used on the workers"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 2:
            scheduler.step()
        assert float(loss) == pytest.approx(losses[number], abs=1e-10)
    step.close()
    assert_alike(model, plain)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    for key, state in expected["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(optimizer.state_dict()["state"][key][name], value, rtol=1e-9, atol=1e-12)


def test_options_that_cannot_change_from_step_to_step_are_refused(cluster: Coordinator, tmp_path: Path) -> None:
    given = batches(2)
    model = network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with prepare(
        model, functional.cross_entropy, optimizer, cluster=cluster, plan="samples", folder=tmp_path / "run"
    ) as step:
        step(given[0])
        optimizer.param_groups[0]["nesterov"] = True
        with pytest.raises(BadValue, match="options have changed"):
            step(given[1])
        optimizer.param_groups[0]["nesterov"] = False
        step(given[1])
    assert_alike(model, alone(given)[0])


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.a(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": functional.cross_entropy(logits, labels), "logits": logits}
        )


@pytest.mark.slow
def test_a_dict_with_labels_for_a_loss_of_its_own(cluster: Coordinator, tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = OwnLoss().double()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    step = prepare(model, None, SGD, cluster=cluster, plan="samples", folder=tmp_path / "run")
    for _ in range(3):
        batch = {"x": torch.randn(8, 6, dtype=torch.float64), "labels": torch.randint(0, 3, (8,))}
        optimizer.zero_grad()
        expected = plain(**batch)["loss"]
        expected.backward()
        optimizer.step()
        assert float(step(batch)) == pytest.approx(expected.item(), abs=1e-12)
    assert step.evaluate(batch).loss == pytest.approx(plain(**batch)["loss"].item(), abs=1e-10)
    step.close()
    assert_alike(model, plain)


def test_every_option_of_mh_train_is_the_loops_or_not() -> None:
    """A new option of `mh.train` is honoured by a loop, or declared in `PrepareConfig` as none of its options."""
    from manyhands.job.config import keywords_of
    from manyhands.training.config import TrainConfig
    from manyhands.training.prepare_config import PrepareConfig

    missing = set(keywords_of(TrainConfig)) - set(keywords_of(PrepareConfig))
    assert missing == {
        "epochs", "steps", "batch_size", "shuffle", "feed", "tune", "lengths", "pad", "test", "config", "on_step",
        "validate", "validate_every", "metrics", "callbacks", "ema",
    }  # fmt: skip
    assert len(keywords_of(PrepareConfig)) == 30
