"""What would come out other than on one device is refused before it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.schedule.actions import LONGEST_TOPIC, Message, Part


class Counting(nn.Module):
    """A buffer written early and read late."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("t", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.t.add_(1)
        out: torch.Tensor = self.b(torch.relu(self.a(x))) * (1 + self.t / 10)
        return out


def test_a_buffer_written_in_one_stage_and_read_in_another() -> None:
    graph = capture(Counting(), torch.randn(4, 4), granularity="operators")
    count = len(graph.layers)
    plan = Plan(graph.name, 4, (Stage((0, 2), ("a",)), Stage((2, count), ("b",))))
    with pytest.raises(BadPlan, match="both use the buffer 't'"):
        resolve(plan, graph.network)


@pytest.mark.slow
def test_instance_norm_that_keeps_statistics_is_not_shared_by_samples() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, track_running_stats=True))
    graph = capture(module, torch.randn(4, 1, 8, 8))
    plan = Plan(graph.name, 4, (Stage((0, len(graph.layers)), ("a", "b"), BySamples((3, 1))),))
    with pytest.raises(BadPlan, match="mixes samples"):
        resolve(plan, graph.network)


@pytest.mark.parametrize(("micro_batches", "batch_norm", "samples"), [(4, "synchronised", (1,)), (1, "local", (3, 1))])
def test_batch_statistics_of_one_value(micro_batches: int, batch_norm: str, samples: tuple[int, ...]) -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(4, 4))
    devices = ("a", "b")[: len(samples)]
    stage = Stage((0, len(graph.layers)), devices, BySamples(samples))
    plan = Plan(graph.name, 4, (stage,), micro_batches, batch_norm=batch_norm)  # type: ignore[arg-type]
    with pytest.raises(BadPlan, match="one value per channel"):
        resolve(plan, graph.network)


def test_a_long_message_has_a_short_name() -> None:
    from manyhands.facts.boxes import Box

    parts = tuple(Part(f"weight_{number}", Box.whole((32, 32))) for number in range(200))
    one, other = Message("weights", 0, 0, parts, 100), Message("weights", 0, 0, parts[:-1], 100)
    assert len(one.topic) <= LONGEST_TOPIC
    assert one.topic != other.topic
    assert Message("value", 0, 1, parts[:1], 8).topic == str(Message("value", 0, 1, parts[:1], 8))
