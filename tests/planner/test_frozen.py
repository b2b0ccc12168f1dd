"""Planning a fine-tuning: frozen layers cost a forward pass, no optimizer state, and nothing on the way back."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import manyhands as mh
from hand_made import cluster
from manyhands.facts.link import Link
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import estimate_cluster
from manyhands.graph.capture import capture
from manyhands.planner.cost import CostModel
from manyhands.schedule.actions import Backward, Forward
from manyhands.schedule.policy import Schedule

LAYERS, WIDTH = 12, 256
LINK = Link(1e7, 0.0)  # adding up all gradients over it takes longer than a pipeline does


class Tower(nn.Module):
    """Equal linear layers, of which the first are frozen."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for layer in list(self.layers)[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def tower(frozen: int) -> mh.Network:
    x = torch.zeros(4, WIDTH)
    return capture(Tower(frozen), x, loss=functional.mse_loss, target=x, granularity="operators").network


def planned(frozen: int, **facts: float) -> mh.Plan:
    devices = cluster(("a", "b"), LINK, **facts)  # type: ignore[arg-type]
    return mh.plan(tower(frozen), devices, batch_size=64, strategy="pipeline", micro_batches=8).plan


@pytest.mark.slow
def test_the_cut_moves_to_where_the_work_is() -> None:
    """A trained layer takes three passes, a frozen one below all that trains takes one."""
    cuts = {}
    for frozen in (0, 6, 9):
        plan = planned(frozen)
        assert len(plan.stages) == 2
        cuts[frozen] = plan.stages[0].layers[1]
        sides = [sum(1 if layer < frozen else 3 for layer in range(*stage.layers)) for stage in plan.stages]
        assert max(sides) <= (frozen + 3 * (LAYERS - frozen)) / 2 + 2, (frozen, sides)
    assert cuts[0] == 6
    assert cuts[0] < cuts[6] < cuts[9]


def test_the_cut_moves_to_where_the_memory_is() -> None:
    """Room for the weights of all frozen layers and two trained ones, with gradients and momentum; not for half of the
    network, if all is trained."""
    layer = 4 * (WIDTH + 1) * WIDTH
    memory = (9 + 3 * 3) * layer
    plan = planned(9, memory_bytes=memory)
    for stage in plan.stages:
        held = sum(layer * (1 if number < 9 else 3) for number in range(*stage.layers))
        assert held <= memory
    whole = mh.simulate(plan, tower(9), cluster(("a", "b"), LINK, memory_bytes=memory))
    assert all(device.peak_bytes <= memory for device in whole.devices.values())
    with pytest.raises(mh.ManyhandsError, match=r"memory|fit"):
        planned(0, memory_bytes=memory * 0.9)


def test_a_backward_pass_that_ends_within_a_layer_takes_its_part() -> None:
    """Backward seconds of a layer belong to its operators that have gradients."""
    network = capture(
        Tower(9), torch.zeros(4, WIDTH), loss=functional.mse_loss, target=torch.zeros(4, WIDTH), granularity="blocks"
    ).network
    devices = cluster(("a",))
    profile = estimate_cluster(network, devices)
    costs = CostModel(network, devices, profile)
    plan = resolve(mh.plan(network, devices, batch_size=8, strategy="single").plan, network, devices)
    schedule = Schedule(plan, network)
    (geometry,) = schedule.lowering.geometries
    assert geometry.backward_first == 9
    actions = list(schedule.every_action("a"))
    back = sum(costs.compute_seconds(geometry, "a", a) for a in actions if isinstance(a, Backward))
    ahead = sum(costs.compute_seconds(geometry, "a", a) for a in actions if isinstance(a, Forward))
    measured = [profile.of("a").layer_seconds(number, 8) for number in range(len(network.layers))]
    assert back == pytest.approx(sum(seconds for _, seconds in measured))
    assert ahead == pytest.approx(sum(seconds for seconds, _ in measured))
