"""A split's pilot by a clock of its own: when it changes what, and which plan that is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, OutOfMemory, TimedOut, UnknownName, WorkerLost
from manyhands.facts.profile import DeviceProfile, Profile
from manyhands.planner.rates import EngineSettings, Meter
from manyhands.planner.split import WIDTHS, Bound, Cut, Deployment, LinkRates, SplitProfile
from manyhands.runtime.control_parts import Arrival
from manyhands.split.controller import FIRST_TAU, Course, LinkWatch, SplitChoice, SplitController
from manyhands.split.plans import (
    ROUND_SECONDS,
    Ends,
    bits_of,
    phases_of,
    phases_text,
)
from manyhands.split.session import Looked

LAYERS = 4
MEGABYTE = 1e6
BOTH = ("edge", "server")


def ends(**facts: object) -> Ends:
    return Ends("net", LAYERS, 8, **facts)  # type: ignore[arg-type]


def profile(**facts: object) -> SplitProfile:
    """An edge twenty times slower than its server; features shrink with depth."""
    cuts = [
        Cut(
            layer=layer, upstream_forward_seconds=0.2 * layer, upstream_backward_seconds=0.4 * layer,
            downstream_forward_seconds=0.01 * (LAYERS - layer), downstream_backward_seconds=0.02 * (LAYERS - layer),
            feature_bytes=0.0 if layer == LAYERS else 4e6 / 4**layer,
            returned_bytes=0.0 if layer == LAYERS else 4e6 / 4**layer, edge_bytes=1e6 * layer, history_bytes=1e5,
            least_bits=8,
        )
        for layer in range(1, LAYERS + 1)
    ]  # fmt: skip
    given: dict[str, object] = {
        "network": "net", "fingerprint": "f", "batch_size": 8, "cuts": tuple(cuts), "layer_bytes": (1e4,) * LAYERS,
        "redeploy_seconds": 0.1,
    }  # fmt: skip
    return SplitProfile(**{**given, **facts})  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Link:
    """What a probe finds."""

    def __init__(self) -> None:
        self.rate: float | None = 10 * MEGABYTE
        self.asked: list[tuple[int, int]] = []

    def __call__(self, up: int, down: int) -> tuple[Looked, Looked]:
        self.asked.append((up, down))
        if self.rate is None:
            raise TimedOut("nothing came")
        return Looked(up, up / self.rate), Looked(down, down / self.rate)


def pilot(
    rate: float = 10 * MEGABYTE, wanted: SplitChoice | None = None, k: int | str | None = 5, *, epoch: int = 10,
    split: SplitProfile | None = None, first_step: int = 0, last_step: int | None = None,
    meters: tuple[Meter, Meter] | None = None, backup_every: int | None = 0, **engine: Any,
) -> tuple[SplitController, Clock, Link]:  # fmt: skip
    clock, link = Clock(), Link()
    kernels = Profile({name: DeviceProfile("net", "f", "8", "blocks", name, "measured", ()) for name in BOTH})
    made = SplitController(
        ends(), split or profile(), LinkRates(rate, rate), wanted or SplitChoice(),
        Course(phases_of(k), epoch, first_step, last_step), kernels, Cluster.local(2), backup_every=backup_every,
        watch=LinkWatch(link, clock, meters, EngineSettings(**{"tau": FIRST_TAU, **engine})),
    )  # fmt: skip
    return made, clock, link


def passes(found: SplitController, clock: Clock, rate: float, seconds: float, steps: int = 50) -> bool:
    """A job goes on for a while over a link of this rate; whether the pilot wants a change by then."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.5
        one = round(rate * 0.25)
        found.arrived("server", [Arrival("edge", one, 0.25, 0.0)])
        found.arrived("edge", [Arrival("server", one, 0.25, 0.0), Arrival("somebody", 10**9, 0.001, 0.0)])
        if found.should_change(steps):
            return True
    return False


# ---- As typed


def test_k_as_typed() -> None:
    assert phases_of(5) == phases_of("5") == phases_of("auto") == ((0, 5),)
    assert phases_of("4@0,5@8") == ((0, 4), (8, 5))
    assert phases_of(None) == phases_of("none") == ((0, None),)


