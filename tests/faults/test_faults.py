"""Whatever happens to a worker, at whichever action: the run ends with the weights of one that nothing happened to.

Whole clusters in this process, in float64; the quick tests have every place of every plan once, the slow ones all
places of all devices, killed and silent.
"""

from __future__ import annotations

import threading
from itertools import permutations
from typing import Any

import pytest

from fault_cluster import (
    BACKUP_EVERY,
    PLANS,
    STEPS,
    Fault,
    FaultCluster,
    Trip,
    all_alike,
    places_of,
    reference,
)
from groups import slow_if
from manyhands.facts.errors import WorkerLost
from manyhands.facts.plan import Plan
from manyhands.runtime.control_messages import Held
from manyhands.runtime.keeping import Keeping
from manyhands.runtime.retry_policy import RetryPolicy
from real_runs import ADAM, BATCH

pytestmark = pytest.mark.xdist_group("faults")  # captured once, and what it is compared with is computed once

NAMES = ("a", "b", "c")
KINDS = ("killed", "silent")
FAULT_STEP = 5
BACKUPS = ("keep", "send copy", "hold copy")
LESS = ("loss", "send")
"""Places between others: with the slow tests."""
RECOVERING = ("survey", "prepare", "give", "load")
GIVERS = {
    "samples": (),
    "pipeline": tuple(permutations(NAMES, 2)),
    "hybrid": (("a", "b"), ("a", "c"), ("b", "a"), ("c", "a")),
    "tiles+single": (("a", "b"), ("a", "c"), ("b", "a"), ("c", "a")),
    "tiles": (("a", "c"), ("c", "a")),
}
"""The first is lost, and the second has something to give then, if everybody is to have everything."""
SIZES = {name: plan.micro_batches for name, plan in PLANS.items()}


def travelled(plan: str, *faults: Fault, names: tuple[str, ...] = NAMES, **options: Any) -> Trip:
    with FaultCluster(names, *faults) as cluster:
        return cluster.travel(PLANS[plan], **options)


def single_faults() -> list[Any]:
    found = []
    for number, (name, plan) in enumerate(PLANS.items()):
        seen: set[str] = set()
        for turn in range(len(NAMES)):
            device = NAMES[(number + turn) % len(NAMES)]
            for place in places_of(plan, device):
                for kind in KINDS:
                    is_quick = place not in (*seen, *LESS) and kind == KINDS[(number + len(seen)) % 2]
                    marks = slow_if(not is_quick)
                    found.append(
                        pytest.param(name, device, place, kind, marks=marks, id=f"{name}-{device}-{place}-{kind}")
                    )
                seen.add(place)
    return found


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(("plan", "device", "place", "kind"), single_faults())
def test_one_is_lost(plan: str, device: str, place: str, kind: str) -> None:
    step = 4 if place in BACKUPS else FAULT_STEP
    trip = travelled(plan, Fault(device, place, kind, step=step))
    trip.check(reference(SIZES[plan]), generations=2)
    (recovery,) = trip.outcome.recoveries
    assert recovery["devices"] == list(trip.plans[-1].devices)
    assert device not in recovery["devices"]
    assert recovery["step"] in (step - 1, step - 2, step - 3, step)
    assert recovery["replayed"] == trip.outcome.replayed_steps <= 2 * BACKUP_EVERY
    (lost,) = trip.facts("lost")
    assert lost["devices"] == [device]
    assert f"Worker {device} was lost" in lost["reason"]
    assert "rewound" not in trip.events


def recovery_faults() -> list[Any]:
    found = []
    for number, plan in enumerate(PLANS):
        for place in RECOVERING:
            pairs = GIVERS[plan] if place == "give" else tuple(permutations(NAMES, 2))
            for turn, (first, second) in enumerate(pairs):
                for kind in KINDS:
                    is_quick = turn == number % len(pairs) and kind == KINDS[(number + len(place)) % 2]
                    text = f"{plan}-{first}-{second}-{place}-{kind}"
                    found.append(pytest.param(plan, first, second, place, kind, marks=slow_if(not is_quick), id=text))
    return found


