"""The checker: good schedules pass, broken ones are refused with the device and the very action."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_plans import FIXED_ORDERS, plans
from hand_made import MAP_BYTES, WEIGHT_BYTES, chain, cluster
from manyhands.facts.errors import BadSchedule, OutOfMemory
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Action, Receive, Reduce, Send
from manyhands.schedule.checker import check, check_matching, check_progress
from manyhands.schedule.memory import DeviceMemory
from manyhands.schedule.policy import Schedule

CHAIN = chain(4, statistics=[1])
SKIPPING = chain(6, skips={3: 0, 5: 1})
Lists = dict[str, tuple[Action, ...]]


def pipeline(order: str = "1f1b", micro_batches: int = 4, stages: int = 2, **facts: object) -> Plan:
    """`stages` stages of one device each over four layers."""
    cuts = [round(4 * index / stages) for index in range(stages + 1)]
    made = tuple(Stage((cuts[i], cuts[i + 1]), (f"d{i}",)) for i in range(stages))
    return resolve(Plan("chain", micro_batches, made, micro_batches, order, **facts), CHAIN)  # type: ignore[arg-type]


def shared(share: BySamples | ByTiles) -> Plan:
    return resolve(Plan("chain", 4, (Stage((0, 4), ("d0", "d1"), share),), 2), CHAIN)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("network", [CHAIN, SKIPPING], ids=["chain", "skips"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_drawn_plan_has_a_schedule_that_ends(network: object, data: st.DataObject) -> None:
    chosen = CHAIN if network is CHAIN else SKIPPING
    plan = data.draw(plans(chosen, most_stages=4, repeats=True))
    schedule = Schedule(plan, chosen)
    checked = check(schedule)
    assert checked.actions == sum(map(len, schedule.actions.values()))
    sends = [a for own in schedule.actions.values() for a in own if isinstance(a, Send)]
    assert checked.messages == len(sends)
    assert sum(checked.bytes_between.values()) == sum(send.message.bytes for send in sends)
    assert set(checked.peak_bytes) == set(plan.devices)


@pytest.mark.parametrize("order", FIXED_ORDERS)
def test_every_order_passes(order: str) -> None:
    check(Schedule(pipeline(order), CHAIN))


# Broken on purpose


def without(lists: Lists, device: str, chosen: Callable[[Action], bool], nth: int = 0) -> tuple[Lists, Action]:
    """The lists less one action of one device, and that action."""
    places = [place for place, action in enumerate(lists[device]) if chosen(action)]
    place = places[nth]
    own = lists[device]
    return {**lists, device: own[:place] + own[place + 1 :]}, own[place]


def test_a_dropped_send_is_missed_by_its_receiver() -> None:
    schedule = Schedule(pipeline(), CHAIN)
    broken, gone = without(schedule.actions, "d0", lambda a: isinstance(a, Send), 2)
    assert isinstance(gone, Send)
    with pytest.raises(BadSchedule) as caught:
        check(schedule, actions=broken)
    assert f"d1 waits for {gone.message} from d0 1 time(s) more than d0 sends it" in str(caught.value)
    with pytest.raises(BadSchedule) as stuck:
        check_progress(broken)
    assert "2 of 2 devices wait forever" in str(stuck.value)
    assert f"-> receive d0 {gone.message}" in str(stuck.value)


def test_a_dropped_receive_leaves_a_message_over() -> None:
    schedule = Schedule(pipeline(), CHAIN)
    broken, gone = without(schedule.actions, "d1", lambda a: isinstance(a, Receive), 1)
    assert isinstance(gone, Receive)
    with pytest.raises(BadSchedule) as caught:
        check(schedule, actions=broken)
    assert f"d0 sends {gone.message} to d1 1 time(s) more than d1 receives it" in str(caught.value)


def test_a_message_sent_twice_is_refused() -> None:
    schedule = Schedule(pipeline(), CHAIN)
    send = next(action for action in schedule.actions["d0"] if isinstance(action, Send))
    broken = {**schedule.actions, "d0": (send, *schedule.actions["d0"])}
    with pytest.raises(BadSchedule, match="1 time"):
        check(schedule, actions=broken)


def test_two_devices_that_wait_for_each_other() -> None:
    """Tiles receive before they send: each stands at its receive, and both are shown."""
    schedule = Schedule(shared(ByTiles((1, 1))), CHAIN)
    broken: Lists = {}
    for device, own in schedule.actions.items():
        first = next(i for i, action in enumerate(own) if isinstance(action, Send))
        second = next(i for i, action in enumerate(own) if isinstance(action, Receive))
        assert second > first
        broken[device] = (*own[:first], own[second], *own[first:second], *own[second + 1 :])
    check_matching(broken)  # every message has its receiver; only the order is wrong
    with pytest.raises(BadSchedule) as caught:
        check(schedule, actions=broken)
    report = str(caught.value)
    assert "2 of 2 devices wait forever" in report
    for device, own in broken.items():
        place = next(i for i, action in enumerate(own) if isinstance(action, Receive))
        assert f"{device}, action {place} of {len(own)}:" in report
        assert f"-> {own[place]}" in report


def test_a_missing_member_of_a_reduction() -> None:
    schedule = Schedule(shared(BySamples((1, 1))), CHAIN)
    for what in ("gradients", "statistics"):
        broken, gone = without(schedule.actions, "d1", lambda a, w=what: isinstance(a, Reduce) and a.what == w)  # type: ignore[misc]
        with pytest.raises(BadSchedule) as caught:
            check(schedule, actions=broken)
        assert f"'{gone}' is joined by {{'d0': 1}}" in str(caught.value)
        with pytest.raises(BadSchedule) as stuck:
            check_progress(broken)
        waits_at = "step s0" if what == "gradients" else str(gone)
        assert f"-> {waits_at}" in str(stuck.value)
        assert "  d0, action" in str(stuck.value)


def test_a_norm_that_one_device_does_not_join() -> None:
    plan = msgspec.structs.replace(pipeline(), gradient_norm=True)
    schedule = Schedule(plan, CHAIN)
    check(schedule)
    broken, gone = without(schedule.actions, "d1", lambda a: isinstance(a, Reduce) and a.what == "norm")
    with pytest.raises(BadSchedule) as caught:
        check(schedule, actions=broken)
    assert f"'{gone}' is joined by {{'d0': 1}}" in str(caught.value)
    with pytest.raises(BadSchedule, match="1 of 2 devices wait forever") as stuck:
        check_progress(broken)
    assert f"-> {gone}" in str(stuck.value)


def test_a_norm_before_the_sums_that_it_is_of() -> None:
    """It waits for them: where a device would join a sum after it, both wait forever."""
    plan = msgspec.structs.replace(shared(BySamples((1, 1))), gradient_norm=True)
    schedule = Schedule(plan, CHAIN)
    broken: Lists = {}
    for device, own in schedule.actions.items():
        norm = next(a for a in own if isinstance(a, Reduce) and a.what == "norm")
        summed = next(i for i, a in enumerate(own) if isinstance(a, Reduce) and a.what == "gradients")
        place = summed if device == "d0" else summed + 1
        others = tuple(a for a in own if a is not norm)
        broken[device] = (*others[:place], norm, *others[place:])
    with pytest.raises(BadSchedule, match="2 of 2 devices wait forever"):
        check_progress(broken)


def test_statistics_in_another_order_deadlock() -> None:
    network = chain(4, statistics=[1, 2])
    plan = resolve(Plan("chain", 2, (Stage((0, 4), ("d0", "d1"), BySamples((1, 1))),)), network)
    schedule = Schedule(plan, network)
    places = [i for i, a in enumerate(schedule.actions["d1"]) if isinstance(a, Reduce) and a.what == "statistics"]
    own = list(schedule.actions["d1"])
    own[places[0]], own[places[1]] = own[places[1]], own[places[0]]
    with pytest.raises(BadSchedule, match="2 of 2 devices wait forever"):
        check(schedule, actions={**schedule.actions, "d1": tuple(own)})


def test_a_first_stage_that_does_not_run_ahead_enough() -> None:
    """K_0 = 1 with K_1 = 2: refused in the plan, and by the checker where a list is made of it all the same."""
    plan = Plan("chain", 4, pipeline().stages, 4, warm_up=(1, 2))
    schedule = Schedule(plan, CHAIN)
    with pytest.raises(BadSchedule) as caught:
        check(schedule)
    report = str(caught.value)
    assert "d0, action" in report
    assert "-> receive d1 s1 m0 gradient" in report
    assert "-> receive d0 s1 m1 value" in report


def test_many_stuck_devices_are_counted() -> None:
    schedule = Schedule(resolve(Plan("chain", 12, (Stage((0, 4), tuple(f"d{i}" for i in range(12)),
                                                          BySamples((1,) * 12)),)), CHAIN), CHAIN)  # fmt: skip
    broken = {**schedule.actions, "d11": ()}
    with pytest.raises(BadSchedule, match="11 of 12 devices wait forever") as caught:
        check_progress(broken)
    assert "and 3 more" in str(caught.value)


def test_an_order_decided_as_it_runs_has_no_list_to_check() -> None:
    with pytest.raises(BadSchedule, match="eager") as caught:
        check(Schedule(pipeline("eager"), CHAIN))
    assert "simulate" in caught.value.hint


# Memory


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro_batches", [2, 8, 16])
def test_1f1b_holds_k_micro_batches_and_gpipe_all(stages: int, micro_batches: int) -> None:
    by_turns = check(Schedule(pipeline("1f1b", micro_batches, stages), CHAIN))
    at_once = check(Schedule(pipeline("gpipe", micro_batches, stages), CHAIN))
    one_by_one = check(Schedule(pipeline("sequential", micro_batches, stages), CHAIN))
    for stage in range(stages):
        assert by_turns.most_micro_batches_held[f"d{stage}"] == min(2 * (stages - stage) - 1, micro_batches)
        assert at_once.most_micro_batches_held[f"d{stage}"] == micro_batches
        assert one_by_one.most_micro_batches_held[f"d{stage}"] == 1


def static_bytes(layers: int, slots: int = 1) -> int:
    return layers * WEIGHT_BYTES * (2 + slots)


def test_peak_bytes_by_hand() -> None:
    """Stage 1 of 2: weights, gradients and momentum; per micro-batch two layers' saved maps and the received one; one
    operator's maps, and its weight's gradient before it is added to the sum; and of those that wait for their backward
    pass, what the loss has left."""
    gpipe = check(Schedule(pipeline("gpipe", 4), CHAIN))
    held = 2 * MAP_BYTES
    workspace = 2 * MAP_BYTES + WEIGHT_BYTES
    assert gpipe.peak_bytes["d0"] == static_bytes(2) + 4 * held + workspace
    assert gpipe.peak_bytes["d1"] == static_bytes(2) + 4 * (held + MAP_BYTES) + 3 * MAP_BYTES + workspace
    by_turns = check(Schedule(pipeline("1f1b", 4), CHAIN))
    assert by_turns.peak_bytes["d0"] == static_bytes(2) + 3 * held + workspace
    assert by_turns.peak_bytes["d1"] == static_bytes(2) + held + MAP_BYTES + workspace


def test_inference_holds_one_sample_and_no_gradients() -> None:
    stream = check(Schedule(pipeline("stream", 4), CHAIN))
    assert stream.peak_bytes["d1"] == 2 * WEIGHT_BYTES + MAP_BYTES + 2 * MAP_BYTES
    assert stream.most_micro_batches_held == {"d0": 1, "d1": 1}


def test_everything_is_given_back_at_the_end() -> None:
    for order in FIXED_ORDERS:
        schedule = Schedule(pipeline(order), CHAIN)
        for device, own in schedule.actions.items():
            memory = DeviceMemory(schedule.plan, CHAIN, schedule.lowering.work[device].geometries, device)
            for action in own:
                memory.act(action)
            assert memory.held_bytes == pytest.approx(0)
            assert memory.micro_batches_held == 0


def test_a_share_holds_its_part() -> None:
    whole = resolve(Plan("chain", 4, (Stage((0, 4), ("d0",)),), 2), CHAIN)
    weights = static_bytes(4) + WEIGHT_BYTES  # and one new gradient
    alone = check(Schedule(whole, CHAIN)).peak_bytes["d0"] - weights
    halves = check(Schedule(shared(BySamples((1, 1))), CHAIN)).peak_bytes
    assert halves["d0"] - weights == halves["d1"] - weights == alone / 2


def test_too_little_memory_names_the_device_and_both_numbers() -> None:
    schedule = Schedule(pipeline("gpipe", 8), CHAIN)
    needed = check(schedule).peak_bytes["d1"]
    check(schedule, cluster(["d0", "d1"], memory_bytes=int(needed)))
    with pytest.raises(OutOfMemory, match=r"d1 would hold 28.1 kB of 28.1 kB at 'backward s1 m0 2:4'") as caught:
        check(schedule, cluster(["d0", "d1"], memory_bytes=int(needed) - 1))
    assert "8 micro-batch(es)" in str(caught.value)
    assert "more stages" in caught.value.hint
