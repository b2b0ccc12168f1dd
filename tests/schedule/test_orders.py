"""Orders, laid out as the staircases of orders.py: digits forward, letters backward (a = backward of 0)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.plan import Plan, Stage
from manyhands.schedule.orders import Pass, gpipe, one_forward_one_backward, passes, sequential, stream


def drawn(order: Iterable[Pass]) -> str:
    return "".join(str(number) if kind == "forward" else "abcdefghij"[number] for kind, number in order)


def test_sequential() -> None:
    assert drawn(sequential(4)) == "0a1b2c3d"


def test_gpipe() -> None:
    assert drawn(gpipe(4)) == "0123abcd"


def test_stream() -> None:
    assert drawn(stream(4)) == "0123"


@pytest.mark.parametrize(
    ("ahead", "staircase"),
    [
        (1, "0a1b2c3d4e"),
        (2, "01a2b3c4de"),
        (3, "012a3b4cde"),
        (4, "0123a4bcde"),
        (5, "01234abcde"),
        (9, "01234abcde"),
        (0, "0a1b2c3d4e"),
    ],
)
def test_one_forward_one_backward(ahead: int, staircase: str) -> None:
    assert drawn(one_forward_one_backward(5, ahead)) == staircase


def plan(stages: int, micro_batches: int, order: str = "1f1b", warm_up: str = "2(P-p)-1") -> Plan:
    made = tuple(Stage((index, index + 1), (f"d{index}",)) for index in range(stages))
    return Plan("chain", micro_batches, made, micro_batches, order, warm_up)  # type: ignore[arg-type]


def test_three_stages_of_1f1b() -> None:
    """ASTEROID §3.2: K_p = 2(P-p)-1."""
    staircases = [drawn(passes(plan(3, 7), stage)) for stage in range(3)]
    assert staircases == [
        "01234a5b6cdefg",
        "012a3b4c5d6efg",
        "0a1b2c3d4e5f6g",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "expected"), [("sequential", "0a1b2c"), ("gpipe", "012abc"), ("stream", "012"), ("1f1b", "012abc")]
)
def test_every_order_of_a_first_stage(order: str, expected: str) -> None:
    assert drawn(passes(plan(2, 3, order), 0)) == expected


@given(st.integers(1, 12), st.integers(1, 8), st.sampled_from(("2(P-p)-1", "2(P-p)", "P-p", "2(P-p)+1")))
def test_1f1b_runs_everything_once_and_holds_at_most_k(micro_batches: int, stages: int, warm_up: str) -> None:
    made = plan(stages, micro_batches, warm_up=warm_up)
    for stage in range(stages):
        ahead = {"2(P-p)-1": 2 * (stages - stage) - 1, "2(P-p)": 2 * (stages - stage), "P-p": stages - stage,
                 "2(P-p)+1": 2 * (stages - stage) + 1}[warm_up]  # fmt: skip
        order = passes(made, stage)
        everything = [(kind, number) for kind in ("forward", "backward") for number in range(micro_batches)]
        assert sorted(order) == sorted(everything)
        held = most = 0
        for place, (kind, number) in enumerate(order):
            if kind == "forward":
                held += 1
            else:
                assert order.index(("forward", number)) < place
                held -= 1
            most = max(most, held)
        assert most == min(ahead, micro_batches)
        for kind in ("forward", "backward"):
            assert [number for one, number in order if one == kind] == list(range(micro_batches))
