"""Batches are cut for whoever reads them, and what inference gives is put together again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn_plans import plans
from harness import micro_batches_kept, plan_for, relative, run, schedule_of, shared
from manyhands.data.silo import SiloContent
from manyhands.executor.executor import Executor
from manyhands.executor.feeder import Feeder
from manyhands.executor.messages import COORDINATOR
from manyhands.executor.share_loss import target_names
from manyhands.facts.errors import BadData, BadPlan
from manyhands.facts.plan import Codec, Plan
from manyhands.graph.tape import bind_inputs
from manyhands.graph.trees import tree_leaves
from manyhands.schedule.actions import Action
from manyhands.transport.switchboard import Switchboard
from small_networks import batches_of, captured, module_of


def feeder_of(name: str, *counts: int, micro_batches: int = 1, **options: Any) -> tuple[Feeder, Switchboard]:
    graph = captured(name)
    stage = shared(0, len(graph.network.layers), *counts)
    plan = plan_for(graph, [stage], batch_size=sum(counts) * micro_batches, micro_batches=micro_batches, **options)
    schedule = schedule_of(graph, plan)
    board = Switchboard([*plan.devices, COORDINATOR], limit_seconds=1)
    feeder = Feeder(graph, schedule, board.endpoints[COORDINATOR], with_targets=plan.is_training)
    board.endpoints[COORDINATOR].mailbox.open(0, {})
    for device in plan.devices:
        size = sum(part.bytes for part in feeder.parts[device])
        board.endpoints[device].mailbox.open(0, {(COORDINATOR, f"feed m{m}"): size for m in range(micro_batches)})
    return feeder, board


def test_each_device_is_fed_its_rows_of_each_micro_batch() -> None:
    feeder, board = feeder_of("small", 2, 1, micro_batches=2)
    (x, y) = batches_of("small", 1, 6)[0]
    feeder.send(0, x, y)
    rows = {("s0-0", 0): slice(0, 2), ("s0-1", 0): slice(2, 3), ("s0-0", 1): slice(3, 5), ("s0-1", 1): slice(5, 6)}
    for (device, micro_batch), own in rows.items():
        inputs, targets, totals = torch.empty_like(x[own]), torch.empty_like(y[own]), torch.empty(1).double()
        board.endpoints[device].mailbox.receive(COORDINATOR, 0, f"feed m{micro_batch}", [inputs, targets, totals])
        assert torch.equal(inputs, x[own])
        assert torch.equal(targets, y[own])
        assert float(totals) == 6  # targets of the whole batch that are not ignored


def test_numbers_are_fed_in_the_type_of_the_capture() -> None:
    feeder, board = feeder_of("small", 1, 1)
    (x, y) = batches_of("small", 1, 2, dtype=torch.float32)[0]
    feeder.send(0, x, y.to(torch.int32))
    inputs, targets = torch.empty(1, 1, 8, 8, dtype=torch.float64), torch.empty(1, dtype=torch.int64)
    totals = torch.empty(1, dtype=torch.float64)
    board.endpoints["s0-1"].mailbox.receive(COORDINATOR, 0, "feed m0", [inputs, targets, totals])
    assert torch.equal(inputs, x[1:].double())
    assert torch.equal(targets, y[1:])


def test_memory_that_is_not_in_order_is_fed_all_the_same() -> None:
    feeder, board = feeder_of("small", 1, 1)
    (x, y) = batches_of("small", 1, 2)[0]
    feeder.send(0, x.transpose(2, 3), y)
    inputs, targets = torch.empty(1, 1, 8, 8, dtype=torch.float64), torch.empty(1, dtype=torch.int64)
    totals = torch.empty(1, dtype=torch.float64)
    board.endpoints["s0-0"].mailbox.receive(COORDINATOR, 0, "feed m0", [inputs, targets, totals])
    assert torch.equal(inputs, x.transpose(2, 3)[:1])


@pytest.mark.parametrize(
    ("name", "inputs", "targets", "words"),
    [
        ("small", torch.zeros(2, 1, 8, 8), torch.zeros(3), "'x' has shape"),
        ("small", torch.zeros(3, 1, 8, 7), torch.zeros(3), "'x' has shape"),
        ("small", torch.zeros(3, 1, 8, 8), torch.zeros(2), "has shape"),
        ("small", torch.zeros(3, 1, 8, 8), None, "NoneType"),
        ("named", {"wide": torch.zeros(3, 6)}, torch.zeros(3), "narrow"),
        ("pair", (torch.zeros(3, 6),), {"classes": torch.zeros(3), "values": torch.zeros(3, 4)}, "inputs"),
        ("pair", (torch.zeros(3, 6), torch.zeros(3, 3)), {"classes": torch.zeros(3)}, "values"),
        ("pair", (torch.zeros(3, 6), torch.zeros(3, 3)), [torch.zeros(3)], "targets are a list"),
    ],
    ids=["samples", "width", "targets", "none", "a key", "too few", "a target's key", "no dict"],
)
def test_a_batch_that_does_not_fit_is_refused(name: str, inputs: Any, targets: Any, words: str) -> None:
    feeder, _ = feeder_of(name, 2, 1)
    with pytest.raises(BadData, match=words):
        feeder.send(0, inputs, targets)


def test_totals_of_targets_that_are_in_a_silo_cannot_be_made() -> None:
    graph = captured("small")
    plan = plan_for(graph, [shared(0, len(graph.network.layers), 2, 1)], batch_size=3)
    schedule = schedule_of(graph, plan)
    board = Switchboard([*plan.devices, COORDINATOR], limit_seconds=1)
    local = {"s0-1": SiloContent(frozenset(target_names(graph)), torch.arange(9))}
    with pytest.raises(BadPlan, match=r"weighted by the targets of a whole batch.*in a silo") as error:
        Feeder(graph, schedule, board.endpoints[COORDINATOR], local=local)
    assert "single device for the last stage" in error.value.hint


# Inference


def evaluated(name: str, batches: Sequence[tuple[Any, Any]]) -> list[list[torch.Tensor]]:
    """The outputs of the module itself at rest, in the order of its output tree."""
    module = copy.deepcopy(module_of(name)).eval()
    found = []
    with torch.no_grad():
        for inputs, _ in batches:
            if isinstance(inputs, dict):
                made = module(**inputs)
            else:
                made = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
            leaves = [made] if isinstance(made, torch.Tensor) else made.values() if isinstance(made, dict) else made
            found.append(list(leaves))
    return found


def assert_streams(name: str, plan: Plan, count: int = 4) -> None:
    graph, batches = captured(name), batches_of(name, count, plan.batch_size)
    ran = run(graph, plan, batches)
    ran.assert_as_planned(count)
    names = list(tree_leaves(graph.output_tree))
    for outputs, expected in zip(ran.outputs, evaluated(name, batches), strict=True):
        for output, tensor in zip(names, expected, strict=True):
            assert relative(outputs[output], tensor) <= 1e-10, output
    for own in ran.weights.values():  # nothing was trained
        assert all(torch.equal(tensor, graph.state[weight]) for weight, tensor in own.items())
    for executor in ran.executors.values():
        assert not micro_batches_kept(executor)


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("name", ["small", "pair", "named", "early", "words", "gives-input", "evaluating", "skips"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_shares_give_what_the_module_gives(name: str, micro_batches: int) -> None:
    graph = captured(name)
    stage = shared(0, len(graph.network.layers), 3, 1, 2)
    plan = plan_for(graph, [stage], batch_size=6 * micro_batches, micro_batches=micro_batches, order="stream")
    assert_streams(name, plan)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", ["small", "pair", "early", "words", "gives-input", "skips"])
def test_pipelines_give_what_the_module_gives(name: str) -> None:
    graph = captured(name)
    last = len(graph.network.layers)
    ends = [0, 1, last - 1, last]
    shares = ([2, 1], [3], [1, 2])
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    assert_streams(name, plan_for(graph, stages, batch_size=12, micro_batches=4, order="stream"))


def test_samples_of_a_round_are_fed_and_answered_one_by_one() -> None:
    """With order interleave: whichever comes first, under the number of its place in the round."""
    feeder, board = feeder_of("named", 1, micro_batches=3, order="interleave")
    device, coordinator = board.endpoints["s0-0"], board.endpoints[COORDINATOR]
    coordinator.mailbox.open(0, feeder.expected_results())
    assert set(feeder.returning) == {"s0-0"}
    batches = [inputs for inputs, _ in batches_of("named", 3, 1)]
    for place in (0, 1, 2):
        feeder.send_values(0, bind_inputs(captured("named"), batches[place]), place)
    for place in (2, 0, 1):
        wide, narrow = torch.empty(1, 6, dtype=torch.float64), torch.empty(1, 3, dtype=torch.float64)
        device.mailbox.receive(COORDINATOR, 0, f"feed m{place}", [wide, narrow])
        assert torch.equal(wide, batches[place]["wide"])
        assert torch.equal(narrow, batches[place]["narrow"])
        device.send(COORDINATOR, 0, f"result m{place}", [torch.full((1, 5), float(place), dtype=torch.float64)])
    for place in (1, 2, 0):
        (found,) = feeder.gather(0, place).values()
        assert torch.equal(found, torch.full((1, 5), float(place), dtype=torch.float64))


def test_values_of_the_wrong_shape_are_refused() -> None:
    feeder, _ = feeder_of("small", 1, order="stream")
    with pytest.raises(BadData, match=r"has shape \(2, 1, 8, 8\)"):
        feeder.send_values(0, {"x": torch.zeros(2, 1, 8, 8)})


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_plan_gives_what_the_module_gives(data: st.DataObject) -> None:
    plan = data.draw(plans(captured("pair").network, kinds=("single", "samples"), orders=("stream",)))
    stages = tuple(msgspec.structs.replace(stage, codec=Codec()) for stage in plan.stages)
    assert_streams("pair", msgspec.structs.replace(plan, stages=stages), 2)


@pytest.mark.slow
def test_a_norm_without_running_statistics_on_a_device_of_its_own() -> None:
    graph = captured("norms")
    middle, last = graph.network.find_layer("still"), len(graph.network.layers)
    stages = [shared(0, middle, 2, 1), shared(middle, middle + 1, 3), shared(middle + 1, last, 1, 2)]
    assert_streams("norms", plan_for(graph, stages, batch_size=3, order="stream"))


def test_a_device_lets_go_of_what_it_has_passed_on() -> None:
    """A stream has no backward pass: a device holds the micro-batch it works on, and no older one."""
    graph = captured("skips")
    last = len(graph.network.layers)
    stages = [shared(0, 4, 1), shared(4, last, 1)]
    plan = plan_for(graph, stages, batch_size=6, micro_batches=6, order="stream")
    most: dict[str, int] = {}

    def watch(executor: Executor) -> None:
        act = executor._act

        def watched(action: Action) -> None:
            act(action)
            most[executor.device] = max(most.get(executor.device, 0), micro_batches_kept(executor))

        executor._act = watched  # type: ignore[method-assign]

    ran = run(graph, plan, batches_of("skips", 1, 6), watch=watch)
    ran.assert_as_planned(1)
    assert most == {"s0-0": 1, "s4-0": 1}  # it is let go before the next one's messages are taken
