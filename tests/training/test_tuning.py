"""Which plans a trial tries, and which it takes: with seconds made up for each."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

import manyhands as mh
from hand_made import chain, cluster
from manyhands.facts.link import Link
from manyhands.facts.plan import Plan
from manyhands.training import tuning
from manyhands.training.tuning import fastest_in_trial, nearest

NETWORK = chain(6)
MACHINES = cluster(("a", "b", "c"), Link(1e8, 1e-4))


def plan_of(*cuts: int, micro_batches: int = 4, devices: Any = None) -> Plan:
    found: Plan = mh.pipeline_plan(
        NETWORK, MACHINES, cuts=list(cuts), devices=devices or list("abc")[: len(cuts) + 1],
        micro_batches=micro_batches, batch_size=16,
    )  # fmt: skip
    return found


def cuts_of(plan: Plan) -> tuple[Any, ...]:
    return tuple(stage.layers[0] for stage in plan.stages[1:])


def test_the_nearest_differ_in_one_cut_by_one_layer() -> None:
    best = plan_of(1, 4)
    near = nearest(best, [best, plan_of(1, 5)], NETWORK)
    assert [cuts_of(plan) for plan in near] == [(2, 4), (1, 3)], "no empty stage, and none that is known"
    assert {plan.micro_batches for plan in near} == {4}, "nobody asked for another count, so it may be wanted"


def test_half_and_twice_as_many_micro_batches_where_they_are_free() -> None:
    best = plan_of(3)
    near = nearest(best, [best, plan_of(3, micro_batches=2)], NETWORK)
    assert [(cuts_of(plan), plan.micro_batches) for plan in near] == [((2,), 4), ((4,), 4), ((3,), 8)]
    most = plan_of(3, micro_batches=16)
    assert max(plan.micro_batches for plan in nearest(most, [best, most], NETWORK)) == 16
    shared = plan_of(3, devices=[["a", "b"], "c"])
    assert {plan.micro_batches for plan in nearest(shared, [shared, most], NETWORK)} == {4}, "its shares would not fit"


def test_one_that_nobody_ranked_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {(3,): 1.0, (4,): 1.2, (2,): 0.8}
    asked: list[tuple[Any, ...]] = []

    def steps(coordinator: Any, graph: Any, plan: Plan, *_: Any) -> list[float]:
        asked.append(cuts_of(plan))
        return [seconds[cuts_of(plan)]] * 2

    monkeypatch.setattr(tuning, "_steps", steps)
    graph: Any = SimpleNamespace(network=NETWORK)
    nobody: Any = None
    found = fastest_in_trial(nobody, graph, [plan_of(4), plan_of(3)], nobody, {}, nobody, is_preloaded=False)
    assert [cuts_of(plan) for plan, _ in found] == [(2,), (3,), (4,)]
    assert asked == [(4,), (3,)] * tuning.FIRST.least + [(3,), (2,)] * tuning.FIRST.least, (
        "all take turns; none twice at once"
    )
    assert tuning.CLOSE * 0.8 < 1.0, "nobody is close to the best"
    alone = fastest_in_trial(nobody, graph, [plan_of(3)], nobody, {}, nobody, is_preloaded=False)
    assert [plan for plan, _ in alone] == [plan_of(3)], "who asks for one plan gets it"


def test_short_steps_have_more_turns_and_hopeless_plans_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    seconds = {3: 1.0, 4: 1.25, 5: 2.0, 1: None}

    def trial(unit: float) -> list[Any]:
        def steps(coordinator: Any, graph: Any, plan: Plan, *_: Any) -> list[float]:
            (cut,) = cuts_of(plan)
            asked.append(cut)
            known = seconds[cut]
            return [] if known is None else [known * unit] * 4

        asked.clear()
        monkeypatch.setattr(tuning, "_steps", steps)
        monkeypatch.setattr(tuning, "nearest", lambda *_: [])
        graph: Any = SimpleNamespace(network=NETWORK)
        nobody: Any = None
        plans = [plan_of(cut) for cut in (5, 4, 3, 1)]
        found = fastest_in_trial(nobody, graph, plans, nobody, {}, nobody, is_preloaded=False)
        return [cuts_of(plan)[0] for plan, _ in found]

    unit = tuning.FIRST.seconds / 4
    for turns, part in ((tuning.FIRST.least, 1.0), (4, 3.5), (tuning.FIRST.most, 1000.0)):
        assert trial(unit / part) == [3, 4, 5], "one that has no room is none"
        assert asked == [5, 4, 3, 1] + [4, 3] * (turns - 1)


def test_those_that_are_close_are_tried_longer_and_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    seconds = {2: 0.95, 3: 1.0, 4: 1.01, 5: 2.0}

    def steps(coordinator: Any, graph: Any, plan: Plan, *_: Any) -> list[float]:
        (cut,) = cuts_of(plan)
        asked.append(cut)
        is_lucky = asked.count(cut) <= tuning.FIRST.least
        return [seconds[cut] if cut != 2 or is_lucky else 1.2] * 2

    monkeypatch.setattr(tuning, "_steps", steps)
    graph: Any = SimpleNamespace(network=NETWORK)
    nobody: Any = None
    plans = [plan_of(3), plan_of(2), plan_of(5)]
    found = fastest_in_trial(nobody, graph, plans, nobody, {}, nobody, is_preloaded=False)
    turns = max(tuning.LAST.least, math.ceil(tuning.LAST.seconds / 2))
    assert asked[-3 * turns :] == [3, 2, 4] * turns, "as the simulation ranks them"
    assert [(cuts_of(plan), taken) for plan, taken in found] == [((3,), 1.0), ((4,), 1.01), ((2,), 1.2), ((5,), 2.0)]
