"""Actions print and parse; what cannot be read is refused by its line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_plans import plans
from hand_made import chain
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadSchedule
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import (
    KINDS,
    Action,
    Await,
    Backward,
    Discard,
    Forward,
    Loss,
    Message,
    Part,
    Receive,
    Reduce,
    Send,
    Step,
    parse_action,
    parse_schedule,
    print_schedule,
)
from manyhands.schedule.policy import Schedule

CHAIN = chain(4, statistics=[1, 2])
numbers = st.integers(0, 10**6)
device_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
tensor_names = st.from_regex(r"[a-z_][a-zA-Z0-9_.:]{0,12}", fullmatch=True)
intervals = st.tuples(st.integers(0, 99), st.integers(0, 99))
boxes = st.lists(intervals, max_size=4).map(lambda axes: Box(tuple(axes)))
messages = st.builds(
    Message,
    st.sampled_from(KINDS),
    numbers,
    numbers,
    st.lists(st.builds(Part, tensor_names, boxes, st.booleans()), min_size=1, max_size=3).map(tuple),
    numbers,
)
reductions = (
    st.builds(
        Reduce,
        numbers,
        st.just("gradients"),
        numbers,
        numbers,
        st.lists(device_names, min_size=1, max_size=3).map(tuple),
        numbers,
    )
    | st.builds(
        Reduce,
        numbers,
        st.just("statistics"),
        numbers,
        numbers,
        st.lists(device_names, min_size=1, max_size=3).map(tuple),
        numbers,
        numbers,
        st.booleans(),
        st.booleans(),
    )
    | st.builds(
        Reduce,
        numbers,
        st.just("norm"),
        numbers,
        numbers,
        st.lists(device_names, min_size=1, max_size=3).map(tuple),
        numbers,
        numbers,
    )
)
actions = st.one_of(
    st.builds(Forward, numbers, numbers, numbers, numbers, st.sampled_from(("", "interior", "rim", "ahead", "again"))),
    st.builds(Loss, numbers, numbers),
    st.builds(Backward, numbers, numbers, numbers, numbers, st.sampled_from(("", "inputs", "weights", "rim"))),
    st.builds(Send, device_names, messages),
    st.builds(Receive, device_names, messages),
    reductions,
    st.builds(Await, numbers, numbers, numbers, numbers, st.booleans()),
    st.builds(Step, numbers),
    st.builds(Step, numbers, numbers),
    st.builds(Discard, numbers, numbers),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(actions)
def test_an_action_survives_being_printed(action: Action) -> None:
    assert parse_action(str(action)) == action
    assert parse_action(f"  {action}\n") == action


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(device_names, st.lists(actions, max_size=5).map(tuple), max_size=4))
def test_any_schedule_survives_being_printed(schedule: dict[str, tuple[Action, ...]]) -> None:
    assert parse_schedule(print_schedule(schedule)) == schedule


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(plans(CHAIN, repeats=True))
def test_a_plans_schedule_survives_being_printed(plan: Plan) -> None:
    schedule = Schedule(resolve(plan, CHAIN), CHAIN) if "phone" not in plan.devices else Schedule(plan, CHAIN)
    assert parse_schedule(print_schedule(schedule.actions)) == schedule.actions


def test_actions_print_as_documented() -> None:
    message = Message("value", 1, 3, (Part("relu_3", Box.of((0, 4), (0, 64))), Part("mask", Box.of())), 802816)
    assert str(Forward(0, 3, 0, 12)) == "forward s0 m3 0:12"
    assert str(Forward(0, 3, 4, 5, "interior")) == "forward s0 m3 4:5 interior"
    assert str(Forward(0, 3, 4, 5, "rim")) == "forward s0 m3 4:5 rim"
    assert str(Loss(1, 3)) == "loss s1 m3"
    assert str(Backward(0, 3, 0, 12)) == "backward s0 m3 0:12"
    assert str(Backward(0, 3, 4, 5, "inputs")) == "backward s0 m3 4:5 inputs"
    assert str(Backward(0, 3, 4, 5, "weights")) == "backward s0 m3 4:5 weights"
    assert str(Send("pi-2", message)) == "send pi-2 s1 m3 value relu_3[0:4,0:64]+mask[] 802816B"
    rim = Message("halo-gradient", 0, 3, (Part("a", Box.of((0, 1))), Part("b", Box.of((1, 2)), is_value=True)), 8)
    assert str(Receive("pi-1", rim)) == "receive pi-1 s0 m3 halo-gradient a[0:1]+=b[1:2] 8B"
    assert str(Reduce(0, "gradients", 0, 12, ("pi-1", "pi-2"), 44)) == "reduce s0 gradients 0:12 pi-1,pi-2 44B"
    assert str(Reduce(0, "norm", 0, 12, ("a", "b"), 16)) == "reduce s0 norm 0:12 a,b 16B"
    assert str(Reduce(0, "norm", 0, 12, ("a", "b"), 16, 3)) == "reduce s0 norm m3 0:12 a,b 16B"
    statistics = Reduce(0, "statistics", 7, 8, ("a", "b"), 516, 3, True)
    assert str(statistics) == "reduce s0 statistics m3b 7:8 a,b 516B"
    assert str(Reduce(0, "statistics", 7, 8, ("a",), 516, 3, True, later=True)).endswith("516B later")
    assert str(Await(0, 7, 8, 3, backward=True)) == "await s0 m3b 7:8"
    assert Await(0, 7, 8, 3, backward=True).key == statistics.key
    assert str(Backward(0, 3, 7, 8, "rim")) == "backward s0 m3 7:8 rim"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "jump s0",
        "forward s0 m3",
        "forward s0 m3 0-12",
        "forward s-1 m3 0:12",
        "forward s0 m3 0:1 inputs",
        "backward s0 m3 0:1 outputs",
        "backward s0 m3 0:1 interior",
        "reduce s0 statistics m3 7:8 a,b 516B soon",
        "await s0 statistics m3 7:8",
        "loss s0",
        "send pi s1 m3 value relu[0:4] 12",
        "send pi s1 m3 values relu[0:4] 12B",
        "send pi s1 m3 value relu 12B",
        "send pi s1 m3 value relu[0:4]junk 12B",
        "send pi s1 m3 value relu[0:x] 12B",
        "send pi s1 m3 value ==relu[0:4] 12B",
        "send pi m3 value relu[0:4] 12B",
        "receive pi s1 m3 value [0:4] 12B",
        "reduce s0 weights 0:3 a,b 4B",
        "step 0",
    ],
)
def test_what_is_not_an_action(text: str) -> None:
    with pytest.raises(BadSchedule, match="cannot read the action") as caught:
        parse_action(text)
    assert text in caught.value.message


def test_bad_text_is_refused_by_its_line() -> None:
    with pytest.raises(BadSchedule, match=r"line 3: cannot read the action 'forwards s0 m1 0:2'"):
        parse_schedule("device a\n  forward s0 m0 0:2\n  forwards s0 m1 0:2\n")
    with pytest.raises(BadSchedule, match=r"line 2: 'step s0' comes before any 'device NAME' line"):
        parse_schedule("\n  step s0\ndevice a\n")
    with pytest.raises(BadSchedule, match=r"line 4: device 'a' has a list already"):
        parse_schedule("device a\n  step s0\n\ndevice a\n  step s0\n")
