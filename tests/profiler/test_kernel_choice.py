"""The choice of kernels never loses, whatever the clock says; the cheapest path is the cheapest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.graph import Graph
from manyhands.profiler import kernels
from manyhands.profiler.clock import TimedTrial, stopwatch
from manyhands.profiler.kernels import DEFAULT, LEAST_GAIN, PER_OPERATOR, cheapest_path, choose_kernels
from manyhands.profiler.operators import OperatorSeconds, kernels_for, measure_operators, signature

STEPS = (DEFAULT, PER_OPERATOR, "channels_last", "native")


class Rigged:
    """Made-up seconds: for whole steps by candidate and occasion, for operators by the kernel's text."""

    def __init__(self, steps: dict[str, float], operators: Callable[[str], float] = lambda kernel: 1e-3) -> None:
        self.steps = steps
        self.operators = operators
        self.asked: list[str] = []

    def __call__(self, trial: TimedTrial) -> float:
        self.asked.append(trial.name)
        return self.steps[trial.name] if trial.name in STEPS else self.operators(trial.name)


def _mixed_is_best(name: str) -> float:
    return 1e-3 if "channels_last+native" in name else 2e-3


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_the_choice_never_loses(tiny: Graph, seconds: list[float]) -> None:
    rigged = Rigged(dict(zip(STEPS, seconds)), _mixed_is_best)
    choice = choose_kernels(tiny, 2, seconds=1000.0, timer=rigged)
    default = rigged.steps[DEFAULT]
    assert rigged.steps[choice.name] <= default
    assert bool(choice.kernels) == (choice.name != DEFAULT)
    if default / min(seconds) >= LEAST_GAIN:
        assert rigged.steps[choice.name] == min(seconds)
        assert choice.gain == pytest.approx(default / min(seconds))
    else:
        assert choice.kernels == {}
        assert choice.gain == 1.0


def test_fast_operators_do_not_help_a_slow_step(tiny: Graph) -> None:
    rigged = Rigged({DEFAULT: 1.0, PER_OPERATOR: 1.1, "channels_last": 1.2, "native": 1.3}, _mixed_is_best)
    choice = choose_kernels(tiny, 2, seconds=1000.0, timer=rigged)
    assert choice.kernels == {}
    assert choice.step_seconds[PER_OPERATOR] == 1.1


def test_a_winner_must_win_twice(tiny: Graph) -> None:
    class Fickle(Rigged):
        def __call__(self, trial: TimedTrial) -> float:
            # Once the others have left, the winner is no faster any more.
            confirming = "native" not in self.asked[-3:] and self.asked.count("native") > 1
            super().__call__(trial)
            return 1.0 if confirming and trial.name in STEPS else self.steps.get(trial.name, 1e-3)

    rigged = Fickle({DEFAULT: 1.0, PER_OPERATOR: 1.0, "channels_last": 0.5, "native": 1.0})
    choice = choose_kernels(tiny, 2, seconds=1000.0, timer=rigged)
    assert choice.step_seconds["channels_last"] == 0.5
    assert choice.kernels == {}


def test_a_candidate_that_fails_is_left_out(tiny: Graph) -> None:
    class Failing(Rigged):
        def __call__(self, trial: TimedTrial) -> float:
            if trial.name == "channels_last":
                raise RuntimeError("required rank 4 tensor to use channels_last format")
            return super().__call__(trial)

    rigged = Failing({DEFAULT: 1.0, PER_OPERATOR: 0.9, "native": 0.8}, _mixed_is_best)
    choice = choose_kernels(tiny, 2, seconds=1000.0, timer=rigged)
    assert choice.name == "native"
    assert set(choice.kernels.values()) == {Kernel(onednn=False)}


def test_products_are_tried_where_there_are_convolutions_of_single_pixels(chain: Graph) -> None:
    seconds = {DEFAULT: 1.0, PER_OPERATOR: 0.9, "channels_last": 0.8, "products": 0.7, "native": 1.0}
    choice = choose_kernels(chain, 2, seconds=1000.0, timer=lambda trial: seconds.get(trial.name, 1e-3))
    assert choice.name == "products"
    assert [kernel.product for kernel in choice.kernels.values()] == [False, False, True]


@pytest.mark.slow
def test_packed_weights_are_tried_at_rest_only(chain: Graph) -> None:
    seconds = {DEFAULT: 1.0, PER_OPERATOR: 0.9, "packed": 0.6}

    def timer(trial: TimedTrial) -> float:
        stopwatch(trial)  # it runs, too
        return seconds.get(trial.name, 0.8)

    choice = choose_kernels(chain, 2, seconds=1000.0, timer=timer, training=False)
    assert choice.name == "packed"
    assert {kernel.packed for kernel in choice.kernels.values()} == {True}
    in_training = choose_kernels(chain, 2, seconds=1000.0, timer=timer)
    assert not any(kernel.packed for kernel in in_training.kernels.values())
    assert "packed" not in in_training.step_seconds


