"""Which device a run that stands still goes on without: the root cause, and nobody while all get on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.runtime import stalls
from manyhands.runtime.control_parts import Standing
from manyhands.runtime.stalls import Observed, judge, limit_seconds, suspect, work_of
from real_runs import LAYERS

LIMIT = 4.0
LONG = 5.0
"""More than the limit, less than twice."""
VERY_LONG = 9.0


def device(unmoved: float, *waits_for: str, work: float = 1.0, step: int = 3, **facts: Any) -> Observed:
    """One that waits for these; for nobody: it computes."""
    return Observed(Standing(1, step, 7, is_busy=not waits_for, waits_for=waits_for, **facts), unmoved, work)


def verdict(devices: dict[str, Observed], steps_fed: int = 6) -> str | None:
    found = judge(devices, LIMIT, steps_fed=steps_fed)
    return None if found is None else found.device


names = st.sampled_from(("a", "b", "c", COORDINATOR))


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(("a", "b", "c")),
        st.builds(
            lambda unmoved, busy, waits, silent, refused: Observed(
                Standing(1, 3, 7, busy, tuple(waits), False, silent, refused), unmoved
            ),
            st.floats(0.0, LIMIT, exclude_max=True), st.booleans(), st.lists(names),
            st.dictionaries(names, st.floats(0.0, 100.0)), st.dictionaries(names, st.integers(1, 5)),
        ),
        min_size=1,
    )
)  # fmt: skip
def test_nobody_is_evicted_while_everybody_gets_on(devices: dict[str, Observed]) -> None:
    """Whatever they say of each other."""
    assert judge(devices, LIMIT, steps_fed=6) is None


def test_the_device_that_computes_and_finishes_nothing() -> None:
    assert verdict({"a": device(LONG, "b"), "b": device(LONG), "c": device(LONG, "b")}) == "b"


def test_one_that_gets_ready_has_more_time() -> None:
    assert verdict({"a": device(LONG, step=-1), "b": device(LONG, "a", step=-1)}) is None


def test_hung_comes_before_what_others_say_of_their_links() -> None:
    devices = {"a": device(LONG, "b", silent={"c": 9.0}), "b": device(LONG), "c": device(LONG, "b")}
    assert verdict(devices) == "b"


def test_nobody_is_judged_while_one_sends_no_heartbeats() -> None:
    """It was frozen: it seems to compute, or the others to wait for it; the failure detector says that it is lost."""
    silent = replace(device(LONG), silent_seconds=stalls.HEARD_SECONDS)
    assert verdict({"a": device(LONG, "b"), "b": silent}) is None
    heard = replace(silent, silent_seconds=stalls.HEARD_SECONDS / 2)
    assert verdict({"a": device(LONG, "b"), "b": heard}) == "b"
    assert verdict({"a": device(VERY_LONG, "b"), "b": replace(silent, unmoved_seconds=VERY_LONG)}) is None


def test_the_device_whose_messages_were_refused() -> None:
    devices = {"a": device(LONG, "b", refused={"b": 2}), "b": device(LONG, "a"), "c": device(LONG, "a")}
    assert verdict(devices) == "b"


def test_refusals_count_only_of_a_device_that_is_waited_for() -> None:
    assert verdict({"a": device(LONG, "c", refused={"b": 2}), "b": device(1.0, "c"), "c": device(1.0)}) is None


@pytest.mark.parametrize(("works", "gone"), [((3.0, 1.0), "b"), ((1.0, 3.0), "a"), ((1.0, 1.0), "b")])
def test_of_a_pair_that_does_not_hear_each_other_the_cheaper_one(works: tuple[float, float], gone: str) -> None:
    devices = {
        "a": device(LONG, "c", work=works[0], silent={"b": 4.0}),
        "b": device(LONG, "a", work=works[1], silent={"a": 4.5}),
        "c": device(LONG, "b"),
    }
    assert verdict(devices) == gone


def test_one_that_several_do_not_hear_goes_however_much_it_does() -> None:
    devices = {
        "a": device(LONG, "b", silent={"b": 4.0}), "b": device(LONG, "a", work=9.0),
        "c": device(LONG, "b", silent={"b": 4.0}),
    }  # fmt: skip
    assert verdict(devices) == "b"


def test_two_that_wait_for_each_others_connection() -> None:
    waiting = {"step": -1, "is_connecting": True}
    devices = {
        "a": device(VERY_LONG, "b", work=2.0, **waiting), "b": device(VERY_LONG, "a", **waiting),
        "c": device(LONG, step=-1),
    }  # fmt: skip
    assert verdict(devices) == "b"
    assert verdict({"a": device(VERY_LONG, "b", **waiting), "b": device(VERY_LONG, step=-1)}) is None


def test_the_end_of_a_chain_that_sends_nothing() -> None:
    """It says that it gets on, or that it is done; the others wait for it all the same."""
    chain = {"a": device(VERY_LONG, "b"), "b": device(VERY_LONG, "c")}
    assert verdict(chain | {"c": device(0.1)}) == "c"
    assert verdict(chain | {"c": Observed(None, 0.1)}) == "c"
    assert verdict(chain | {"c": device(VERY_LONG, COORDINATOR)}) == "c"
    assert verdict({"a": device(LONG, "b"), "b": device(LONG, "c"), "c": device(0.1)}) is None


def test_nobody_is_evicted_for_a_batch_that_was_not_sent() -> None:
    devices = {"a": device(VERY_LONG, COORDINATOR, step=6), "b": device(VERY_LONG, "a", step=6)}
    assert verdict(devices, steps_fed=6) is None
    assert verdict(devices, steps_fed=7) == "a"


def test_one_that_waits_for_a_batch_hides_no_other() -> None:
    """In a stream the first stage runs ahead, and waits for a batch while the last one stands still."""
    devices = {
        "a": device(VERY_LONG, COORDINATOR, step=6), "b": device(VERY_LONG, "c", step=4), "c": device(0.1, step=4)
    }  # fmt: skip
    assert verdict(devices, steps_fed=6) == "c"


def test_in_a_circle_whom_most_wait_for() -> None:
    devices = {"a": device(VERY_LONG, "b"), "b": device(VERY_LONG, "c"), "c": device(VERY_LONG, "b")}
    assert verdict(devices) == "b"


def test_a_failure_is_explained_by_direct_evidence_only() -> None:
    assert suspect({"a": device(0.1, "b"), "b": device(0.1)}) is None
    found = suspect({"a": device(0.1, "b", silent={"b": 9.0}), "b": device(0.1, "a", work=2.0)})
    assert found is not None
    assert found.device == "a"


def test_the_limit_follows_from_what_is_known() -> None:
    assert limit_seconds(None, None, None) is None
    assert limit_seconds(0.01, 9.0, 9.0) == stalls.LEAST_SECONDS
    assert limit_seconds(2.0, None, None) == 20.0
    assert limit_seconds(None, 2.0, 9.0) == 60.0
    assert limit_seconds(None, None, 2.0) == 200.0
    assert limit_seconds(2.0, None, None, timeout_factor=3.0) == 60.0


def test_the_work_of_each_device() -> None:
    from fault_cluster import captured

    network = captured().network
    shared = Plan("Sequential", 12, (Stage((0, LAYERS), ("a", "b"), BySamples((3, 1))),))
    assert work_of(shared, network) == pytest.approx({"a": 0.75, "b": 0.25})
    mixed = Plan("Sequential", 12, (Stage((0, 2), ("a", "b"), ByTiles((2, 1))), Stage((2, LAYERS), ("b",), Single())))
    found = work_of(mixed, network)
    assert sum(found.values()) == pytest.approx(1.0)
    assert set(found) == {"a", "b"}
