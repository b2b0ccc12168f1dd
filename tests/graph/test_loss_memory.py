"""The memory of a loss is known before it is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import SGD, plan_for, run, schedule_of, shared
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.loss_memory import COPIES, loss_bytes
from manyhands.schedule.memory import DeviceMemory

CLASSES, WIDTH = 3000, 16
SCORES = 8 * CLASSES
"""The bytes of a sample's scores, in float64."""


class Classifier(nn.Module):
    """A trained layer, and a frozen one with an output for each of many classes, as of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.frozen(torch.tanh(self.trained(x)))
        return scores


def classifier(samples: int = 4) -> Graph:
    torch.manual_seed(0)
    x, classes = torch.randn(samples, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (samples,))
    return capture(Classifier().double(), x, loss=functional.cross_entropy, target=classes, granularity="operators")


def test_cross_entropy_holds_four_times_the_scores() -> None:
    """The scores, their log-softmax, its gradient, and theirs; beside them the class of each sample."""
    assert 4 * SCORES <= loss_bytes(classifier()) <= 4 * SCORES + 64


def test_nothing_is_held_without_a_loss() -> None:
    assert loss_bytes(capture(Classifier().double(), torch.randn(4, WIDTH, dtype=torch.float64))) == 0


def test_a_loss_that_cannot_be_followed_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = classifier()

    def fails(*_: object) -> list[int]:
        raise RuntimeError("what it makes depends on numbers")

    monkeypatch.setattr("manyhands.graph.loss_memory._peaks", fails)
    assert loss_bytes(graph) == COPIES * (SCORES + 8)


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_the_last_stage_holds_what_the_model_says(order: str) -> None:
    """Two stages, four micro-batches of 8 samples: the counted peak of the stage with the loss is the model's."""
    graph = classifier()
    layers = len(graph.network.layers)
    plan = plan_for(
        graph, [shared(0, 1, 8), shared(1, layers, 8)], batch_size=32, micro_batches=4, order=order,
    )  # fmt: skip
    schedule = schedule_of(graph, plan)
    batches = [(torch.randn(32, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (32,))) for _ in "ab"]
    ran = run(graph, plan, batches, SGD, memory_step=1)
    ran.raise_first()
    device = schedule.plan.devices[-1]
    memory = DeviceMemory(schedule.plan, graph.network, schedule.lowering.work[device].geometries, device)
    for action in schedule.every_action(device):
        memory.act(action)
    measured = ran.logs[device].peak_bytes
    assert measured > memory.static_bytes + 3.9 * 8 * SCORES
    assert 0.97 * memory.peak_bytes <= measured <= 1.03 * memory.peak_bytes
    assert memory.held_bytes == 0
