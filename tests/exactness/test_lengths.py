"""Samples of different lengths over several devices: same losses and weights as PyTorch on the same padded batches, and
as on the unpadded samples one by one, to 1e-9."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from causal_network import Causal, Texts, causal, drawn_lengths, next_word
from harness import SGD, Ran, plan_for, run, shared
from manyhands.data.length_order import LengthOrder
from manyhands.data.loader import Prefetcher
from manyhands.data.padding import measured, wanted_lengths
from manyhands.facts.plan import Plan
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs

LENGTHS, SAMPLES, STEPS, TOLERANCE = (5, 12), 4, 6, 1e-9
TEXTS = Texts(drawn_lengths(STEPS * SAMPLES, 2, LENGTHS[-1]))


@cache
def order() -> LengthOrder:
    padding, lengths = measured(TEXTS, wanted_lengths(LENGTHS, None))
    return LengthOrder(len(TEXTS), SAMPLES, True, 3, padding=padding, sample_lengths=lengths)


@cache
def batches() -> list[Any]:
    with Prefetcher(TEXTS, order(), 0, STEPS) as loaded:
        return [(inputs, targets) for _, inputs, targets in loaded]


@cache
def captured() -> LengthGraphs:
    steps = [order().length(step) for step in range(STEPS)]
    examples = {length: batches()[steps.index(length)] for length in sorted(set(steps))}
    graphs = {
        length: capture(causal(), inputs, target=labels, granularity="operators")
        for length, (inputs, labels) in examples.items()
    }
    return LengthGraphs(graphs, 0, steps)


def samples(graph: Graph) -> Plan:
    return plan_for(graph, [shared(0, len(graph.network.layers), 3, 1)], batch_size=SAMPLES)


def pipeline(graph: Graph) -> Plan:
    last = len(graph.network.layers)
    return plan_for(graph, [shared(0, last // 2, 2), shared(last // 2, last, 2)], batch_size=SAMPLES, micro_batches=2)


def mixed(graph: Graph) -> Plan:
    last = len(graph.network.layers)
    stages = [shared(0, last // 2, 1, 1), shared(last // 2, last, 2)]
    return plan_for(graph, stages, batch_size=SAMPLES, micro_batches=2)


def trained(plan: Callable[[Graph], Plan]) -> Ran:
    lengths = captured()
    graph = lengths.graphs[max(lengths.graphs)]
    ran = run(graph, plan(graph), batches(), SGD, lengths=lengths)
    ran.raise_first()
    return ran


def by_pytorch(loss_of: Callable[[Causal, int], Tensor]) -> tuple[dict[str, Tensor], list[float]]:
    module = causal()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = loss_of(module, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return dict(module.state_dict()), losses


def of_padded_batch(module: Causal, step: int) -> Tensor:
    inputs, labels = batches()[step]
    return module(**inputs, labels=labels)["loss"]


def of_samples_alone(module: Causal, step: int) -> Tensor:
    """Each text by itself, without mask and padding; their losses are means over different numbers of words."""
    texts = [TEXTS.texts[index][None] for index in order().indices(step)]
    counts = [text.shape[1] - 1 for text in texts]
    parts = [count * next_word(module(text)["logits"], text) for text, count in zip(texts, counts)]
    return torch.stack(parts).sum() / sum(counts)


PLANS = [samples, pipeline, mixed]


@pytest.mark.slow
def test_the_steps_have_several_lengths() -> None:
    steps = list(captured().steps)
    assert set(steps) == set(LENGTHS)
    assert [inputs["input_ids"].shape[1] for inputs, _ in batches()] == steps
    assert any(bool((labels == -100).any()) for _, labels in batches())


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.__name__))
def test_as_pytorch_on_the_same_padded_batches(plan: Callable[[Graph], Plan]) -> None:
    trained(plan).assert_equals(*by_pytorch(of_padded_batch), TOLERANCE)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.__name__))
def test_as_pytorch_on_the_unpadded_samples_one_by_one(plan: Callable[[Graph], Plan]) -> None:
    trained(plan).assert_equals(*by_pytorch(of_samples_alone), TOLERANCE)


def test_no_message_of_another_length_is_taken() -> None:
    """What each device received is what the plan of each step's own graph announced."""
    ran, lengths = trained(pipeline), captured()
    assert all(log.refused_frames == 0 for log in ran.logs.values())
    for device, executor in ran.executors.items():
        by_step = executor.expected_by_step()
        assert callable(by_step)
        expected = [by_step(step) for step in range(STEPS)]
        assert len({sum(messages.values()) for messages in expected}) == len(lengths.graphs)
        received = sum(ran.logs[device].received_bytes.values())
        assert received == sum(sum(messages.values()) for messages in expected)
        assert by_step(STEPS) == by_step(-1) == {}
