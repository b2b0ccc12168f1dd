"""Runs with order replay in one process, each device a thread, and the plans and batches for them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from harness import JOIN_SECONDS
from manyhands.executor.executor import Executor
from manyhands.executor.feeder import Feeder
from manyhands.executor.messages import COORDINATOR, plan_bytes
from manyhands.executor.optimizers import build
from manyhands.executor.options import ExecutorOptions
from manyhands.executor.round_result import RoundResult
from manyhands.executor.schedules import at_start
from manyhands.executor.scheduling import Scheduling
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Codec, Plan, Replay, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Discard, Forward, Step
from manyhands.schedule.policy import Schedule
from manyhands.transport.switchboard import Switchboard
from real_runs import BATCH, CLASSES, LAYERS, SGD, network

CUT = 2
UP, DOWN = "edge", "server"
PLAIN = Codec()


def captured(change: Callable[[nn.Sequential], None] = lambda model: None) -> Graph:
    model = network()
    change(model)
    example, target = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    return capture(model, example, loss=functional.cross_entropy, target=target, granularity="blocks")


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randn(BATCH, 1, 8, 8, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(count)
    ]


def plan_for(k: int | None, mode: Any = "grouped", count: int = 6, *, codec: Codec = PLAIN, **options: Any) -> Plan:
    stages = (Stage((0, CUT), (UP,)), Stage((CUT, LAYERS), (DOWN,), codec=codec))
    return Plan(
        "Sequential", count * BATCH, stages, micro_batches=count, order="replay", replay=Replay(k, mode), **options
    )


class Replayed:
    """A run of some rounds, each device a thread; `late` seconds pass before the server computes."""

    def __init__(
        self, graph: Graph, plan: Plan, data: list[Any], *, late: float = 0.0, optimizer: Optimizer = SGD
    ) -> None:
        self.graph, self.data, self.optimizer = graph, data, optimizer
        self.schedule = Schedule(resolve(plan, graph.network), graph.network)
        self.plan = self.schedule.plan
        board = Switchboard([*self.plan.devices, COORDINATOR], limit_seconds=20.0)
        self.actions: dict[str, list[tuple[int, Action]]] = defaultdict(list)
        self.results: dict[str, list[RoundResult]] = defaultdict(list)
        self.executors: dict[str, Executor] = {}
        for device in self.plan.devices:
            weights = Weights.copied(graph, self.schedule.lowering.work[device].weights())
            stepper = build(at_start(optimizer), weights.trainable())
            executor = Executor(
                graph,
                self.schedule,
                board.endpoints[device],
                weights,
                stepper,
                ExecutorOptions(seed=7, is_scheduled=bool(optimizer.schedule)),
            )
            board.endpoints[device].mailbox.open(0, executor.expected(), 0, self.plan.steps_per_round)
            self._watch(device, executor, late if device == DOWN else 0.0)
            self.executors[device] = executor
        self.errors: list[BaseException] = []
        board.endpoints[COORDINATOR].mailbox.open(0, {})
        threads = [threading.Thread(target=self._work, args=(device,), daemon=True) for device in self.plan.devices]
        for thread in threads:
            thread.start()
        feeder = Feeder(graph, self.schedule, board.endpoints[COORDINATOR])
        stride, scheduling = self.plan.steps_per_round, Scheduling.by_name(optimizer)
        for step, (inputs, targets) in enumerate(data):
            end = time.monotonic() + JOIN_SECONDS
            while not self.errors and step // stride > 2 + min(len(self.results[d]) for d in self.plan.devices):
                assert time.monotonic() < end, "a device hangs"
                time.sleep(0.001)
            if scheduling is not None:
                feeder.send_rates(step // stride * stride, scheduling.at(step), step % stride)
            feeder.send(step // stride * stride, inputs, targets, step % stride)
        for thread in threads:
            thread.join(JOIN_SECONDS)
            assert not thread.is_alive(), "a device hangs"
        for executor in self.executors.values():
            executor.close()
        for error in self.errors:
            raise error

    def _watch(self, device: str, executor: Executor, late: float) -> None:
        act = executor._act

        def watched(action: Action) -> None:
            if late and isinstance(action, Forward):
                time.sleep(late)
            self.actions[device].append((executor.step, action))
            act(action)

        executor._act = watched  # type: ignore[method-assign]

    def _work(self, device: str) -> None:
        torch.set_num_threads(1)
        stride = self.plan.steps_per_round
        try:
            for step in range(0, len(self.data), stride):
                count = min(stride, len(self.data) - step)
                self.results[device].append(self.executors[device].round(step, count))
        except BaseException as error:
            self.errors.append(error)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {n: t.detach() for one in self.executors.values() for n, t in one.weights.tensors.items()}

    @property
    def losses(self) -> list[float]:
        return [loss for result in self.results[self.plan.stages[-1].devices[0]] for loss in result.losses]

    @property
    def staleness(self) -> list[int]:
        return [late for result in self.results[UP] for late in result.staleness]

    def assert_bytes_are_the_plans(self) -> None:
        every = {device: tuple(self.schedule.every_action(device)) for device in self.plan.devices}
        for (source, target), size in plan_bytes(every, self.schedule.network).items():
            sent = self.executors[source].endpoint.sent_bytes[target]
            assert sent * self.plan.steps_per_round == size * len(self.data)

    def events(self) -> list[tuple[str, int]]:
        """("forward" or "update" or "discard", step) in the order the edge did them."""
        found = []
        for first, action in self.actions[UP]:
            if isinstance(action, Forward) and action.part != "again":
                found.append(("forward", first + action.micro_batch))
            elif isinstance(action, (Step, Discard)):
                found.append(("update" if isinstance(action, Step) else "discard", first + action.micro_batch))
        return found
