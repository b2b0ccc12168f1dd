"""Weights that several stages hold: training a causal language model over stages is training it on one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hand_made import cluster
from harness import ADAM, SGD, Batch, Ran, alone, plan_for, run, schedule_of, shared
from language_model import SAMPLES, batch, language, next_word
from manyhands.executor.executor import Executor
from manyhands.executor.messages import plan_bytes
from manyhands.explaining.critical_path import TIED_SUMS, critical_path
from manyhands.facts.link import Link
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.memory_formats import reformat_leaf
from manyhands.schedule.actions import Reduce
from manyhands.schedule.memory import DeviceMemory
from manyhands.simulator.simulate import simulate

STEPS = 4
DECAY = Optimizer("AdamW", lr=1e-2, weight_decay=0.1)


BATCHES = [batch(seed) for seed in range(STEPS)]


@cache
def captured() -> Graph:
    words, labels = BATCHES[0]
    return capture(language(), words, loss=next_word, target=labels, granularity="operators")


def staged(graph: Graph, shares: Sequence[Sequence[int]], **options: Any) -> Plan:
    """Stages with about equally many layers, each with its share of a micro-batch's samples."""
    count = len(graph.network.layers)
    ends = [count * place // len(shares) for place in range(len(shares) + 1)]
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    return plan_for(graph, stages, batch_size=SAMPLES, micro_batches=SAMPLES // sum(shares[0]), **options)


def assert_copies_equal(ran: Ran, name: str) -> None:
    """Every device that holds the weight has the same, to the last bit."""
    first, *others = [weights[name] for weights in ran.weights.values() if name in weights]
    assert others
    assert all(torch.equal(first, other) for other in others)


def tied_sums(ran: Ran) -> set[Reduce]:
    actions = (action for listed in ran.schedule.actions.values() for action in listed)
    return {action for action in actions if isinstance(action, Reduce) and action.weights}


SHARES: dict[str, list[list[int]]] = {
    "two stages": [[2], [2]],
    "three stages": [[1], [1], [1]],
    "shared stages": [[3, 1], [1, 1, 2], [4]],
    "shared embedding": [[1, 1], [2]],
}


@pytest.mark.quick("SGD-shared stages")
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("optimizer", [SGD, ADAM, DECAY], ids=["SGD", "Adam", "AdamW"])
def test_a_language_model_with_padding(optimizer: Optimizer, shares: list[list[int]]) -> None:
    graph = captured()
    ran = run(graph, staged(graph, shares), BATCHES, optimizer)
    ran.assert_as_planned(STEPS)
    ran.assert_equals(*alone(graph, BATCHES, optimizer))
    assert_copies_equal(ran, "words.weight")
    assert {name for reduce in tied_sums(ran) for name in reduce.weights} >= {"words.weight"}


class Pictures(nn.Module):
    """One kernel three times: with a map between each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.c = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def with_penalty(module: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target) + 0.1 * sum(weight.square().sum() for weight in module.parameters())


@cache
def pictures(*, has_penalty: bool = False) -> Graph:
    torch.manual_seed(1)
    module = Pictures().double()
    loss = partial(with_penalty, module) if has_penalty else functional.mse_loss
    x, y = maps(0)
    return capture(module, x, loss=loss, target=y, granularity="operators")


def maps(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, 2, 6, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


MAPS = [maps(seed) for seed in range(STEPS)]


def in_three(graph: Graph, *devices: tuple[str, ...], tiles: bool = False, **options: Any) -> Plan:
    """A stage for each convolution; of several devices it is shared by samples, or by tiles."""
    convolutions = [graph.network.op_index[f"conv2d_{number}"] for number in (1, 2)]
    ends = [0, *(graph.network.layer_of_op[op] for op in convolutions), len(graph.network.layers)]
    stages = []
    for between, names in zip(pairwise(ends), devices, strict=True):
        share = ByTiles((2, 1)) if tiles else BySamples(tuple(4 // len(names) for _ in names))
        stages.append(Stage(between, names, share if len(names) > 1 else Single()))
    return plan_for(graph, stages, batch_size=4, **options)


def assert_maps_exact(graph: Graph, plan: Plan, **options: Any) -> Ran:
    ran = run(graph, plan, MAPS, DECAY, **options)
    ran.assert_as_planned(STEPS)
    ran.assert_equals(*alone(graph, MAPS, DECAY))
    return ran


@pytest.mark.slow
def test_a_kernel_in_stages_shared_by_samples_and_by_tiles() -> None:
    for tiles in (False, True):
        ran = assert_maps_exact(pictures(), in_three(pictures(), ("a", "b"), ("c",), ("d", "e"), tiles=tiles))
        assert_copies_equal(ran, "a.weight")
        assert {reduce.devices for reduce in tied_sums(ran)} == {("a", "b", "c", "d", "e")}


def test_a_penalty_counts_a_tied_weight_once() -> None:
    graph = pictures(has_penalty=True)
    assert_maps_exact(graph, in_three(graph, ("a", "b"), ("c",), ("d",)))


def test_a_device_of_several_stages_has_one_copy() -> None:
    alone_sums = tied_sums(assert_maps_exact(pictures(), in_three(pictures(), ("a",), ("a",), ("a",))))
    assert not alone_sums  # nobody else has it
    ran = assert_maps_exact(pictures(), in_three(pictures(), ("a", "b"), ("b",), ("a",)))
    assert {reduce.devices for reduce in tied_sums(ran)} == {("a", "b")}
    others = {name for device in "ab" for reduce in reductions(ran, device) for name in reduce.weights}
    assert others == {"a.weight"}  # and the stage's own bucket is of what it has alone
    memory = DeviceMemory(ran.schedule.plan, pictures().network, ran.schedule.lowering.work["b"].geometries, "b")
    copies = 2 + ran.schedule.plan.optimizer_slots
    assert memory.static_bytes == copies * sum(spec.bytes for spec in pictures().weights if spec.name != "c.bias")


def test_copies_that_lie_differently_in_memory() -> None:
    """A device keeps a kernel as the convolution there reads it; numbers are added up by place, not by address."""

    def lay_out(executor: Executor) -> None:
        if executor.device == "c":
            reformat_leaf(executor.weights.tensors["a.weight"], torch.channels_last)

    ran = assert_maps_exact(pictures(), in_three(pictures(), ("a", "b"), ("c",), ("d",)), watch=lay_out)
    assert not ran.executors["c"].weights.tensors["a.weight"].is_contiguous()


@pytest.mark.slow
def test_nothing_travels_for_a_frozen_weight() -> None:
    module = language()
    module.words.weight.requires_grad_(False)
    words, labels = BATCHES[0]
    graph = capture(module, words, loss=next_word, target=labels, granularity="operators")
    ran = run(graph, staged(graph, [[2], [2]]), BATCHES, SGD)
    ran.assert_equals(*alone(graph, BATCHES, SGD))
    assert not any("words.weight" in reduce.weights for reduce in tied_sums(ran))


def test_the_exchange_costs_what_travels() -> None:
    """In memory, a copy on every device of both stages; in time, the sum at the end of the round."""
    graph, plan = captured(), staged(captured(), [[2], [2]])
    first, second = plan.devices
    machines = cluster(plan.devices, Link(1e6, 0.001))
    simulated = simulate(plan, graph.network, machines)
    assert simulated.bytes_between == plan_bytes(dict(simulated.log.items()), graph.network)
    untied = msgspec.structs.replace(
        graph.network,
        weights={
            name: msgspec.structs.replace(spec, trainable=spec.trainable and name != "words.weight")
            for name, spec in graph.network.weights.items()
        },
    )
    weight = graph.network.weights["words.weight"].bytes
    without = simulate(plan, untied, machines)
    assert simulated.bytes_between[first, second] - without.bytes_between[first, second] == weight
    assert simulated.seconds > without.seconds + weight / 1e6
    assert TIED_SUMS in {leg.use for leg in critical_path(simulated, machines)}
    held = [schedule_of(graph, plan).lowering.work[device].weights() for device in plan.devices]
    assert all("words.weight" in names for names in held)


def reductions(ran: Ran, device: str) -> list[Reduce]:
    return [action for action in ran.schedule.actions[device] if isinstance(action, Reduce)]
