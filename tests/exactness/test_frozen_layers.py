"""Fine-tuning: what is frozen has no gradients, no optimizer state and, below all that trains, no backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adapted_language import adapted
from harness import ADAM, SGD, Batch, Ran, alone, assert_exact, plan_for, run, schedule_of, shared
from language_model import SAMPLES, batch, next_word
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.schedule.actions import Action, Backward, Forward, Receive, Send
from manyhands.schedule.memory import DeviceMemory
from manyhands.schedule.policy import Schedule

STEPS = 3
BATCHES = [batch(seed) for seed in range(STEPS)]
ORDERS = ("1f1b", "gpipe", "eager", "sequential")


@cache
def captured(*blocks: str, dropout: float = 0.0) -> Graph:
    words, labels = BATCHES[0]
    return capture(adapted(*blocks, dropout=dropout), words, loss=next_word, target=labels, granularity="operators")


def staged(graph: Graph, shares: Sequence[Sequence[int]], order: str = "1f1b") -> Plan:
    """Stages with about equally many layers, each with its share of a micro-batch's samples."""
    count = len(graph.network.layers)
    ends = [count * place // len(shares) for place in range(len(shares) + 1)]
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    return plan_for(graph, stages, batch_size=SAMPLES, micro_batches=SAMPLES // sum(shares[0]), order=order)


def lowest_trained(graph: Graph) -> int:
    tensors = graph.network.tensors
    return next(i for i, op in enumerate(graph.network.ops) if any(tensors[n].differentiable for n in op.outputs))


def by_pytorch(module: nn.Module, batches: Sequence[Batch]) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of plain PyTorch."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for words, labels in batches:
        loss = next_word(module(words), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: tensor.detach() for name, tensor in module.named_parameters(remove_duplicate=False)}, losses


SHARES: dict[str, list[list[int]]] = {
    "samples": [[3, 1]], "two stages": [[2], [2]], "mixed": [[1, 1], [2]], "three stages": [[1], [1], [1]],
}  # fmt: skip


@pytest.mark.quick("samples-first")
@pytest.mark.parametrize("blocks", [("first", "second"), ("first",), ("second",)], ids="+".join)
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_adapters_of_a_language_model_with_padding_train_as_by_pytorch(
    shares: list[list[int]], blocks: tuple[str, ...]
) -> None:
    """Its embedding, which is the output layer too, is frozen: the stages that hold it have nothing to add up."""
    graph = captured(*blocks)
    ran = run(graph, staged(graph, shares), BATCHES, SGD)
    ran.assert_as_planned(STEPS)
    weights, losses = by_pytorch(adapted(*blocks), BATCHES)
    ran.assert_equals({**graph.state, **weights}, losses, 1e-9)
    assert not any("words.weight" in sums.weights for sums in ran.schedule.lowering.tied_sums)
    assert_only_trained_has_state(graph, ran)


def assert_only_trained_has_state(graph: Graph, ran: Ran) -> None:
    for executor in ran.executors.values():
        trained = {name for name in executor.weights.tensors if graph.network.weights[name].trainable}
        assert all(tensor.grad is None for name, tensor in executor.weights.tensors.items() if name not in trained)
        assert executor.stepper is not None
        held = executor.stepper.state_tensors()
        assert len(held) <= len(trained)  # SGD keeps a momentum for each
        assert sum(tensor.numel() for tensor in held) == sum(graph.state[name].numel() for name in trained)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("shares", [[[2], [2]], [[1, 1], [2]]], ids=["two stages", "mixed"])
def test_dropout_of_adapters_draws_as_one_device(shares: list[list[int]]) -> None:
    graph = captured("second", dropout=0.1)
    assert any(op.random for op in graph.network.ops)
    assert_as_one_device(graph, staged(graph, shares))


@pytest.mark.quick("eager", "1f1b")
@pytest.mark.parametrize("order", ORDERS)
def test_orders_without_a_backward_pass_in_the_first_stage(order: str) -> None:
    graph = captured("second")
    assert_as_one_device(graph, staged(graph, [[1], [1]], order))


def assert_as_one_device(graph: Graph, plan: Plan) -> None:
    """One device computes the whole batch at once: its loss is a mean over the words that are not padding."""
    ran = run(graph, plan, BATCHES, ADAM, seed=7)
    ran.assert_as_planned(STEPS)
    ran.assert_equals(*alone(graph, BATCHES, ADAM, seed=7), 1e-9)


def actions_of(schedule: Schedule, stage: int, kind: type[Action]) -> list[Action]:
    geometry = schedule.lowering.geometries[stage]
    return [a for device in geometry.devices for a in schedule.every_action(device) if isinstance(a, kind)]


def test_below_the_lowest_adapter_nothing_goes_back() -> None:
    graph = captured("second")
    low = lowest_trained(graph)
    schedule = schedule_of(graph, staged(graph, [[1, 1], [2]]))
    first, second = schedule.lowering.geometries
    assert first.last < low < second.last
    assert not first.runs_backward
    assert actions_of(schedule, 0, Forward)
    assert not actions_of(schedule, 0, Backward)
    received = [a.message.kind for a in actions_of(schedule, 0, Receive) if isinstance(a, Receive)]
    assert "gradient" not in received
    assert all(a.message.kind == "value" for a in actions_of(schedule, 0, Send) if isinstance(a, Send))
    assert second.backward_first == low
    spans = {(a.first, a.last) for a in actions_of(schedule, 1, Backward) if isinstance(a, Backward)}
    assert min(start for start, _ in spans) == low
    assert max(end for _, end in spans) == second.last


def test_above_an_adapter_gradients_go_back_through_what_is_frozen() -> None:
    graph = captured("first")
    schedule = schedule_of(graph, staged(graph, [[2], [2]]))
    low = lowest_trained(graph)
    assert low < schedule.lowering.geometries[1].first
    assert not any(graph.network.weights[n].trainable for op in graph.network.ops[low + 12 :] for n in op.weights)
    assert [a.message.kind for a in actions_of(schedule, 0, Receive) if isinstance(a, Receive)].count("gradient") == 2
    assert actions_of(schedule, 1, Backward)


def test_recomputed_layers_below_all_that_trains_are_not_run_again() -> None:
    graph = captured("second")
    plan = staged(graph, [[2]])
    count = len(graph.network.layers)
    low = graph.network.layer_of_op[lowest_trained(graph)]
    stage = Stage((0, count), plan.stages[0].devices, recompute=((0, 3), (3, low), (low - 0, low + 2)))
    plan = plan_for(graph, [stage], batch_size=SAMPLES, micro_batches=2)
    again = [a for a in actions_of(schedule_of(graph, plan), 0, Forward) if isinstance(a, Forward) and a.part]
    assert {a.first for a in again} == {graph.network.layers[low].first}
    assert_as_one_device(graph, plan)


# Memory


MAP_BYTES = 128 * 64 * 8


class Tower(nn.Module):
    """Wide blocks, of which some are frozen; a frozen one keeps nothing but the input of its activation."""

    def __init__(self, trained: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6))
        for number, block in enumerate(self.blocks):
            block.requires_grad_(number in trained)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tower(*trained: int) -> Graph:
    torch.manual_seed(0)
    x = torch.randn(4, 64, dtype=torch.float64)
    return capture(
        Tower(trained).double(), x, loss=functional.mse_loss, target=torch.zeros_like(x), granularity="operators"
    )


def saved_bytes(graph: Graph) -> list[int]:
    return [op.saved_bytes for op in graph.network.ops]


@pytest.mark.slow
def test_activations_are_saved_only_where_a_gradient_needs_them() -> None:
    """A row is 512 bytes. A trained linear layer keeps its input; through a frozen one the gradient goes back without
    it, and tanh keeps its result."""
    every, bottom, top = (saved_bytes(tower(*trained)) for trained in (range(6), [0], [5]))
    assert sum(every[:3]) == 512 * 2  # the first input is the batch itself
    assert [sum(bottom[3 * n : 3 * n + 3]) for n in range(1, 6)] == [512] * 5
    assert top[:15] == [0] * 15
    assert sum(top[15:]) == 512 * 2


@pytest.mark.quick("5")
@pytest.mark.parametrize("trained", [(0, 1, 2, 3, 4, 5), (5,), (0,), (2,)], ids=["all", "5", "0", "2"])
def test_memory_is_as_the_model_says(trained: tuple[int, ...]) -> None:
    """Two stages, four micro-batches of 128 samples; beside the model there is the batch, and the loss at work."""
    graph = tower(*trained)
    plan = plan_for(graph, [shared(0, 9, 128), shared(9, 18, 128)], batch_size=512, micro_batches=4)
    schedule = schedule_of(graph, plan)
    batches = [(torch.randn(512, 64, dtype=torch.float64), torch.zeros(512, 64, dtype=torch.float64)) for _ in "ab"]
    ran = run(graph, plan, batches, SGD, memory_step=1)
    ran.raise_first()
    for geometry in schedule.lowering.geometries:
        (device,) = geometry.devices
        memory = DeviceMemory(schedule.plan, graph.network, [geometry], device)
        for action in schedule.every_action(device):
            memory.act(action)
        measured = ran.logs[device].peak_bytes
        assert 0.7 * memory.peak_bytes <= measured <= memory.peak_bytes + 6 * MAP_BYTES, (device, measured)
        assert memory.held_bytes == 0
        here = [graph.network.weights[n] for n in graph.network.weights_of(geometry.first, geometry.last)]
        held = sum(weight.bytes for weight in here)
        optimizer_and_gradients = 2 * sum(weight.bytes for weight in here if weight.trainable)
        assert memory.static_bytes == held + optimizer_and_gradients
        if not geometry.runs_backward:  # weights, a map that came in, and two at work
            assert memory.peak_bytes <= held + 4 * MAP_BYTES
            assert measured <= held + 4 * MAP_BYTES


# Tiles


class Maps(nn.Module):
    """Convolutions and norms on maps, of which the last are trained."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(2, 3)
        for part in list(self.parts)[:frozen]:
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def pictures(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 2, 8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (4,), generator=generator)


@pytest.mark.quick("3-adjoint")
@pytest.mark.parametrize("groups", [None, ("parts.0.0", "parts.1.0", "parts.2.0")], ids=["adjoint", "groups"])
@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_tiles_of_frozen_layers_go_forward_only(frozen: int, groups: tuple[str, ...] | None) -> None:
    torch.manual_seed(1)
    x, y = pictures(0)
    graph = capture(
        Maps(frozen).double(), x, loss=functional.cross_entropy, target=y, granularity="operators", name="maps"
    )
    names = [layer.name for layer in graph.network.layers]
    low = lowest_trained(graph)
    tiles = ByTiles((2, 1), backward_groups=None if groups is None else tuple(n for n in names if n in groups))
    count = len(names)
    cut = next(i for i, layer in enumerate(graph.network.layers) if "mean" in graph.network.ops[layer.first].target)
    plan = plan_for(graph, [Stage((0, cut), ("a", "b"), tiles), shared(cut, count, 2)], batch_size=4, micro_batches=2)
    schedule = schedule_of(graph, plan)
    spans = [(a.first, a.last) for a in actions_of(schedule, 0, Backward) if isinstance(a, Backward)]
    assert (not spans) == (frozen == 3)
    assert all(first >= low for first, _ in spans)
    assert_exact(graph, plan, [pictures(seed) for seed in range(STEPS)], SGD)


@pytest.mark.slow
def test_a_frozen_stage_of_shared_norms_keeps_nothing_between_passes() -> None:
    torch.manual_seed(1)
    x, y = pictures(0)
    graph = capture(Maps(3).double(), x, loss=functional.cross_entropy, target=y, granularity="operators")
    cut = next(i for i, layer in enumerate(graph.network.layers) if "mean" in graph.network.ops[layer.first].target)
    stages = [shared(0, cut, 1, 1), shared(cut, len(graph.network.layers), 2)]
    plan = plan_for(graph, stages, batch_size=4, micro_batches=2)
    ran = assert_exact(graph, plan, [pictures(seed) for seed in range(STEPS)], SGD)
    assert not any(a.backward for a in ran.schedule.every_action("s0-0") if hasattr(a, "backward")), (
        "statistics of gradients are added up"
    )


def test_one_device_is_the_reference_too() -> None:
    """`alone`, by which dropout is judged, is plain PyTorch where there is none."""
    graph = captured("first", "second")
    weights, losses = by_pytorch(adapted("first", "second"), BATCHES)
    own, own_losses = alone(graph, BATCHES, SGD)
    assert own_losses == pytest.approx(losses, rel=1e-12)
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, weights.get(name, graph.state[name]), rtol=1e-12, atol=1e-14)