@pytest.mark.parametrize("wrong", [-1, True, 2.5, "x", "4@3", "5@0,4@0", "", "4@0;5@8", "-1"])
def test_wrong_ks(wrong: object) -> None:
    with pytest.raises(BadValue):
        phases_of(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
@given(st.lists(st.none() | st.integers(0, 99), min_size=1, max_size=5))
def test_phases_are_told_as_they_are_typed(ks: list[Bound]) -> None:
    phases = tuple((3 * place, k) for place, k in enumerate(ks))
    assert phases_of(phases_text(phases)) == phases


def test_bits_as_typed() -> None:
    assert bits_of("auto") == WIDTHS
    assert bits_of("8") == bits_of(8) == (8,)
    for wrong in ("7", 3, "eight", True):
        with pytest.raises(BadValue):
            bits_of(wrong)


def test_a_rival_decides_where_to_cut() -> None:
    with pytest.raises(UnknownName):
        SplitChoice(rival="ours")
    with pytest.raises(BadValue, match="cut"):
        SplitChoice(cut=2, rival="jointdnn")


# ---- Plans


@given(st.none() | st.integers(0, 12), st.sampled_from(["grouped", "window"]), st.floats(0.0, 1000.0))
def test_rounds_are_whole_groups_and_not_too_long(k: Bound, mode: str, seconds: float) -> None:
    found, group = ends(mode=mode), 1 if k is None else k + 1
    count = found.round_batches(k, seconds)
    assert count % group == 0
    assert group <= count < found.round_batches(k) + group
    if count > group:
        assert (count - group) * seconds < ROUND_SECONDS


@given(st.integers(1, LAYERS - 1), st.none() | st.integers(0, 9), st.sampled_from(WIDTHS), st.booleans())
def test_a_deployment_is_a_plan_and_back(cut: int, k: Bound, bits: int, is_upstream: bool) -> None:
    found = ends(edge_side="upstream" if is_upstream else "downstream")
    plan = found.plan(Deployment(cut, k, bits))
    assert found.deployment(plan) == Deployment(cut, k, bits)
    assert plan.order == "replay"
    assert plan.step_size == 8
    assert [stage.devices[0] for stage in plan.stages] == list(BOTH if is_upstream else BOTH[::-1])
    assert plan.stages[0].codec.bits == 32
    alone = found.plan(Deployment(found.alone))
    assert alone.devices == ("edge",)
    assert found.deployment(alone) == Deployment(found.alone)


# ---- While a job runs


def test_k_changes_with_the_epoch() -> None:
    found, _, _ = pilot(wanted=SplitChoice(2, (8,)), k="4@0,1@3,6@5", epoch=10)
    assert found.deployment == Deployment(2, 4, 8)
    assert [found.stop_at(step) for step in (0, 29, 30, 49, 50)] == [30, 30, 50, 50, None]
    found.stepped(29)
    change = found(found.plan, BOTH, "auto")
    assert change.plan.replay.k == 1
    assert change.how == "redeployed"
    assert found.changed({"step": 30, "seconds": 0.1, "bytes_moved": 0}) is not None
    assert found.changes[0].reason == "phase"
    assert found.cuts == [(0, 2)]
    found.stepped(49)
    assert found(change.plan, BOTH, "auto").plan.replay.k == 6


def test_a_smaller_k_is_obeyed_where_the_cut_is_free() -> None:
    found, _, _ = pilot(k="5@0,2@1", epoch=10)
    assert found.deployment.k is not None
    assert found.deployment.k > 2
    found.stepped(9)
    change = found(found.plan, BOTH, "auto")
    assert change.plan.replay.k is not None
    assert change.plan.replay.k <= 2


def test_what_was_fixed_does_not_follow_the_link() -> None:
    for wanted in (SplitChoice(2, (8,)), SplitChoice(rival="jointdnn"), SplitChoice(rival="edge-only")):
        found, clock, link = pilot(wanted=wanted)
        first = found.deployment
        assert not passes(found, clock, 0.01 * MEGABYTE, 120.0)
        assert found.deployment == first
        assert link.asked == []


def test_a_link_that_gets_worse_for_good_moves_the_cut() -> None:
    found, clock, _ = pilot(100 * MEGABYTE)
    first = found.deployment
    assert not passes(found, clock, 100 * MEGABYTE, 30.0)
    assert passes(found, clock, 0.5 * MEGABYTE, 90.0)
    assert found.should_change(51), "until it is asked for a plan"
    change = found(found.plan, BOTH, "auto")
    assert found.deployment.cut > first.cut
    found.began(change.plan, 60)
    told = found.changed({"step": 52, "seconds": 0.4, "bytes_moved": 10_000})
    assert told is not None
    assert (told.reason, told.before, told.after) == ("rates", first, found.deployment)
    assert found.cuts == [(0, first.cut), (52, found.deployment.cut)]
    assert found.moved_bytes() == (0, 10_000), "layers come to the edge"
    assert found.engine.profile.redeploy_seconds > 0.1, "as it was seen"
    assert not found.should_change(60)


def test_a_dip_changes_nothing() -> None:
    found, clock, _ = pilot(100 * MEGABYTE)
    assert not passes(found, clock, 100 * MEGABYTE, 60.0)
    assert not passes(found, clock, 0.5 * MEGABYTE, 3.0)
    assert not passes(found, clock, 100 * MEGABYTE, 60.0)


def test_a_lost_server_leaves_the_edge_alone_and_returns() -> None:
    found, clock, link = pilot(10 * MEGABYTE)
    first = found.deployment
    alone = found(found.plan, ("edge",), "auto")
    assert alone.plan.devices == ("edge",)
    assert alone.plan.micro_batches == ends().round_batches(0, 2.4)
    assert alone.backup_every == 0
    found.changed({"step": 5, "seconds": 0.2, "bytes_moved": 30_000})
    assert found.moved_bytes() == (0, 0), "they come from the edge's own checkpoint"
    clock.now += 60
    assert not found.should_change(9)
    assert link.asked == []
    back = found(alone.plan, BOTH, "auto")
    assert link.asked, "nothing is known of the link any more"
    assert back.plan.devices == BOTH
    found.changed({"step": 9, "seconds": 0.2, "bytes_moved": 20_000})
    assert found.moved_bytes() == (20_000, 0)
    assert [one.reason for one in found.changes] == ["lost", "back"]
    assert [cut for _, cut in found.cuts] == [first.cut, LAYERS, found.deployment.cut]


def test_what_was_fixed_returns_as_it_was() -> None:
    for wanted, rate in ((SplitChoice(1, (8,)), 0.01 * MEGABYTE), (SplitChoice(rival="jointdnn"), 10 * MEGABYTE)):
        found, _, _ = pilot(rate, wanted)
        first = found.deployment
        found(found.plan, ("edge",), "auto")
        assert found.deployment.cut == LAYERS
        found(found.plan, BOTH, "auto")
        assert found.deployment == first


def test_a_server_that_is_lost_again_while_its_link_is_looked_at() -> None:
    found, _, link = pilot()
    found(found.plan, ("edge",), "auto")
    link.rate = None
    assert found(found.plan, BOTH, "auto").plan.stages, "as before anything was known"
    assert found(found.plan, ("edge",), "auto").plan.devices == ("edge",)


def test_alone_at_the_edge_it_looks_at_the_link_now_and_then() -> None:
    found, clock, link = pilot(0.001 * MEGABYTE)
    assert found.deployment.cut == LAYERS
    assert not found.should_change(0), "the link was looked at just now"
    looks = 0
    for step in range(400):
        clock.now += 0.5
        if found.should_change(step):
            plan = found(found.plan, BOTH, "auto").plan
            found.began(plan, step)
            if found.changed({"step": step, "seconds": 0.1, "bytes_moved": 1}) is not None:
                break
            looks += 1
    assert 1 <= looks <= 4
    assert len(link.asked) == looks
    assert found.deployment.cut < LAYERS


def test_an_edge_with_too_little_memory_waits_for_its_server() -> None:
    found, _, _ = pilot(split=profile(memory_bytes=2.9e6))
    assert not found.can_work_alone()
    with pytest.raises(OutOfMemory, match="memory"):
        found(found.plan, ("edge",), "auto")
    assert pilot()[0].can_work_alone()


@pytest.mark.slow
@given(st.floats(1e3, 1e9), st.booleans())
def test_copies_take_a_hundredth_of_the_link(rate: float, is_upstream: bool) -> None:
    side = "upstream" if is_upstream else "downstream"
    found, _, _ = pilot(rate, SplitChoice(2, (8,)), backup_every=None)
    found.ends = ends(edge_side=side)
    every, step = found.backups(), found.batch_seconds(found.deployment)
    sending = 2e4 / rate
    if every:
        assert every * step >= sending / 0.01 * 0.999
        assert (every - 1) * step <= max(sending / 0.01, 2e4 / 4e9 / 0.01)
    else:
        assert sending / 0.01 > 600


def test_copies_as_the_user_says() -> None:
    assert pilot(wanted=SplitChoice(2, (8,)), backup_every=7)[0].backups() == 7
    assert pilot(wanted=SplitChoice(LAYERS, (8,)), backup_every=7)[0].backups() == 0, "nobody is there to hold them"


def test_without_the_edge_there_is_no_data() -> None:
    found, _, _ = pilot()
    with pytest.raises(WorkerLost, match="edge"):
        found(found.plan, ("server",), "auto")


def test_two_changes_before_a_round_are_told_as_one() -> None:
    found, _, _ = pilot()
    first = found.deployment
    found(found.plan, ("edge",), "auto")
    found(found.plan, BOTH, "auto")
    if found.deployment == first:
        assert found.changed({"step": 1, "seconds": 0.1, "bytes_moved": 0}) is None
        assert found.changes == []


@pytest.mark.parametrize(("rival", "k"), [("k0", 0), ("unbounded", None)])
def test_rivals_have_their_own_k(rival: str, k: Bound) -> None:
    found, _, _ = pilot(wanted=SplitChoice(rival=rival))
    assert found.deployment.k == k
    assert found.k_at(1000) == k
