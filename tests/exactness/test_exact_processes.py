"""Training over real processes equals training on one device, and every device did what its plan says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.runtime.coordinator import Coordinator
from real_runs import (
    ADAM,
    BATCH,
    SGD,
    Pictures,
    Ran,
    assert_close,
    assert_same,
    in_line,
    names,
    network,
    piped,
    shared,
    train,
    workers,
)

pytestmark = [
    pytest.mark.xdist_group("exact_processes"),  # its workers are started once
    pytest.mark.usefixtures("strangers"),
]

STEPS = 12  # the learning rate changes twice


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(3) as coordinator:
        yield coordinator


def plan_called(kind: str, devices: tuple[str, ...]) -> Plan:
    plans = {"samples": shared(devices, 3, 1, 8), "mixed": piped(devices), "line": in_line(devices)}
    return plans[kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("samples", SGD),
        pytest.param("samples", ADAM, marks=pytest.mark.slow),
        ("mixed", SGD),
        pytest.param("line", ADAM, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_unequal_shares_equal_one_device(cluster: Coordinator, tmp_path: Path, kind: str, optimizer: Optimizer) -> None:
    plan = plan_called(kind, names(cluster))
    ran = train(cluster, plan, tmp_path / "shared", optimizer=optimizer, steps=STEPS)
    ran.assert_as_planned()
    assert len(ran.result.logs) == 3
    one = train(
        cluster, "single", tmp_path / "single", optimizer=optimizer, steps=STEPS, micro_batches=plan.micro_batches
    )
    one.assert_as_planned()
    assert len(one.result.logs) == 1
    assert_close(ran.state, one.state)
    assert ran.result.losses == pytest.approx(one.result.losses, rel=1e-10)
    assert len(ran.result.losses) == STEPS


@pytest.mark.quick("Adam")
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=lambda optimizer: optimizer.name)
def test_shares_equal_a_plain_pytorch_loop(cluster: Coordinator, tmp_path: Path, optimizer: Optimizer) -> None:
    data = Pictures()
    ran = train(
        cluster, shared(names(cluster), 3, 1, 8), tmp_path, model=network(dropout=0.0), data=data, optimizer=optimizer,
        steps=STEPS, shuffle=False,
    )  # fmt: skip
    ran.assert_as_planned()
    model = network(dropout=0.0)
    stepper: Any = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if optimizer is SGD
        else torch.optim.Adam(model.parameters(), lr=1e-3)
    )
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 4, 0.7) if optimizer is SGD else None
    losses = []
    for step in range(STEPS):
        rows = slice(step % 6 * BATCH, (step % 6 + 1) * BATCH)
        stepper.zero_grad()
        loss = functional.cross_entropy(model(data.pictures[rows]), data.classes[rows])
        loss.backward()
        stepper.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    assert_close(ran.state, model.state_dict())
    assert ran.result.losses == pytest.approx(losses, rel=1e-10)


@pytest.mark.slow
def test_local_batch_norm_is_that_of_replicas(cluster: Coordinator, tmp_path: Path) -> None:
    """As DDP: each replica has statistics of its own share, and the first one's buffers are kept."""
    data, samples = Pictures(), (3, 1, 8)
    plan = shared(names(cluster), *samples, batch_norm="local")
    ran = train(
        cluster, plan, tmp_path, model=network(dropout=0.0), data=data, steps=5, shuffle=False, batch_norm="local"
    )
    ran.assert_as_planned()
    model = network(dropout=0.0)
    stepper = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 4, 0.7)
    for step in range(5):
        replicas = [copy.deepcopy(model) for _ in samples]
        first = step * BATCH
        stepper.zero_grad()
        for replica, count in zip(replicas, samples):
            rows = slice(first, first + count)
            replica.zero_grad()
            loss = functional.cross_entropy(replica(data.pictures[rows]), data.classes[rows]) * count / BATCH
            loss.backward()
            for own, other in zip(model.parameters(), replica.parameters()):
                assert other.grad is not None
                own.grad = other.grad.clone() if own.grad is None else own.grad + other.grad
            first += count
        stepper.step()
        schedule.step()
        for own_buffer, kept in zip(model.buffers(), replicas[0].buffers()):
            own_buffer.copy_(kept)
    assert_close(ran.state, model.state_dict())


@pytest.mark.slow
def test_same_seed_and_plan_give_the_same_bits(cluster: Coordinator, tmp_path: Path) -> None:
    plan = piped(names(cluster))
    runs: list[Ran] = [train(cluster, plan, tmp_path / str(n), steps=8) for n in range(2)]
    assert_same(runs[0].state, runs[1].state)
    assert runs[0].result.losses == runs[1].result.losses
    other = train(cluster, plan, tmp_path / "other", steps=8, seed=6)
    assert not torch.equal(runs[0].state["2.2.weight"], other.state["2.2.weight"])


@pytest.mark.slow
def test_float32_stays_float32(cluster: Coordinator, tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    ran = train(
        cluster, shared(names(cluster), 3, 1, 8), tmp_path, model=model, data=Pictures(dtype=torch.float32), steps=3
    )
    ran.assert_as_planned()
    assert ran.model is model
    assert {t.dtype for t in ran.state.values() if t.is_floating_point()} == {torch.float32}
    loaded = nn.Module.state_dict(network(dtype=torch.float32))
    assert not torch.equal(loaded["2.2.weight"], ran.state["2.2.weight"])
