"""Order replay: every mini-batch with its own step, stages that run ahead and catch up (SPLIT §4.1), in float64.

What is computed depends on when gradients arrive. So the log of a run is followed, update by update, by plain PyTorch
on one device: that must come to the same weights.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import JOIN_SECONDS, TOLERANCE, relative
from torch import nn
from torch.nn import functional

from manyhands.engine.switchboard import Switchboard
from manyhands.executor.executor import Executor, RoundResult, Setting
from manyhands.executor.feeder import Feeder
from manyhands.executor.messages import COORDINATOR, plan_bytes
from manyhands.executor.optimizers import build
from manyhands.facts.errors import BadPlan
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Codec, Plan, Replay, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Backward, Discard, Forward, Step
from manyhands.schedule.policy import Schedule
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
            stepper = build(optimizer, weights.trainable())
            executor = Executor(graph, self.schedule, board.endpoints[device], weights, stepper, Setting(seed=7))
            board.endpoints[device].mailbox.open(0, executor.expected(), 0, self.plan.steps_per_round)
            self._watch(device, executor, late if device == DOWN else 0.0)
            self.executors[device] = executor
        self.errors: list[BaseException] = []
        board.endpoints[COORDINATOR].mailbox.open(0, {})
        threads = [threading.Thread(target=self._work, args=(device,), daemon=True) for device in self.plan.devices]
        for thread in threads:
            thread.start()
        feeder = Feeder(graph, self.schedule, board.endpoints[COORDINATOR])
        stride = self.plan.steps_per_round
        for step, (inputs, targets) in enumerate(data):
            end = time.monotonic() + JOIN_SECONDS
            while not self.errors and step // stride > 2 + min(len(self.results[d]) for d in self.plan.devices):
                assert time.monotonic() < end, "a device hangs"
                time.sleep(0.001)
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


class Followed:
    """The same, update by update, on one device."""

    def __init__(self, run: Replayed) -> None:
        graph = run.graph
        cut = graph.network.layers[CUT].first
        self.weights = Weights.copied(graph)
        up, down = Piece(graph, self.weights, 0, cut), Piece(graph, self.weights, cut)
        loss = Piece(graph.loss, Weights.copied(graph.loss))  # type: ignore[arg-type]
        own = dict(self.weights.trainable().items())
        upper = build(run.optimizer, {n: t for n, t in own.items() if n in up.weight_names})
        lower = build(run.optimizer, {n: t for n, t in own.items() if n in down.weight_names})
        (crossing,) = down.inputs
        (name,) = (spec.name for spec in graph.inputs)
        gradients: dict[int, torch.Tensor] = {}
        self.losses: list[float] = []
        for what, step in run.events():
            context = Context(True, 7, step, 0, BATCH)
            inputs, target = run.data[step]
            if what == "forward":
                with torch.no_grad():
                    feature = up({name: inputs}, context)[crossing]
                leaf = feature.detach().requires_grad_()
                output = next(iter(down({crossing: leaf}, context).values()))
                given = dict(zip((spec.name for spec in graph.loss.inputs), (output, target), strict=True))  # type: ignore[union-attr]
                value = next(iter(loss(given, Context(samples=BATCH)).values()))
                value.backward()
                lower.step()
                lower.zero()
                self.losses.append(float(value.detach()))
                assert leaf.grad is not None
                gradients[step] = leaf.grad
            elif what == "update":
                buffers = {n: t.clone() for n, t in self.weights.tensors.items() if not t.requires_grad}
                feature = up({name: inputs}, context)[crossing]
                feature.backward(gradients.pop(step))
                upper.step()
                upper.zero()
                with torch.no_grad():
                    for buffer, tensor in buffers.items():
                        self.weights.tensors[buffer].copy_(tensor)


def plain(graph: Graph, data: list[Any]) -> Replayed:
    """One device, one mini-batch after another."""
    stage = Stage((0, LAYERS), (UP,), Single())
    return Replayed(graph, Plan("Sequential", BATCH, (stage,), order="1f1b"), data)


def assert_equal(run: Replayed, weights: dict[str, torch.Tensor], losses: list[float]) -> None:
    assert run.weights.keys() == weights.keys()
    for name, tensor in run.weights.items():
        assert relative(tensor, weights[name]) <= TOLERANCE, name
    assert run.losses == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("mode", ["grouped", "window"])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_nothing_ahead_is_plain_training(mode: str, count: int) -> None:
    """Dropout, batch norm and momentum included; the last round is shorter."""
    graph, data = captured(), batches(9)
    run, one = Replayed(graph, plan_for(0, mode, count), data), plain(graph, data)
    assert_equal(run, one.weights, one.losses)
    assert run.staleness == [0] * 9
    assert not any(isinstance(a, Forward) and a.part for _, a in run.actions[UP])
    run.assert_bytes_are_the_plans()


def test_one_stage_alone_is_plain_training() -> None:
    graph, data = captured(), batches(7)
    stage = Stage((0, LAYERS), (DOWN,), Single())
    run = Replayed(graph, Plan("Sequential", 3 * BATCH, (stage,), micro_batches=3, order="replay"), data)
    one = plain(graph, data)
    assert_equal(run, one.weights, one.losses)


@pytest.mark.parametrize(("k", "mode"), [(1, "grouped"), (3, "grouped"), (3, "window"), (None, "grouped")])
def test_what_runs_ahead_catches_up_as_its_log_says(k: int | None, mode: str) -> None:
    graph, data = captured(), batches(14)
    run = Replayed(graph, plan_for(k, mode, 8), data, late=0.003)
    followed = Followed(run)
    assert_equal(run, {name: t.detach() for name, t in followed.weights.tensors.items()}, followed.losses)
    assert len(run.staleness) == 14
    assert 0 < max(run.staleness) <= (8 if k is None else k)
    assert min(run.staleness) == 0
    replays = sum(isinstance(a, Forward) and a.part == "again" for _, a in run.actions[UP])
    assert replays == sum(isinstance(a, Forward) and a.part == "ahead" for _, a in run.actions[UP]) > 0
    run.assert_bytes_are_the_plans()
    assert all(executor.runners[0].flights == {} for device, executor in run.executors.items() if device == UP)


def test_the_first_of_a_group_is_not_replayed() -> None:
    graph, data = captured(), batches(6)
    run = Replayed(graph, plan_for(2, "grouped", 6), data, late=0.01)
    firsts = set(range(0, 6, 3))
    parts = {a.micro_batch: a.part for _, a in run.actions[UP] if isinstance(a, Forward) and a.part != "again"}
    assert {step for step, part in parts.items() if not part} == firsts
    assert run.staleness == [0, 1, 2, 0, 1, 2]


def test_results_that_are_too_late_are_discarded() -> None:
    graph, data = captured(), batches(8)
    run = Replayed(graph, plan_for(1, "window", 8, warm_up=(4, 1)), data, late=0.01)
    assert -1 in run.staleness
    assert max(run.staleness) == 1
    followed = Followed(run)
    assert_equal(run, {name: t.detach() for name, t in followed.weights.tensors.items()}, followed.losses)


def test_frozen_layers_get_nothing_back() -> None:
    def freeze(model: nn.Sequential) -> None:
        for part in model[:CUT]:
            part.requires_grad_(False)

    graph, data = captured(freeze), batches(6)
    run, one = Replayed(graph, plan_for(5, "grouped", 6), data), plain(graph, data)
    assert_equal(run, one.weights, one.losses)
    assert run.staleness == []
    assert not run.executors[DOWN].endpoint.sent_bytes[UP]
    assert not any(isinstance(a, (Backward, Step)) for _, a in run.actions[UP])


def test_packed_features_take_their_part_of_the_bytes() -> None:
    graph, data = captured(), batches(6)
    wide = Replayed(graph, plan_for(2), data).executors[UP].endpoint.sent_bytes[DOWN]
    run = Replayed(graph, plan_for(2, codec=Codec(bits=8)), data, late=0.005)
    run.assert_bytes_are_the_plans()
    assert run.executors[UP].endpoint.sent_bytes[DOWN] == wide // 8 + 16 * 6  # of float64
    assert max(run.staleness) > 0


def test_an_optimiser_with_a_schedule_steps_once_for_each_mini_batch() -> None:
    graph, data = captured(), batches(8)
    optimizer = Optimizer("Adam", lr=1e-2, schedule=[("StepLR", {"step_size": 2, "gamma": 0.5})])
    run = Replayed(graph, plan_for(3, "window", 8), data, late=0.003, optimizer=optimizer)
    followed = Followed(run)
    assert_equal(run, {name: t.detach() for name, t in followed.weights.tensors.items()}, followed.losses)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((Stage((0, 1), ("a", "b"), BySamples((6, 6))), Stage((1, LAYERS), ("c",))), "2 devices"),
        ((Stage((0, 1), ("a",)), Stage((1, 2), ("b",)), Stage((2, LAYERS), ("c",))), "of another stage"),
    ],
)
def test_plans_that_cannot_be_replayed(stages: tuple[Stage, ...], words: str) -> None:
    with pytest.raises(BadPlan, match=words):
        resolve(Plan("Sequential", BATCH, stages, order="replay"), captured().network)
    with pytest.raises(BadPlan, match=r"replay\.k is -1"):
        resolve(plan_for(-1), captured().network)
