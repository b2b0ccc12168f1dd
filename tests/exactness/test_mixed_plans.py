"""Plans that mix tiles, samples and single devices train as one device does, and do what the plan says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from drawn_plans import mixed_plans
from harness import SGD, TOLERANCE, Ran, alone
from manyhands.executor.executor import Executor
from manyhands.facts.plan import BySamples, ByTiles, Order, Plan, Stage
from manyhands.graph.weights import Weights
from tiled_cases import DRAWN, PICTURES, Case, case_of, tail_of, unwritten_memory_noticed, zoo_case
from tiled_networks import mixed_networks

QUICK, DEEP = 3, 100
PLANS_OF_EACH = 2
Gradients = list[dict[str, Tensor]]
"""One for each step."""


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory() -> Iterator[None]:
    with unwritten_memory_noticed():
        yield


def of_weights(weights: Weights) -> dict[str, Tensor]:
    return {name: t.grad.clone() for name, t in weights.tensors.items() if t.grad is not None}


def check(case: Case, plan: Plan) -> Ran:
    """Losses, weights, buffers and done as planned; and before every step the gradients, where they are complete."""
    found: dict[str, Gradients] = {}

    def watch(executor: Executor) -> None:
        stepper = executor.stepper
        if stepper is not None:
            step = stepper.step

            def watched() -> None:
                found.setdefault(executor.device, []).append(of_weights(executor.weights))
                step()

            stepper.step = watched  # type: ignore[method-assign]

    ran = case.check(plan, watch=watch)
    expected: Gradients = []
    alone(case.graph, case.batches, SGD, seed=7, micro_batches=plan.micro_batches,
          before_step=lambda weights: expected.append(of_weights(weights)))  # fmt: skip
    for device, steps in found.items():
        complete = {
            name
            for geometry in ran.schedule.lowering.work[device].geometries
            if geometry.stage.reduce != "gateway" or geometry.devices[0] == device
            for name in case.network.weights_of(geometry.first, geometry.last)
        }
        for own, whole in zip(steps, expected, strict=True):
            largest = max(float(gradient.abs().max()) for gradient in whole.values())
            for name in complete & own.keys():
                difference = float((own[name] - whole.get(name, torch.zeros(()))).abs().max())
                assert difference <= TOLERANCE * largest, (device, name, difference, largest)
    return ran


def with_batches(case: Case, plan: Plan) -> Case:
    """As many samples as the plan wants."""
    network = case.network
    shapes = [(plan.batch_size, *network.tensors[name].shape[1:]) for name in (network.inputs[0], network.outputs[0])]
    made = [tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes) for _ in range(2)]
    return Case(case.graph, [(x, y) for x, y in made])


@pytest.mark.slow
@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(DEEP, id="deep", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_any_network_by_any_mixed_plan(examples: int) -> None:
    @settings(DRAWN, max_examples=examples)
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        shape = (2, *data.draw(st.sampled_from(PICTURES)))
        case = case_of(data.draw(mixed_networks(shape)), shape, seed=data.draw(st.integers(0, 99)))
        for _ in range(PLANS_OF_EACH):
            plan = data.draw(mixed_plans(case.network))
            check(with_batches(case, plan), plan)

    drawn()


# By name: one network in every way


MICRO_BATCHES = 3
SAMPLES = 2
"""Of a micro-batch."""


def ways(middle: int, end: int, count: int) -> dict[str, tuple[Order, tuple[Stage, ...]]]:
    """Layers [0, middle), [middle, end), and what follows the last map."""
    grid, halves = ByTiles((2, 1), (1, 1)), BySamples((1, 1))
    rows = ByTiles((1, 2), (1,), None, (middle,))
    tiles, others = ("t0", "t1", "t2", "t3"), ("s0", "s1")
    tail = Stage((end, count), ("one",))
    return {
        "tiles, samples, one": (
            "1f1b", (Stage((0, middle), tiles, grid), Stage((middle, end), others, halves), tail)
        ),
        "tiles, samples, one of the same devices": (
            "gpipe", (Stage((0, middle), tiles, grid), Stage((middle, end), ("t1", "t0"), halves, reduce="gateway"),
                      Stage((end, count), ("t1",)))
        ),
        "samples, tiles, one": (
            "1f1b", (Stage((0, middle), others, halves), Stage((middle, end), ("t0", "t1"), rows), tail)
        ),
        "one, tiles, samples": (
            "sequential", (Stage((0, middle), ("t0",)), Stage((middle, end), ("t0", "t1"), rows),
                           Stage((end, count), ("t1", "t0"), halves))
        ),
        "two grids": ("gpipe", (Stage((0, middle), tiles, grid), Stage((middle, count), ("t3", "t0"), rows))),
    }  # fmt: skip


@pytest.mark.quick("two grids")
@pytest.mark.parametrize("way", ways(1, 2, 3))
def test_a_network_with_skips_norms_and_excitation_in_every_way(way: str) -> None:
    case = zoo_case("mobilenetv3")
    end = tail_of(case)
    # Two maps and a gate, which is whole everywhere, cross; or a map that is read with a halo, and one beside it
    middle = case.network.find_layer("features.4.residual.6" if way.startswith("tiles") else "features.4.residual.3")
    order, stages = ways(middle, end, case.count)[way]
    plan = Plan("drawn", MICRO_BATCHES * SAMPLES, stages, MICRO_BATCHES, order)
    ran = check(with_batches(case, plan), plan)
    crossing = max(len(found) for _, _, found in ran.schedule.lowering.between)
    assert crossing == (3 if way.startswith("tiles") else 2)


class TermsOfASum(nn.Module):
    """What a later stage adds up are two results of an earlier one: both get the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 5, padding=2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        out: Tensor = self.last(self.wide(functional.max_pool2d(made + torch.tanh(made), 2)).mean((2, 3)))
        return out


@pytest.mark.slow
def test_two_gradients_in_one_memory_are_handed_back_to_a_stage_of_the_same_device() -> None:
    """The tile on t0 reads all rows, so what it hands back is whole, and t1's part is added to it: once to each."""
    case = case_of(TermsOfASum(), (2, 4, 6))
    network = case.network
    start = next(n for n, layer in enumerate(network.layers) if network.ops[layer.first].target == "aten.add.Tensor")
    end = network.find_layer("wide") + 1
    stages = (
        Stage((0, start), ("t0",)), Stage((start, end), ("t0", "t1"), ByTiles((1, 1), (1,), (start,))),
        Stage((end, case.count), ("t1",)),
    )  # fmt: skip
    plan = Plan("drawn", 4, stages, 2, "gpipe")
    ran = check(with_batches(case, plan), plan)
    handed = [(tensor, box.shape) for _, _, tensor, box in ran.schedule.lowering.handed_back("t0")]
    assert len(handed) == 2
    assert {shape[2:] for _, shape in handed} == {(4, 6)}