@pytest.mark.quick(every=16)
@pytest.mark.parametrize(("plan", "first", "second", "place", "kind"), recovery_faults())
def test_another_is_lost_while_the_job_recovers(plan: str, first: str, second: str, place: str, kind: str) -> None:
    """Where the second takes the last copy of something with it, all goes on from the start, and that is told."""
    one = Fault(first, "backward", step=FAULT_STEP)
    trip = travelled(plan, one, Fault(second, place, kind, after=one), rewrite=all_alike)
    trip.check(reference(SIZES[plan]), generations=2 if place == "survey" else 3)
    (left,) = set(NAMES) - {first, second}
    assert trip.outcome.plan is not None
    assert trip.outcome.plan.devices == (left,)
    rewound, steps = trip.facts("rewound"), {facts["step"] for facts in trip.outcome.recoveries}
    assert steps <= {0, *range(FAULT_STEP - 3, FAULT_STEP + 1)}  # the last copy may have been under way: the one before
    assert (0 in steps) == bool(rewound)
    if plan == "samples":
        assert not rewound


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    ("plan", "device", "place", "kind"),
    [
        ("samples", "c", "keep", "killed"),
        ("samples", "a", "send copy", "silent"),
        ("pipeline", "b", "keep", "silent"),
        ("pipeline", "c", "send copy", "killed"),
        ("tiles", "a", "send copy", "killed"),
    ],
)
def test_one_is_lost_after_the_last_step(plan: str, device: str, place: str, kind: str) -> None:
    """Before, while or after the end's state is saved."""
    trip = travelled(plan, Fault(device, place, kind, step=STEPS))
    trip.check(reference(SIZES[plan]), generations=2)
    assert trip.saved == [STEPS]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("first_steps", [FAULT_STEP - 1, FAULT_STEP])
def test_copies_of_an_earlier_job_are_not_taken_for_this_ones(first_steps: int) -> None:
    """Every device has all weights of the first job, after as many steps as the second goes back to."""
    fault = Fault("c", "backward", step=FAULT_STEP)
    with FaultCluster(NAMES, fault) as cluster:
        cluster.travel(PLANS["samples"], steps=first_steps)
        assert not fault.fired
        trip = cluster.travel(PLANS["pipeline"])
        trip.check(reference(SIZES["pipeline"]), generations=2)
        assert trip.outcome.recoveries[0]["step"] in (FAULT_STEP - 1, FAULT_STEP)


# Several


@pytest.mark.slow
def test_one_after_another_until_one_is_left() -> None:
    one = Fault("b", "forward", step=2)
    trip = travelled("samples", one, Fault("c", "all-reduce", step=5, after=one))
    trip.check(reference(1), generations=3)
    assert [facts["devices"] for facts in trip.facts("lost")] == [["b"], ["c"]]
    assert [facts["devices"] for facts in trip.outcome.recoveries] == [["a", "c"], ["a"]]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("plan", ["pipeline", "tiles+single"])
