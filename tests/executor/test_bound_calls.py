"""Actions are bound once and called in every round; one that is only equal is bound for itself."""

from __future__ import annotations

from functools import partial

from manyhands.executor import bound_calls
from manyhands.executor.bound_calls import BoundCalls, Call
from manyhands.schedule.actions import Discard, Step


def calls_of(log: list[str]) -> BoundCalls:
    def bind(action: Step | Discard) -> Call:
        log.append(f"bind {action}")
        return partial(log.append, str(action))

    return BoundCalls({Step: bind, Discard: bind})


def test_an_action_is_bound_once() -> None:
    log: list[str] = []
    calls, actions = calls_of(log), [Step(0), Discard(1, 2)]
    for _ in range(3):
        for action in actions:
            calls.of(action)()
    assert log == ["bind step s0", "step s0", "bind discard s1 m2", "discard s1 m2", *["step s0", "discard s1 m2"] * 2]


def test_an_equal_action_is_another_one() -> None:
    log: list[str] = []
    calls = calls_of(log)
    first, second = Step(0), Step(0)
    assert calls.of(first) is not calls.of(second)
    assert log == ["bind step s0"] * 2


def test_actions_made_anew_in_every_round_do_not_add_up() -> None:
    log: list[str] = []
    calls = calls_of(log)
    for number in range(2 * bound_calls.MOST_KEPT):
        calls.of(Step(number % 3))()
    assert len(calls._bound) <= bound_calls.MOST_KEPT
    assert log[1::2] == [f"step s{number % 3}" for number in range(2 * bound_calls.MOST_KEPT)]
