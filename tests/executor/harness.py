"""Devices as threads of one process: the executor on the in-process engine, against one device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.engine.inprocess import Switchboard
from manyhands.executor.executor import Executor, Setting
from manyhands.executor.feeder import Feeder
from manyhands.executor.log import DeviceLog
from manyhands.executor.messages import COORDINATOR, plan_bytes
from manyhands.executor.optimizers import build
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import Loss, bind_inputs
from manyhands.graph.weights import Weights
from manyhands.schedule.policy import Schedule

Batch = tuple[Any, Any]


@dataclass
class Ran:
    """What a run in one process gave."""

    weights: dict[str, dict[str, torch.Tensor]]
    losses: list[float]
    logs: dict[str, DeviceLog]
    schedule: Schedule
    errors: dict[str, BaseException]

    def assert_as_planned(self, steps: int) -> None:
        """Every device did its actions and computed its share, and the bytes between them are the plan's."""
        planned = plan_bytes({d: tuple(self.schedule.every_action(d)) for d in self.logs}, self.schedule.network)
        sent = {(d, to): n for d, log in self.logs.items() for to, n in log.sent_bytes.items() if to != COORDINATOR}
        assert sent == {pair: size * steps for pair, size in planned.items() if size}
        for device, log in self.logs.items():
            texts = [str(action) for action in self.schedule.every_action(device)]
            assert log.rounds == steps
            assert (log.actions if self.schedule.is_fixed else sorted(log.actions)) == (
                texts if self.schedule.is_fixed else sorted(texts)
            )
            geometry = self.schedule.lowering.work[device].geometry
            if geometry is not None:
                assert log.operators == (geometry.last - geometry.first) * steps * self.schedule.plan.micro_batches
                assert log.samples > 0
            assert log.refused_frames == 0


def run(
    graph: Graph,
    plan: Plan,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    seed: int = 0,
    board: Switchboard | None = None,
    fail: tuple[str, int] | None = None,
) -> Ran:
    """Train `batches` by `plan`, each device a thread."""
    schedule = Schedule(resolve(plan, graph.network), graph.network)
    devices = list(schedule.lowering.work)
    board = board or Switchboard([*devices, COORDINATOR], limit_seconds=5)
    if fail is not None:
        board.fail_after(*fail)
    board.endpoints[COORDINATOR].mailbox.open(0, {})
    executors: dict[str, Executor] = {}
    for device in devices:
        geometry = schedule.lowering.work[device].geometry
        names = graph.network.weights_of(geometry.first, geometry.last) if geometry else ()
        weights = Weights.copied(graph, names)
        stepper = build(optimizer, weights.trainable()) if geometry else None
        executor = Executor(graph, schedule, board.endpoints[device], weights, stepper, Setting(seed=seed))
        board.endpoints[device].mailbox.open(0, executor.expected())
        executors[device] = executor
    losses = [0.0] * len(batches)
    errors: dict[str, BaseException] = {}
    lock = threading.Lock()
    window = threading.Semaphore(0)

    def work(device: str) -> None:
        torch.set_num_threads(1)
        try:
            for step in range(len(batches)):
                result = executors[device].round(step)
                with lock:
                    losses[step] += result.loss or 0.0
                window.release()
        except BaseException as error:
            errors[device] = error
            for _ in batches:
                window.release()

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    feeder = Feeder(graph, schedule, board.endpoints[COORDINATOR])
    for step, (inputs, targets) in enumerate(batches):
        if step >= 2:
            for _ in devices:
                assert window.acquire(timeout=10)
        feeder.send(step, inputs, targets)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a device hangs"
    for executor in executors.values():
        executor.close()
    return Ran(
        {d: {n: t.detach().clone() for n, t in e.weights.tensors.items()} for d, e in executors.items()},
        losses, {d: e.log for d, e in executors.items()}, schedule, errors,
    )  # fmt: skip


def alone(graph: Graph, batches: Sequence[Batch], optimizer: Optimizer, *, seed: int = 0, micro_batches: int = 1) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same by one piece and plain autograd: the reference."""
    weights = Weights.copied(graph)
    stepper, piece, loss = build(optimizer, weights.trainable()), Piece(graph, weights), Loss(graph)
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        named = bind_inputs(graph, inputs)
        size = next(iter(named.values())).shape[0] // micro_batches
        total = 0.0
        for micro_batch in range(micro_batches):
            rows = slice(micro_batch * size, (micro_batch + 1) * size)
            values = piece(
                {name: tensor[rows] for name, tensor in named.items()},
                Context(seed=seed, step=step, first_sample=micro_batch * size),
            )
            value, gradients = loss(values, targets[rows])
            roots = [(values[n], g / micro_batches) for n, g in gradients.items() if values[n].requires_grad]
            torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            total += float(value) / micro_batches
        losses.append(total)
        stepper.step()
        stepper.zero()
    return {name: tensor.detach() for name, tensor in weights.tensors.items()}, losses


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, in units of the largest number."""
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else 1.0
    scale = float(other.abs().max()) or 1.0
    return float((one - other).abs().max()) / scale


class Small(nn.Module):
    """Convolutions, batch norms, dropout, a residual and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.b = nn.BatchNorm2d(4)
        self.c = nn.Conv2d(4, 4, 3, padding=1)
        self.d = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.e = nn.Linear(4 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.b(self.a(x)))
        x = torch.relu(x + self.d(self.c(x)))
        x = nn.functional.avg_pool2d(x, 2).flatten(1)
        out: torch.Tensor = self.e(self.drop(x))
        return out


def small_batches(count: int, samples: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64),
            torch.randint(0, 5, (samples,), generator=generator),
        )
        for _ in range(count)
    ]