def test_the_same_one_is_lost_twice(plan: str) -> None:
    """Started again it joins again, under its name; nothing of its first life counts."""
    one = Fault("b", "backward", step=2)
    two = Fault("b", "backward", "silent", step=6, after=one)
    with FaultCluster(NAMES, one, two) as cluster:
        trip = cluster.travel(PLANS[plan], at_event={"recovered": lambda: cluster.start("b")})
    trip.check(reference(SIZES[plan]), generations=4)
    assert trip.events.count("joined") == 1
    assert trip.outcome.recoveries[1]["replayed"] == 0
    assert [facts["devices"] for facts in trip.facts("lost")] == [["b"], ["b"]]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("plan", "pair"), [("samples", "ac"), ("hybrid", "bc"), ("tiles+single", "bc"), ("tiles", "bc")]
)
def test_two_at_once_whose_state_others_have(plan: str, pair: str) -> None:
    first, second = pair
    trip = travelled(plan, Fault(first, "backward", step=FAULT_STEP, also=(second,)))
    trip.check(reference(SIZES[plan]))
    assert "rewound" not in trip.events
    # From the copies of step 4 or, where a busy machine has these on their way still, those before: never from nothing.
    assert trip.outcome.recoveries[-1]["step"] >= 2


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(("plan", "pair"), [("pipeline", "ab"), ("pipeline", "bc"), ("hybrid", "ac"), ("tiles", "ac")])
@pytest.mark.parametrize("saved", [0, 3])
def test_two_at_once_who_had_something_alone(plan: str, pair: str, saved: int) -> None:
    """A device and the one that holds its copies: back to what was saved last, and that is told."""
    first, second = pair
    with FaultCluster(NAMES, Fault(first, "backward", step=7, also=(second,))) as cluster:
        trip = cluster.travel(
            PLANS[plan], snapshots=(saved,) if saved else (),
            at_step={4: lambda: cluster.until_saved(saved) if saved else None},
        )  # fmt: skip
    trip.check(reference(SIZES[plan]))
    (rewound,) = trip.facts("rewound")
    assert rewound["step"] == saved
    assert "alone and are gone" in rewound["reason"]
    assert trip.outcome.recoveries[-1]["step"] == saved
    assert trip.saved == ([saved, STEPS] if saved else [STEPS])


@pytest.mark.slow
def test_everybody_is_lost_and_others_come() -> None:
    with FaultCluster(NAMES, Fault("a", "forward", step=7, also=("b", "c"))) as cluster:

        def restart() -> None:
            for name in ("b", "d"):
                cluster.start(name)

        trip = cluster.travel(
            PLANS["pipeline"], snapshots=(3,), retry_policy=RetryPolicy("light", min_devices=2, wait_seconds=20.0),
            at_step={4: lambda: cluster.until_saved(3)}, at_event={"waiting": restart},
        )  # fmt: skip
    trip.check(reference(2), generations=2)
    (rewound,) = trip.facts("rewound")
    assert rewound["step"] == 3
    assert trip.outcome.plan is not None
    assert set(trip.outcome.plan.devices) == {"b", "d"}


def test_nobody_is_left_and_nobody_comes() -> None:
    with FaultCluster(NAMES, Fault("a", "forward", step=FAULT_STEP, also=("b", "c"))) as cluster:
        with pytest.raises(WorkerLost, match=r"Worker \w was lost"):
            cluster.travel(PLANS["pipeline"])
        assert cluster.strange == []


def test_it_gives_up_where_nothing_is_ever_done() -> None:
    """A worker that dies whenever it starts, and comes back each time."""
    faults = [Fault("b", "forward", step=2)]
    for _ in range(8):
        faults.append(Fault("b", "load", after=faults[-1]))
    with FaultCluster(("a", "b"), *faults) as cluster:
        plan = all_alike(PLANS["samples"], ("a", "b"))
        with pytest.raises(WorkerLost, match="Worker b was lost at step"):
            cluster.travel(
                plan, rewrite=all_alike, retry_policy=RetryPolicy("light", attempts=3),
                on_event=lambda event: cluster.start("b") if event == "lost" else None,
            )  # fmt: skip
        assert cluster.trip is not None
        assert cluster.trip.events.count("lost") == 3
        assert [len(fault.fired) for fault in faults] == [1, 1, 1, 1, 0, 0, 0, 0, 0]
        assert cluster.strange == []


@pytest.mark.slow
def test_adam_goes_on_as_if_nothing_had_happened() -> None:
    one = Fault("a", "step", step=3)
    trip = travelled("hybrid", one, Fault("c", "backward", "silent", step=6, after=one), optimizer=ADAM)
    trip.check(reference(2, optimizer="Adam"), generations=3)
    assert any(name.endswith("exp_avg_sq") for name in trip.outcome.state.optimizer)  # type: ignore[union-attr]


