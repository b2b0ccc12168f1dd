"""One device of a run when things go wrong: a peer dies, somebody interrupts, a loss is no number."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from harness import ADAM, SGD, Ran, held, plan_for, run, shared
from small_networks import batches_of, captured, module_of
from torch import nn
from torch.nn import functional

from manyhands.engine.switchboard import Switchboard
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import ManyhandsError, NotFinite, TimedOut, WorkerLost
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.schedule.actions import parse_action

PROMPT_SECONDS = 15.0  # waits have a limit of 20


def staged(graph: Graph, cuts: Sequence[int], shares: Sequence[Sequence[int]], **options: Any) -> Plan:
    ends = [0, *cuts, len(graph.network.layers)]
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    micro_batches = options.get("micro_batches", 1)
    return plan_for(graph, stages, batch_size=sum(shares[0]) * micro_batches, **options)


# Faults


def messages_of(ran: Ran, device: str, steps: int) -> int:
    """How many messages a device sends in a run without a fault."""
    count: int = ran.board.endpoints[device]._messages
    assert count >= steps
    return count


def tiled(graph: Graph, share: ByTiles, tail: str, **options: Any) -> Plan:
    """Maps on tiles t0, t1, ..., and from the last pooling on one device."""
    end, last = graph.network.find_layer("avg_pool2d"), len(graph.network.layers)
    devices = tuple(f"t{number}" for number in range(len(share.rows) * len(share.columns)))
    stages = [Stage((0, end), devices, share), Stage((end, last), (tail,))]
    return plan_for(graph, stages, batch_size=4, order="sequential", **options)


PLANS: dict[str, tuple[str, Callable[[Graph], Plan]]] = {
    "shares": ("small", lambda graph: staged(graph, [], [[3, 2, 1]], bucket_bytes=300)),
    "pipeline": ("small", lambda graph: staged(graph, [3, 6], [[2, 1], [1, 2], [3]], micro_batches=3)),
    "eager": ("skips", lambda graph: staged(graph, [4, 8], [[2, 1], [3], [1, 2]], micro_batches=3, order="eager")),
    "gateway": (
        "small",
        lambda graph: plan_for(graph, [shared(0, len(graph.network.layers), 2, 1, reduce="gateway")], batch_size=3),
    ),
    "tiles": ("small", lambda graph: tiled(graph, ByTiles((1, 1), (1, 1), None, (0, 3)), "t0", micro_batches=2)),
    "home": (
        "small",
        lambda graph: msgspec.structs.replace(
            staged(graph, [3], [[2, 1], [3]], micro_batches=3), homes={graph.network.inputs[0]: "phone"}
        ),
    ),
}


@pytest.mark.parametrize("kind", PLANS)
def test_nobody_hangs_when_a_device_dies(kind: str) -> None:
    """Whichever device it is and wherever in the run: at its first message, its last, and in between."""
    name, make = PLANS[kind]
    graph = captured(name)
    plan, steps = make(graph), 3
    batches = batches_of(name, steps, plan.batch_size)
    whole = run(graph, plan, batches, ADAM)
    whole.assert_as_planned(steps)
    for device in plan.devices:
        count = messages_of(whole, device, steps)
        for message in sorted({1, 2, count // 3 + 1, count // 2 + 1, count - 1, count} & set(range(1, count + 1))):
            ran = run(graph, plan, batches, ADAM, fail=(device, message))
            assert ran.board.failed == {device}, (device, message)
            assert device in ran.errors
            assert all(isinstance(error, WorkerLost) for error in ran.errors.values()), ran.errors
            assert ran.seconds < PROMPT_SECONDS
            if message <= count // 2:  # everybody who computes has yet to hear from it in a later step
                assert set(ran.errors) >= set(plan.devices) - {"phone"}, (device, message)


@pytest.mark.parametrize("message", [1, 3, 6])
def test_everybody_stops_when_the_coordinator_dies(message: int) -> None:
    graph = captured("small")
    plan = staged(graph, [3], [[2, 1], [3]], micro_batches=2)
    ran = run(graph, plan, batches_of("small", 4, 6), fail=(COORDINATOR, message))
    assert ran.board.failed == {COORDINATOR}
    assert set(ran.errors) == set(plan.devices)
    assert all(isinstance(error, WorkerLost) for error in ran.errors.values())
    assert ran.seconds < PROMPT_SECONDS


class Interrupted(ManyhandsError):
    """Somebody wants everybody to stop."""


def interrupting(device: str, number: int) -> Callable[[Switchboard], None]:
    """Interrupt everybody when a device sends its message of that number, which is still delivered."""

    def prepare(board: Switchboard) -> None:
        endpoint = board.endpoints[device]
        send, sent, lock = endpoint.send, [0], threading.Lock()

        def sending(*words: Any, **options: Any) -> None:
            with lock:
                sent[0] += 1
                is_now = sent[0] == number
            send(*words, **options)
            if is_now:
                for other in board.endpoints.values():
                    other.mailbox.interrupt(Interrupted("stop"))

        endpoint.send = sending  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("kind", ["shares", "pipeline", "eager", "tiles"])
@pytest.mark.parametrize("number", [1, 4, 7])
def test_an_interrupt_in_the_middle_of_a_round_ends_every_wait(kind: str, number: int) -> None:
    name, make = PLANS[kind]
    graph = captured(name)
    plan = make(graph)
    ran = run(graph, plan, batches_of(name, 3, plan.batch_size), prepare=interrupting(plan.devices[0], number))
    assert set(ran.errors) == set(plan.devices)
    assert any(isinstance(error, Interrupted) for error in ran.errors.values())
    assert all(isinstance(error, (Interrupted, WorkerLost)) for error in ran.errors.values())
    assert ran.seconds < PROMPT_SECONDS


def test_a_silent_peer_is_waited_for_no_longer_than_the_limit() -> None:
    """It is connected and sends nothing."""

    def mute(board: Switchboard) -> None:
        board.endpoints["s0-1"].send = lambda *_, **__: None  # type: ignore[method-assign]
        board.endpoints["s0-1"].mailbox.limit_seconds = 60.0  # it waits too, and is not to be the first who gives up

    graph = captured("small")
    plan = staged(graph, [], [[2, 1]])
    ran = run(graph, plan, batches_of("small", 1, 3), prepare=mute, limit_seconds=2.0)
    assert ran.seconds < PROMPT_SECONDS
    assert isinstance(ran.errors["s0-0"], TimedOut)
    assert "s0-1" in str(ran.errors["s0-0"])


# A loss that is no number


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


# The log


def test_a_log_is_evidence() -> None:
    graph = captured("small")
    plan = staged(graph, [3], [[2, 1], [1, 2]], micro_batches=2)
    ran = run(graph, plan, batches_of("small", 4, 6), SGD, trace_steps=range(1, 3))
    ran.assert_as_planned(4)
    for device, log in ran.logs.items():
        assert {span.step for span in log.spans} == {1, 2}
        assert all(span.start <= span.end and span.device == device for span in log.spans)
        texts = [span.text for span in log.spans if span.step == 1]
        assert sorted(texts) == sorted(log.actions)
        assert all(str(parse_action(text)) == text for text in log.actions)
        assert 0 < log.busy_seconds < 60
        assert "spans" not in log.to_dict()
        assert (
            log.to_dict()["samples"] == log.samples == 4 * plan.micro_batches * (2 if device in ("s0-0", "s3-1") else 1)
        )


def test_a_log_of_tiles_counts_what_was_computed_and_what_was_sent() -> None:
    """Elements of maps with their overlap, and bytes by what they carry."""
    graph = captured("small")
    batches = batches_of("small", 2, 4)
    apart, at_once = (
        run(graph, tiled(graph, ByTiles((1, 1), (1,), groups), "t0"), batches, SGD) for groups in (None, (0,))
    )
    apart.assert_as_planned(2)
    at_once.assert_as_planned(2)
    maps = sum(spec.elements for spec in graph.network.tensors.values() if spec.shape[2:] == (8, 8))
    inputs = graph.network.tensors[graph.network.inputs[0]].elements
    assert sum(log.elements for log in apart.logs.values()) == 2 * 4 * (maps - inputs)
    assert sum(log.elements for log in at_once.logs.values()) > 2 * 4 * (maps - inputs)
    assert set(apart.logs["t1"].sent_kinds) == {"halo", "halo-gradient", "value"}
    assert set(at_once.logs["t1"].sent_kinds) == {"value"}
    assert at_once.logs["t0"].sent_kinds == {"gradient": apart.logs["t0"].sent_kinds["gradient"]}


def test_a_log_of_another_round_would_be_told_apart() -> None:
    """`assert_as_planned` can fail: a run that did one action less is not as planned."""
    graph = captured("small")
    ran = run(graph, staged(graph, [], [[2, 1]]), batches_of("small", 2, 3), SGD)
    ran.assert_as_planned(2)
    ran.logs["s0-0"].actions.pop()
    with pytest.raises(AssertionError):
        ran.assert_as_planned(2)


@pytest.mark.parametrize("kind", ["pipeline", "tiles"])
def test_nothing_is_held_between_rounds(kind: str) -> None:
    graph = captured("small")
    plan = PLANS[kind][1](graph)
    ran = run(graph, plan, batches_of("small", 2, plan.batch_size), SGD)
    ran.assert_as_planned(2)
    for executor in ran.executors.values():
        assert not held(executor)
        assert all(tensor.grad is None for tensor in executor.weights.tensors.values())


def test_a_pipeline_holds_no_more_micro_batches_than_its_order_says() -> None:
    """1F1B: K_p in flight, the one among them whose backward pass has just ended until the next pass begins."""
    graph = captured("skips")
    plan = staged(graph, [4, 8], [[1], [1], [1]], micro_batches=8, warm_up="P-p")
    most: dict[str, int] = {}

    def watch(executor: Any) -> None:
        act = executor._act

        def watched(action: Any) -> None:
            act(action)
            most[executor.device] = max(most.get(executor.device, 0), held(executor))

        executor._act = watched

    run(graph, plan, batches_of("skips", 2, 8), SGD, watch=watch).assert_as_planned(2)
    for stage, device in enumerate(plan.devices):
        assert most[device] == plan.warm_up_of(stage)
