"""Policies: a fixed one answers from its list, an eager one looks at what has arrived."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from drawn_plans import plans
from hand_made import MAP_BYTES, chain, cluster, even_profile
from manyhands.facts.link import Link
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Action, Backward, Forward, Loss, Receive, Send
from manyhands.schedule.checker import check
from manyhands.schedule.orders import Pass
from manyhands.schedule.policies import DONE, WAIT, DeviceState, FixedOrder
from manyhands.schedule.policy import Schedule
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import simulate

CHAIN = chain(4)
NAMES = [f"d{i}" for i in range(9)] + ["phone"]


def pipeline(order: str, micro_batches: int = 6, **facts: object) -> Plan:
    stages = (Stage((0, 2), ("d0",)), Stage((2, 4), ("d1",)))
    return resolve(Plan("chain", micro_batches, stages, micro_batches, order, **facts), CHAIN)  # type: ignore[arg-type]


def passes_of(log: list[Action]) -> list[Pass]:
    return [
        ("forward" if isinstance(action, Forward) else "backward", action.micro_batch)
        for action in log
        if isinstance(action, (Forward, Backward))
    ]


def run(plan: Plan, link: Link) -> Simulation:
    return simulate(plan, CHAIN, cluster(NAMES, link), even_profile(CHAIN, NAMES))


def test_a_fixed_order_answers_its_list_whatever_arrives() -> None:
    actions = (Forward(0, 0, 0, 2), Backward(0, 0, 0, 2))
    policy = FixedOrder(actions)
    assert [policy.next(DeviceState()) for _ in range(4)] == [*actions, DONE, DONE]


def test_policies_are_fresh_every_time() -> None:
    schedule = Schedule(pipeline("1f1b"), CHAIN)
    one, two = schedule.policies()["d0"], schedule.policies()["d0"]
    assert one.next(DeviceState()) == two.next(DeviceState()) == schedule.actions["d0"][0]


def test_eager_waits_and_takes_what_has_arrived() -> None:
    """The last stage: waits for a value, runs forward and back; the first runs ahead up to K and waits."""
    schedule = Schedule(pipeline("eager"), CHAIN)
    last, state = schedule.policies()["d1"], DeviceState()
    assert last.next(state) == WAIT
    receive = next(a for a in schedule.lowering.work["d1"].forward(0) if isinstance(a, Receive))
    state.arrived.add((receive.source, receive.message))
    answers = [last.next(state) for _ in range(5)]
    assert [type(answer) for answer in answers] == [Receive, Forward, Loss, Backward, Send]
    assert last.next(state) == WAIT

    first, nothing = schedule.policies()["d0"], DeviceState()
    taken = []
    while (answer := first.next(nothing)) != WAIT:
        taken.append(answer)
    assert [type(answer) for answer in taken] == [Forward, Send] * 3  # K_0 = 3


def test_eager_prefers_backward() -> None:
    schedule = Schedule(pipeline("eager"), CHAIN)
    first, state = schedule.policies()["d0"], DeviceState()
    assert isinstance(first.next(state), Forward)
    assert isinstance(first.next(state), Send)
    receive = next(a for a in schedule.lowering.work["d0"].backward(0, is_last=False) if isinstance(a, Receive))
    state.arrived.add((receive.source, receive.message))
    assert [type(first.next(state)) for _ in range(2)] == [Receive, Backward]


@pytest.mark.parametrize("link", [Link(1e6, 0.0), Link(1e5, 0.05), Link(3e4, 0.0)])
def test_the_log_of_an_eager_run_passes_the_checker(link: Link) -> None:
    plan = pipeline("eager")
    result = run(plan, link)
    checked = check(Schedule(plan, CHAIN), cluster(NAMES, link), {d: tuple(own) for d, own in result.log.items()})
    assert checked.most_micro_batches_held == {"d0": 3, "d1": 1}
    for device in ("d0", "d1"):
        both = [(kind, number) for kind in ("forward", "backward") for number in range(6)]
        assert sorted(passes_of(result.log[device])) == sorted(both)


def test_eager_differs_from_1f1b_where_gradients_are_late() -> None:
    """Values come slowly: with K = 3 the last stage of 1F1B waits for three, an eager one turns back at once."""
    slow = Link(MAP_BYTES / 0.1, 0.0)
    fixed, eager = (run(pipeline(order, warm_up=(3, 3)), slow) for order in ("1f1b", "eager"))
    assert passes_of(fixed.log["d1"])[:4] == [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 0)]
    assert passes_of(eager.log["d1"])[:4] == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert eager.seconds < 0.9 * fixed.seconds
    for device in ("d0", "d1"):
        assert sorted(map(str, fixed.log[device])) == sorted(map(str, eager.log[device]))


def test_eager_is_1f1b_where_nothing_is_late() -> None:
    free = Link(1e15, 0.0)
    fixed, eager = run(pipeline("1f1b"), free), run(pipeline("eager"), free)
    assert fixed.seconds == pytest.approx(eager.seconds, rel=1e-6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(plans(CHAIN, kinds=("single", "samples"), orders=("eager",)))
def test_every_eager_plan_ends_and_its_log_is_a_schedule(plan: Plan) -> None:
    """Wherever the input has its home, the last stage included."""
    result = run(plan, Link(1e6, 1e-3))
    checked = check(Schedule(plan, CHAIN), actions={device: tuple(own) for device, own in result.log.items()})
    for index, stage in enumerate(plan.stages):
        for device in stage.devices:
            assert checked.most_micro_batches_held[device] <= plan.warm_up_of(index)


def test_a_home_in_the_last_stage_does_not_wait_for_the_first() -> None:
    """It sends the input before it waits for what the first stage makes of it."""
    result = run(pipeline("eager", homes={"x": "d1"}), Link(1e6, 0.0))
    assert isinstance(result.log["d1"][0], Send)
    assert len(passes_of(result.log["d0"])) == 12


def test_replicas_choose_alone() -> None:
    stages = (Stage((0, 2), ("d0", "d1"), BySamples((1, 2))), Stage((2, 4), ("d2",)))
    plan = resolve(Plan("chain", 12, stages, 4, "eager"), CHAIN)
    result = run(plan, Link(1e5, 1e-3))
    check(Schedule(plan, CHAIN), actions={device: tuple(own) for device, own in result.log.items()})
