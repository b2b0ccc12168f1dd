"""Running ahead and catching up: whatever the link does, nothing is later than K, and every mini-batch is done once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_made import chain, cluster, even_profile
from manyhands.facts.link import Link
from manyhands.facts.plan import Plan, Replay, ReplayMode, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Action, Backward, Discard, Forward, Loss, Step
from manyhands.schedule.checker import check, check_matching, check_progress
from manyhands.schedule.memory import DeviceMemory
from manyhands.schedule.policy import Schedule
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import simulate

CHAIN = chain(4)
NAMES = ("edge", "server")


def split(count: int, k: int | None, mode: ReplayMode, ahead: int | None = None) -> Plan:
    stages = (Stage((0, 2), ("edge",)), Stage((2, 4), ("server",)))
    warm_up = "2(P-p)-1" if ahead is None else (ahead, 1)
    plan = Plan("chain", 2 * count, stages, count, "replay", warm_up, replay=Replay(k, mode))  # type: ignore[arg-type]
    return resolve(plan, CHAIN)


def run(plan: Plan, link: Link) -> Simulation:
    return simulate(plan, CHAIN, cluster(NAMES, link), even_profile(CHAIN, NAMES))


def staleness(log: list[Action]) -> dict[int, int]:
    """Updates between the forward pass of each mini-batch and its own; -1: discarded."""
    updates, since, found = 0, dict[int, int](), dict[int, int]()
    for action in log:
        if isinstance(action, Forward) and action.part != "again":
            since[action.micro_batch] = updates
        elif isinstance(action, Step):
            found[action.micro_batch] = updates - since[action.micro_batch]
            updates += 1
        elif isinstance(action, Discard):
            found[action.micro_batch] = -1
    return found


modes: st.SearchStrategy[ReplayMode] = st.sampled_from(("grouped", "window"))
links = st.builds(Link, st.sampled_from((1e3, 1e5, 1e6, 1e8, 1e12)), st.sampled_from((0.0, 1e-3, 1.0)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 14), st.one_of(st.none(), st.integers(0, 6)), modes, links, st.none() | st.integers(1, 9))
def test_every_run_ends_within_its_bound(
    count: int, k: int | None, mode: ReplayMode, link: Link, ahead: int | None
) -> None:
    plan = split(count, k, mode, ahead if ahead is None else min(ahead, count))
    found = run(plan, link)
    schedule = Schedule(plan, CHAIN)
    check_matching(found.log)
    check_progress(found.log)
    edge, server = found.log["edge"], found.log["server"]
    late = staleness(edge)
    assert list(late) == list(range(count)), "one after another, each once"
    if k is not None:
        assert max(late.values()) <= k
    if ahead is None or (k is not None and ahead <= k + 1):
        assert min(late.values()) >= 0, "nothing is discarded"
    forwards = [a.micro_batch for a in edge if isinstance(a, Forward) and a.part != "again"]
    assert forwards == list(range(count))
    replayed = [a.micro_batch for a in edge if isinstance(a, Forward) and a.part == "again"]
    ahead_of = {a.micro_batch for a in edge if isinstance(a, Forward) and a.part == "ahead"}
    assert set(replayed) == {number for number in ahead_of if late[number] >= 0}
    assert all(late[number] == 0 for number in range(count) if number not in ahead_of), "kept, so it must be fresh"
    assert [type(a) for a in server if isinstance(a, (Forward, Loss, Backward, Step))] == (
        [Forward, Loss, Backward, Step] * count
    )
    for device, log in found.log.items():
        memory = DeviceMemory(plan, CHAIN, schedule.lowering.work[device].geometries, device)
        for action in log:
            memory.act(action)
        assert memory.held_bytes == pytest.approx(0.0, abs=1e-6)
        assert memory.micro_batches_held == 0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 5), links)
def test_a_group_waits_for_all_of_the_last(count: int, k: int, link: Link) -> None:
    done = 0
    for action in run(split(count, k, "grouped"), link).log["edge"]:
        if isinstance(action, Forward) and action.part != "again":
            assert done >= action.micro_batch // (k + 1) * (k + 1)
        elif isinstance(action, Step):
            done += 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 5), links)
def test_a_window_is_never_wider_than_its_bound(count: int, k: int, link: Link) -> None:
    under_way = 0
    for action in run(split(count, k, "window"), link).log["edge"]:
        if isinstance(action, Forward) and action.part != "again":
            under_way += 1
            assert under_way <= k + 1
        elif isinstance(action, Step):
            under_way -= 1


def test_running_ahead_pays_where_the_link_is_slow() -> None:
    """T1 = T3 = 2, T2 = T4 = 1 (Eq. 9): nothing is idle any more but at the ends."""
    link = Link(1e6, 0.2)
    seconds = {k: run(split(8, k, "window"), link).seconds for k in (0, 1, 7)}
    assert seconds[0] > 1.2 * seconds[1] > 1.2 * seconds[7]


def test_what_is_ahead_takes_only_what_came_in() -> None:
    slow = Link(1e4, 0.0)
    peaks = {k: run(split(6, k, "window"), slow).devices["edge"].peak_bytes for k in (0, 5)}
    whole = check(Schedule(resolve(Plan("chain", 12, split(6, 5, "window").stages, 6, "gpipe"), CHAIN), CHAIN))
    assert peaks[0] < peaks[5] < whole.peak_bytes["edge"]
