"""Order replay: every mini-batch with its own step, stages that run ahead and catch up (SPLIT §4.1), in float64.

What is computed depends on when gradients arrive. So the log of a run is followed, update by update, by plain PyTorch
on one device: that must come to the same weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness import TOLERANCE, relative
from manyhands.facts.errors import BadPlan
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Codec, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Backward, Forward, Step
from real_runs import BATCH, LAYERS
from replayed import CUT, DOWN, UP, Replayed, batches, captured, plan_for
from scheduled_stepper import ScheduledStepper


class Followed:
    """The same, update by update, on one device."""

    def __init__(self, run: Replayed) -> None:
        graph = run.graph
        cut = graph.network.layers[CUT].first
        self.weights = Weights.copied(graph)
        up, down = Piece(graph, self.weights, 0, cut), Piece(graph, self.weights, cut)
        loss = Piece(graph.loss, Weights.copied(graph.loss))  # type: ignore[arg-type]
        own = dict(self.weights.trainable().items())
        upper = ScheduledStepper(run.optimizer, {n: t for n, t in own.items() if n in up.weight_names})
        lower = ScheduledStepper(run.optimizer, {n: t for n, t in own.items() if n in down.weight_names})
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
                upper.steps_done = step  # what was discarded has used up its learning rate
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


@pytest.mark.quick(every=6)
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


@pytest.mark.quick(every=4)
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
    assert all(executor.runners[0].in_flight == {} for device, executor in run.executors.items() if device == UP)


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


@pytest.mark.slow
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
