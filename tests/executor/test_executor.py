"""One device of a run: it ends when a peer dies or the run is interrupted, and keeps no more than its order says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from small_plans import staged, tiled

from harness import ADAM, SGD, Ran, micro_batches_kept, plan_for, run, shared
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import ManyhandsError, TimedOut, WorkerLost
from manyhands.facts.plan import ByTiles, Plan
from manyhands.graph.graph import Graph
from manyhands.transport.switchboard import Switchboard
from small_networks import batches_of, captured

PROMPT_SECONDS = 15.0  # waits have a limit of 20


# Faults


def messages_of(ran: Ran, device: str, steps: int) -> int:
    """How many messages a device sends in a run without a fault."""
    count: int = ran.board.endpoints[device]._messages
    assert count >= steps
    return count


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


@pytest.mark.quick("pipeline")
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


@pytest.mark.quick(every=12)
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


# Between rounds, and in one


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("kind", ["pipeline", "tiles"])
def test_nothing_is_held_between_rounds(kind: str) -> None:
    graph = captured("small")
    plan = PLANS[kind][1](graph)
    ran = run(graph, plan, batches_of("small", 2, plan.batch_size), SGD)
    ran.assert_as_planned(2)
    for executor in ran.executors.values():
        assert not micro_batches_kept(executor)
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
            most[executor.device] = max(most.get(executor.device, 0), micro_batches_kept(executor))

        executor._act = watched

    run(graph, plan, batches_of("skips", 2, 8), SGD, watch=watch).assert_as_planned(2)
    for stage, device in enumerate(plan.devices):
        assert most[device] == plan.warm_up_of(stage)
