"""A loss that is not finite is reported with its step and the layer where it began."""

from __future__ import annotations

import copy

import pytest
import torch
from small_plans import staged, tiled
from torch import nn
from torch.nn import functional

from harness import SGD, Ran, run
from manyhands.facts.errors import NotFinite, WorkerLost
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import ByTiles
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from small_networks import batches_of, captured, module_of

PROMPT_SECONDS = 15.0  # waits have a limit of 20


def error_of(ran: Ran, device: str) -> str:
    assert isinstance(ran.errors[device], NotFinite), ran.errors
    assert ran.seconds < PROMPT_SECONDS
    return str(ran.errors[device])


def only(ran: Ran) -> str:
    """The message of the devices that saw it; everybody else was stopped."""
    found = [device for device, error in ran.errors.items() if isinstance(error, NotFinite)]
    assert found
    assert all(isinstance(e, (NotFinite, WorkerLost)) for e in ran.errors.values())
    return error_of(ran, found[0])


@pytest.mark.slow
def test_a_learning_rate_that_blows_up_is_told_with_step_and_layer() -> None:
    """After one step with weights of a million, the logarithm's argument is below zero."""
    graph = captured("logs")
    ran = run(graph, staged(graph, [], [[3, 2]]), batches_of("logs", 5, 5), Optimizer("SGD", lr=1e6))
    text = only(ran)
    assert "at step 1" in text
    assert "layer log " in text
    assert "Lower the learning rate" in text


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_bad_number_in_the_data_is_told(number: float) -> None:
    graph, batches = captured("small"), batches_of("small", 4, 6)
    batches[2][0][4, 0, 3, 3] = number
    text = only(run(graph, staged(graph, [], [[3, 2, 1]]), batches, SGD))
    assert "at step 2" in text
    # Device 1 has the sample; by the exchanged statistics the others see it come out of the first batch norm.
    assert ("the input 'x'" if "on s0-1" in text else "layer b ") in text


def test_the_device_with_the_bad_sample_blames_the_input() -> None:
    graph, batches = captured("skips"), batches_of("skips", 4, 6)
    batches[2][0][4, 0, 3, 3] = float("nan")
    ran = run(graph, staged(graph, [], [[3, 3]]), batches, SGD)
    text = error_of(ran, "s0-1")
    assert "at step 2, on s0-1" in text
    assert "the input 'x'" in text
    assert isinstance(ran.errors["s0-0"], WorkerLost)


def test_a_bad_number_in_the_data_of_one_tile_is_told() -> None:
    """Tile 3 has the pixel; whoever computes the loss tells as far back as it can see."""
    graph, batches = captured("small"), batches_of("small", 4, 4)
    batches[2][0][3, 0, 7, 7] = float("nan")
    ran = run(graph, tiled(graph, ByTiles((1, 1), (1, 1)), "t0"), batches, SGD)
    assert "at step 2, on t0" in only(ran)
    assert {ran.executors[f"t{number}"].diagnose(1) for number in range(4)} == {""}  # another step


def test_a_weight_that_is_no_number_is_told_by_tiles() -> None:
    graph = with_weight("small", "c.weight", float("nan"))
    ran = run(graph, tiled(graph, ByTiles((1, 1), (1, 1)), "t0"), batches_of("small", 2, 4), SGD)
    text = only(ran)
    assert "at step 0, on t0" in text
    assert "layer c " in text


def with_weight(name: str, weight: str, number: float) -> Graph:
    """A network with one number of one weight set."""
    module = copy.deepcopy(module_of(name))
    with torch.no_grad():
        dict(module.named_parameters())[weight].view(-1)[0] = number
    inputs, targets = batches_of(name, 1, 4)[0]
    return capture(module, inputs, loss=functional.cross_entropy, target=targets, granularity="operators", name=name)


@pytest.mark.parametrize(("weight", "number"), [("c.weight", float("nan")), ("f.bias", float("inf"))])
def test_a_weight_that_is_no_number_is_told(weight: str, number: float) -> None:
    graph = with_weight("skips", weight, number)
    text = only(run(graph, staged(graph, [], [[3, 3]]), batches_of("skips", 2, 6), SGD))
    assert "at step 0" in text
    assert f"layer {weight[0]} " in text


def test_a_later_stage_names_what_came_in_and_the_earlier_one_knows_where_it_began() -> None:
    graph = captured("logs")
    layer = graph.network.find_layer("tanh_1")
    ran = run(graph, staged(graph, [layer], [[3, 2], [5]]), batches_of("logs", 5, 5), Optimizer("SGD", lr=1e6))
    text = error_of(ran, f"s{layer}-0")
    assert "at step 1" in text
    assert "layer c " in text  # what the last stage was given
    for device in ("s0-0", "s0-1"):
        assert isinstance(ran.errors[device], WorkerLost)
        assert ran.executors[device].diagnose(0) == ""  # another step
    assert "log" in {ran.executors[device].diagnose(1) for device in ("s0-0", "s0-1")}


def test_a_device_whose_numbers_are_numbers_has_nothing_to_tell() -> None:
    graph = captured("logs")
    ran = run(graph, staged(graph, [4], [[3, 2], [5]]), batches_of("logs", 2, 5), SGD)
    ran.assert_as_planned(2)
    assert all(executor.diagnose(1) == "" for executor in ran.executors.values())


class Far(nn.Module):
    """Its output is finite, and its square is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x)
        return out


def test_a_loss_that_overflows_by_itself_is_told() -> None:
    x = torch.full((4, 2), 1e200, dtype=torch.float64)
    y = torch.zeros(4, 2, dtype=torch.float64)
    graph = capture(Far().double(), x, loss=functional.mse_loss, target=y, granularity="operators", name="far")
    assert "the loss itself" in only(run(graph, staged(graph, [], [[4]]), [(x, y)], SGD))