def test_packed_is_one_of_an_operators_kernels_at_rest(chain: Graph) -> None:
    def timer(trial: TimedTrial) -> float:
        return 1e-4 if "packed" in trial.name else 1e-3

    measured = measure_operators(chain, 2, seconds=1000.0, training=False, timer=timer)
    path = cheapest_path(chain, 2, measured, training=False)
    assert set(path.values()) == {Kernel(channels_last=True, packed=True)}
    assert not any(one.packed for found in measure_operators(chain, 2, seconds=1000.0, timer=timer).by_kernel.values()
                   for one in found)  # fmt: skip


def test_without_time_nothing_is_measured(tiny: Graph) -> None:
    rigged = Rigged({})
    assert choose_kernels(tiny, 2, seconds=0.0, timer=rigged).kernels == {}
    assert rigged.asked == []


def test_a_small_budget_is_kept_to(tiny: Graph) -> None:
    rigged = Rigged(dict.fromkeys(STEPS, 1.0))
    choose_kernels(tiny, 2, seconds=0.001, timer=rigged)
    assert len([name for name in rigged.asked if name in STEPS]) == 4 * len(set(rigged.asked) & set(STEPS))


@pytest.mark.slow
def test_with_the_real_clock_steps_and_operators_run(tiny: Graph) -> None:
    choice = choose_kernels(tiny, 2, threads=1, seconds=0.5)
    assert choice.step_seconds[DEFAULT] > 0
    assert choice.gain >= 1.0


@pytest.mark.parametrize(("threads", "counts"), [(1, "computing"), (2, "stopwatch")])
def test_one_threads_kernels_are_compared_by_what_it_computes(
    chain: Graph, monkeypatch: pytest.MonkeyPatch, threads: int, counts: str
) -> None:
    """Several threads' are not: what they compute together takes less than its sum."""
    asked: set[str] = set()

    def named(name: str) -> Callable[[TimedTrial], float]:
        def timer(trial: TimedTrial) -> float:
            asked.add(name)
            return 1e-3

        return timer

    for name in ("computing", "stopwatch"):
        monkeypatch.setattr(kernels, name, named(name))
    choose_kernels(chain, 1, threads=threads, seconds=1.0)
    assert asked == {counts}


@pytest.mark.parametrize("threads", [1, 2])
def test_equal_operators_are_measured_once(threads: int) -> None:
    module = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)))
    graph = capture(module, torch.randn(2, 4, 8, 8))
    assert len({signature(graph, node) for node in graph.nodes}) == 2  # the first needs no input gradient
    rigged = Rigged({})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = measure_operators(graph, 2, seconds=10.0, timer=rigged)
    finally:
        torch.set_num_threads(before)
    assert set(found.by_kernel) == {node.name for node in graph.nodes}
    assert len({name.split(":")[0] for name in rigged.asked} - {"convert"}) == 2
    # Small operators are tried on one thread too, where there are several.
    assert any(kernel.threads for kernel in found.by_kernel[graph.nodes[0].name]) == (threads == 2)


@pytest.fixture(scope="module")
def chain() -> Graph:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)
    )
    return capture(module, torch.randn(2, 3, 12, 12))


def _cost(graph: Graph, formats: dict[str, bool], measured: OperatorSeconds) -> float:
    """The price of a format per convolution, worked out step by step."""
    at_hand, total = False, 0.0
    for node in graph.nodes:
        seconds = measured.by_kernel.get(node.name, {})
        if takes_format(graph, node):
            wanted = formats[node.name]
            spec = graph.network.tensors[node.arguments[0].name]
            if wanted != at_hand:
                share = 1.0 if spec.differentiable else 0.5
                total += share * measured.convert_seconds_per_byte * spec.bytes_for(2)
            at_hand = wanted
            total += min(one for kernel, one in seconds.items() if kernel.channels_last == wanted)
        elif seconds:
            total += seconds[Kernel(at_hand)]
    return total


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_path_is_the_cheapest_of_all(chain: Graph, data: st.DataObject) -> None:
    price = st.floats(0.1, 10.0)
    measured = OperatorSeconds(convert_seconds_per_byte=data.draw(st.floats(0, 1e-2)))
    for node in chain.nodes:
        kernels = [kernel for kernel in kernels_for(chain, node) if kernel.onednn]
        if kernels:
            measured.by_kernel[node.name] = {kernel: data.draw(price) for kernel in kernels}
    path = cheapest_path(chain, 2, measured)
    names = [node.name for node in chain.nodes if takes_format(chain, node)]
    found = _cost(chain, {name: path.get(name, Kernel()).channels_last for name in names}, measured)
    every = [dict(zip(names, formats)) for formats in itertools.product((False, True), repeat=len(names))]
    assert found == pytest.approx(min(_cost(chain, formats, measured) for formats in every))