@pytest.mark.slow
def test_copies_that_come_after_the_last_round_that_was_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No further round is fed before copies are known to have come: a worker without a round must notice them too."""
    collect, between = Keeping.collect, []

    def late(self: Keeping) -> list[Held]:
        if threading.current_thread().name != "control":  # as if they came when the rounds were over
            between.append(self)
            return []
        return collect(self)

    monkeypatch.setattr(Keeping, "collect", late)
    travelled("pipeline", backup_every=1).check(reference(SIZES["pipeline"]), generations=1)
    assert len(between) >= STEPS


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("backup_every", [0, 1, 3, 100])
def test_however_often_copies_are_made(backup_every: int) -> None:
    trip = travelled("pipeline", Fault("b", "backward", step=FAULT_STEP), backup_every=backup_every)
    trip.check(reference(2), generations=2)
    (recovery,) = trip.outcome.recoveries
    assert recovery["step"] in {0: (0,), 1: (3, 4, 5), 3: (3,), 100: (0,)}[backup_every]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("plan", ["samples", "pipeline"])
def test_one_comes_back_with_nothing_while_a_plan_is_made(plan: str) -> None:
    """It was asked what it has, it was lost, and another of its name is here when it is to give that."""
    with FaultCluster(NAMES, Fault("b", "backward", step=FAULT_STEP)) as cluster:
        changes: list[str] = []

        def again(old: Plan, names: tuple[str, ...]) -> Plan:
            if not changes:
                before = cluster.coordinator.members["c"]
                cluster.transport.cut("c")
                cluster.until(lambda: before.is_lost)
                cluster.start("c")
            changes.append(" ".join(names))
            return all_alike(old, names)

        trip = cluster.travel(PLANS[plan], rewrite=again)
    trip.check(reference(SIZES[plan]))
    assert changes == ["a c"] * (trip.outcome.generations - 1)
    assert ("rewound" in trip.events) == (plan == "pipeline")


def test_everybody_is_lost_while_a_plan_is_made() -> None:
    with FaultCluster(NAMES, Fault("b", "backward", step=FAULT_STEP)) as cluster:

        def lose(old: Plan, names: tuple[str, ...]) -> Plan:
            for name in names:
                cluster.transport.cut(name)
            cluster.until(lambda: not cluster.coordinator.alive())
            raise WorkerLost("Nobody is left to ask.")

        with pytest.raises(WorkerLost, match="Nobody is left to ask"):
            cluster.travel(PLANS["pipeline"], rewrite=lose)


# Old generations


@pytest.mark.quick("hybrid")
@pytest.mark.parametrize("plan", list(PLANS))
def test_one_taken_for_dead_speaks_again(plan: str) -> None:
    """All that it sent meanwhile comes when the others are at work again: none of it is taken for something else."""
    with FaultCluster(NAMES, Fault("b", "forward", "silent", step=3)) as cluster:
        trip = cluster.travel(PLANS[plan], at_event={"recovered": lambda: cluster.thaw("b")})
        cluster.until(lambda: any(name == "b" for name, _ in cluster.ended))
    trip.check(reference(SIZES[plan]), generations=2)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("plan", "to"), [("samples", "b"), ("pipeline", "b"), ("tiles+single", "c"), ("tiles", "c")])
def test_a_link_breaks_between_two_who_live(plan: str, to: str) -> None:
    trip = travelled(plan, Fault("a", "forward", "unlinked", step=FAULT_STEP, to=to))
    trip.check(reference(SIZES[plan]), generations=2)
    assert trip.facts("lost")[0]["devices"] == []
    assert set(trip.outcome.recoveries[0]["devices"]) == set(NAMES)


# Coming and going


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("plan", list(PLANS))
def test_one_joins(plan: str) -> None:
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(
            PLANS[plan], at_step={3: lambda: cluster.start("d")},
            rewrite=all_alike if plan == "samples" else None,
        )  # fmt: skip
    trip.check(reference(SIZES[plan]), generations=2)
    assert trip.facts("joined") == [{"device": "d"}]
    assert trip.outcome.replayed_steps == 0
    (recovery,) = trip.outcome.recoveries
    assert recovery["replayed"] == 0
    if plan == "samples":
        assert recovery["devices"] == [*NAMES, "d"]
        assert recovery["bytes_moved"] > 0


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["a", "d"])
def test_somebody_is_lost_while_one_joins(device: str, kind: str) -> None:
    """Who gives, or who is given."""
    fault = Fault(device, "give" if device == "a" else "load", kind)
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"], at_step={3: lambda: cluster.start("d")}, rewrite=all_alike)
    trip.check(reference(1), generations=3)
    assert set(trip.outcome.recoveries[-1]["devices"]) == {*NAMES, "d"} - {device}


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    ("plan", "device"),
    [
        pytest.param(plan, device, marks=slow_if(place != number % len(NAMES)))
        for number, plan in enumerate(PLANS)
        for place, device in enumerate(NAMES)
    ],
)
def test_one_leaves_and_hands_over(plan: str, device: str) -> None:
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(PLANS[plan], at_step={3: lambda: cluster.ask_to_leave(device)})
        assert (device, None) in cluster.ended, "it went in peace"
    trip.check(reference(SIZES[plan]), generations=2)
    assert trip.outcome.replayed_steps == 0
    (recovery,) = trip.outcome.recoveries
    assert recovery["replayed"] == 0
    assert device not in recovery["devices"]
    events = [name for name, facts in trip.logged if facts.get("device") == device]
    assert events == ["leaving", "left"]
    assert "lost" not in trip.events
    assert cluster.reports == []


def test_one_that_leaves_is_lost_while_it_gives() -> None:
    with FaultCluster(NAMES, Fault("b", "give")) as cluster:
        trip = cluster.travel(PLANS["pipeline"], at_step={3: lambda: cluster.ask_to_leave("b")}, rewrite=all_alike)
    trip.check(reference(2), generations=3)
    assert "rewound" not in trip.events
    assert "left" not in trip.events


def test_one_is_asked_to_leave_while_the_job_recovers() -> None:
    """Between two generations it computes nothing, and has what nobody else has."""
    with FaultCluster(NAMES, Fault("b", "backward", step=FAULT_STEP)) as cluster:

        def ask() -> None:
            cluster.until(lambda: cluster.workers["c"].prepared is None)
            cluster.ask_to_leave("c")

        trip = cluster.travel(PLANS["pipeline"], at_event={"lost": ask})
        assert ("c", None) in cluster.ended
    trip.check(reference(2), generations=2)
    assert "rewound" not in trip.events
    assert trip.facts("left") == [{"device": "c"}]
    assert trip.outcome.recoveries[0]["devices"] == ["a"]


def test_one_that_the_plan_does_not_need_goes_at_once() -> None:
    with FaultCluster(NAMES, Fault("b", "backward", step=2)) as cluster:
        trip = cluster.travel(
            PLANS["samples"],
            rewrite=lambda old, names: all_alike(old, ("a",)),
            at_step={
                5: lambda: cluster.ask_to_leave("c"),
                6: lambda: cluster.until(lambda: ("c", None) in cluster.ended),
            },
        )
    trip.check(reference(1), generations=2)
    assert trip.facts("left") == [{"device": "c"}]


@pytest.mark.slow
def test_two_leave_and_two_join_at_once() -> None:
    with FaultCluster(NAMES) as cluster:

        def change() -> None:
            for name in ("d", "e"):
                cluster.start(name)
            for name in ("a", "b"):
                cluster.ask_to_leave(name)

        trip = cluster.travel(PLANS["hybrid"], at_step={3: change}, rewrite=all_alike)
    trip.check(reference(2), generations=2)
    assert set(trip.outcome.recoveries[0]["devices"]) == {"c", "d", "e"}
    assert trip.outcome.replayed_steps == 0


@pytest.mark.slow
def test_nobody_goes_who_is_needed() -> None:
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(
            PLANS["samples"],
            retry_policy=RetryPolicy("light", min_devices=3),
            at_step={2: lambda: cluster.ask_to_leave("b")},
        )
    trip.check(reference(1), generations=1)
    (note,) = trip.facts("note")
    assert note["text"].startswith("b wants to leave; 2 device(s) would be left, at least 3 needed: it goes when")


@pytest.mark.slow
def test_one_goes_as_soon_as_another_comes() -> None:
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(
            PLANS["samples"], retry_policy=RetryPolicy("light", min_devices=3), rewrite=all_alike,
            at_step={2: lambda: cluster.ask_to_leave("b"), 4: lambda: cluster.start("d")},
        )  # fmt: skip
    trip.check(reference(1), generations=2)
    assert set(trip.outcome.recoveries[0]["devices"]) == {"a", "c", "d"}
    assert trip.outcome.replayed_steps == 0


@pytest.mark.slow
def test_one_that_does_not_wait_until_it_may_go() -> None:
    """As by a second Ctrl-C: it has left, the others go on as after a loss."""
    with FaultCluster(NAMES) as cluster:

        def leave() -> None:
            cluster.ask_to_leave("b")
            cluster.transport.cut("b")

        member = cluster.coordinator.members["b"]
        trip = cluster.travel(PLANS["samples"], at_step={3: leave}, rewrite=all_alike)
    trip.check(reference(1), generations=2)
    assert member.has_left
    (lost,) = trip.facts("lost")
    assert lost["devices"] == ["b"]
    assert lost["reason"].endswith("it left by itself.")
    assert set(trip.outcome.recoveries[0]["devices"]) == {"a", "c"}


@pytest.mark.slow
def test_it_waits_for_enough() -> None:
    with FaultCluster(NAMES, Fault("b", "backward", step=FAULT_STEP)) as cluster:
        trip = cluster.travel(
            PLANS["samples"], retry_policy=RetryPolicy("light", min_devices=3, wait_seconds=20.0),
            at_event={"waiting": lambda: cluster.start("b")}, rewrite=all_alike,
        )  # fmt: skip
    trip.check(reference(1), generations=2)
    assert trip.facts("waiting") == [{"workers": 2, "least": 3, "seconds": 20.0}]
    assert set(trip.outcome.recoveries[0]["devices"]) == set(NAMES)


def test_it_does_not_wait_for_ever() -> None:
    with (
        FaultCluster(NAMES, Fault("b", "backward", step=FAULT_STEP)) as cluster,
        pytest.raises(WorkerLost, match="Worker b was lost at step") as raised,
    ):
        cluster.travel(PLANS["samples"], retry_policy=RetryPolicy("light", min_devices=3, wait_seconds=0.2))
    assert raised.value.message.endswith("2 device(s) left, at least 3 needed, and no more have joined within 0.2 s.")
    assert "On each device: manyhands worker --join" in raised.value.hint


def test_no_more_than_so_many_compute() -> None:
    """Of four that are here two compute; when one of them is lost another takes its place."""
    plan = all_alike(PLANS["samples"], ("a", "b"))
    with FaultCluster((*NAMES, "d"), Fault("b", "backward", step=FAULT_STEP)) as cluster:
        trip = cluster.travel(plan, retry_policy=RetryPolicy("light", max_devices=2), rewrite=all_alike)
    trip.check(reference(1), generations=2)
    assert trip.outcome.recoveries[0]["devices"] == ["a", "c"]


def test_one_more_than_enough_changes_nothing() -> None:
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(
            PLANS["samples"], retry_policy=RetryPolicy("light", max_devices=3), at_step={3: lambda: cluster.start("d")}
        )
    trip.check(reference(1), generations=1)
    assert trip.outcome.plan is not None
    assert trip.outcome.plan.batch_size == BATCH
