"""Inter-sample parallelism (DECNN Algorithm 1), simulated and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_plans import plans
from hand_made import chain, cluster
from manyhands.facts.link import Link
from manyhands.facts.plan import ByChannels, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Action, Forward, Message, Receive
from manyhands.schedule.interleave import MOST_CHUNKS, in_chunks
from manyhands.schedule.policies import DONE, WAIT, DeviceState
from manyhands.schedule.policy import Schedule
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import simulate

CHAIN = chain(6)
SKIPPING = chain(6, skips={3: 0, 5: 1})


def by_channels(count: int, order: str = "interleave") -> Plan:
    stage = Stage((0, 6), ("d0", "d1"), ByChannels((1, 1), input_based=()))
    return resolve(Plan("chain", count, (stage,), count, order), CHAIN)  # type: ignore[arg-type]


def delayed(seconds: float) -> Link:
    return Link(bytes_per_second=1e9, delay_seconds=seconds)


def assert_never_overtakes(log: list[Action], last: int = len(CHAIN.ops)) -> None:
    """Two samples under way at most, none further than the one before it."""
    done: dict[int, int] = {}
    for action in log:
        if isinstance(action, Forward):
            number = action.micro_batch
            if number > 0:
                assert done.get(number - 1, 0) >= action.last, (number, str(action))
            if number > 1 and number - 2 in done:
                assert done[number - 2] == last
            done[number] = max(done.get(number, 0), action.last)


def passes(result: Simulation) -> dict[str, list[Action]]:
    return {device: list(own) for device, own in result.log.items()}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("network", [CHAIN, SKIPPING], ids=["chain", "skips"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_drawn_streams_end_in_order_and_do_what_was_planned(network: object, data: st.DataObject) -> None:
    chosen = CHAIN if network is CHAIN else SKIPPING
    plan = data.draw(plans(chosen, orders=("interleave",), most_stages=3, repeats=True))
    delay = data.draw(st.sampled_from((0.0, 1e-4, 1e-2)))
    machines = cluster(plan.devices, delayed(delay))
    result = simulate(plan, chosen, machines, keep_spans=False)
    schedule = Schedule(resolve(plan, chosen, machines), chosen)
    for device, log in passes(result).items():
        planned = [str(action) for action in schedule.every_action(device) if not isinstance(action, Forward)]
        assert sorted(str(action) for action in log if not isinstance(action, Forward)) == sorted(planned)
        for number in range(plan.micro_batches):
            own = [action for action in log if isinstance(action, Forward) and action.micro_batch == number]
            covered = [
                op for action in own if action.part not in ("rim", "sum") for op in range(action.first, action.last)
            ]
            geometries = schedule.lowering.work[device].geometries
            assert covered == [op for geometry in geometries for op in range(geometry.first, geometry.last)]
        if len(schedule.lowering.work[device].geometries) == 1:
            assert_never_overtakes(log, schedule.lowering.work[device].geometries[0].last)


def test_the_next_sample_fills_the_waits() -> None:
    slow = cluster(("d0", "d1"), delayed(0.01))
    plain = simulate(by_channels(8, "stream"), CHAIN, slow).seconds
    interleaved = simulate(by_channels(8), CHAIN, slow)
    assert interleaved.seconds < 0.62 * plain  # nearly two at a time
    for log in passes(interleaved).values():
        assert_never_overtakes(log)


def test_without_waits_samples_come_one_after_another() -> None:
    near = cluster(("d0", "d1"), delayed(0.0))
    plain = simulate(by_channels(3, "stream"), CHAIN, near).seconds
    assert simulate(by_channels(3), CHAIN, near).seconds <= 1.001 * plain


def test_it_is_algorithm_1() -> None:
    """One device's answers when messages arrive at chosen moments: the current sample as soon as it can go on, else one
    layer of the next, no further than the current one."""
    schedule = Schedule(by_channels(2), CHAIN)
    policy = schedule.policy_of("d0")
    arrived: set[tuple[str, object]] = set()
    state = DeviceState(arrived, {0, 1})
    messages = {
        (action.message.micro_batch, action.message.parts[0].tensor): (action.source, action.message)
        for action in schedule.every_action("d0")
        if isinstance(action, Receive)
    }

    def computed() -> str:
        while True:
            answer = policy.next(state)
            if answer in (WAIT, DONE):
                return str(answer)
            if isinstance(answer, Forward):
                return f"{answer.micro_batch}: {answer.first}:{answer.last}"

    assert computed() == "0: 0:1"  # and its halo is sent; the other's has not come
    assert computed() == "1: 0:1"  # the next sample, as far as the current one is
    assert computed() == "wait"
    arrived.add(messages[1, "t0"])
    assert computed() == "wait"  # it would overtake
    arrived.add(messages[0, "t0"])
    assert computed() == "0: 1:2"
    assert computed() == "1: 1:2"
    for operator in range(1, 5):
        arrived.add(messages[0, f"t{operator}"])
    assert [computed() for _ in range(4)] == [f"0: {op}:{op + 1}" for op in range(2, 6)]
    assert computed() == "wait"  # the next is the current one now; its message is late
    for operator in range(1, 5):
        arrived.add(messages[1, f"t{operator}"])
    assert [computed() for _ in range(4)] == [f"1: {op}:{op + 1}" for op in range(2, 6)]
    assert computed() == "done"


def test_a_sample_that_was_not_fed_is_waited_for() -> None:
    policy = Schedule(by_channels(2), CHAIN).policy_of("d0")
    fed: set[int] = set()
    state = DeviceState(set(), fed)
    assert policy.next(state) == WAIT
    fed.add(0)
    assert isinstance(policy.next(state), Forward)


def test_a_pass_is_cut_into_chunks_of_about_a_sixteenth() -> None:
    deep = chain(100)
    whole: list[Action] = [Forward(0, 0, 0, 60), Receive("d1", Message("halo", 0, 0, (), 4)), Forward(0, 0, 60, 100)]
    cut = list(in_chunks(whole, deep))
    chunks = [action for action in cut if isinstance(action, Forward)]
    assert [op for action in chunks for op in range(action.first, action.last)] == list(range(100))
    assert cut.index(whole[1]) == sum(action.last <= 60 for action in chunks)
    assert MOST_CHUNKS / 2 < len(chunks) <= MOST_CHUNKS + 1
    assert all(action.last - action.first >= 100 // MOST_CHUNKS for action in chunks[:-1] if action.last != 60)
