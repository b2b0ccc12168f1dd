"""live.json of real runs: it is true while they go on, and when they are over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hand_made import chain, even_profile
from hand_made import cluster as made_cluster
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.observe.live import Live, read_live
from manyhands.observe.watching import RunWatch
from manyhands.plans.simulating import simulate
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.identity import Identity
from manyhands.runtime.living import LEAST_LOOKS, Living, rounds_between_looks
from manyhands.runtime.member import Member
from real_runs import BATCH, in_line, kill, names, restart, shared, train, workers

pytestmark = pytest.mark.xdist_group("living")
STEPS = 14


@pytest.fixture(scope="module")
def session() -> Iterator[Coordinator]:
    with workers(3) as coordinator:
        yield coordinator


@pytest.mark.parametrize(("seconds", "rounds", "every"), [(0.003, 10_000, 1000), (10.0, 50, 1), (1.0, 50, 3)])
def test_a_round_is_looked_at_every_few_seconds(seconds: float, rounds: int, every: int) -> None:
    assert rounds_between_looks(seconds, rounds) == every


def test_short_runs_are_looked_at_too() -> None:
    for rounds in range(1, 200):
        assert rounds // rounds_between_looks(1e-6, rounds) >= min(LEAST_LOOKS, rounds // 3)


def test_a_run_that_waited_and_goes_on_is_running_again(tmp_path: Path) -> None:
    network, devices = chain(2), ("a", "b")
    plan = Plan("chain", 4, (Stage((0, 2), devices, BySamples((2, 2))),))
    cluster, profile = made_cluster(devices), even_profile(network, devices)
    living = Living(tmp_path, command="train", model="chain", first_step=0, steps=9, batch_size=4)
    states = []
    living.planned(plan, network, cluster, profile, simulate(plan, network, cluster, profile))
    for change in (lambda: living.waits("one is left"), lambda: living.replanned(plan)):
        change()
        living._write()
        found = read_live(tmp_path)
        assert found is not None
        states.append((found.state, found.generation))
    living.close("ended")
    assert states == [("waiting", 0), ("running", 1)]


def test_bytes_of_all_generations_are_counted(tmp_path: Path) -> None:
    """Each counts from 0: of a smaller batch, of what comes after a validation, and of another plan."""
    network, devices = chain(2), ("a", "b")
    plan = Plan("chain", 4, (Stage((0, 2), devices, BySamples((2, 2))),))
    cluster, profile = made_cluster(devices), even_profile(network, devices)
    living = Living(tmp_path, command="train", model="chain", first_step=0, steps=9, batch_size=4)
    living.planned(plan, network, cluster, profile, simulate(plan, network, cluster, profile))
    for step, (generation, count) in enumerate([(1, 10), (1, 20), (2, 7), (3, 10), (3, 20)]):
        living.reported("a", Progress(generation, step, 0.1, sent={"b": count}))
    living.replanned(plan)
    living.reported("a", Progress(4, 5, 0.1, sent={"b": 10}))
    living.close("ended")
    found = read_live(tmp_path)
    assert found is not None
    assert {(link.source, link.target): link.sent_bytes for link in found.links}["a", "b"] == 20 + 7 + 20 + 10


@pytest.mark.slow
def test_a_round_is_seen_as_every_device_ran_it(session: Coordinator, tmp_path: Path) -> None:
    devices, watch, looks = names(session), RunWatch(tmp_path / "run"), []

    def stepped(step: int, loss: float, seconds: float) -> None:
        if step == STEPS - 2:
            view = watch.look()
            looks.append((view.is_live, view.live.state))

    ran = train(session, in_line(devices), tmp_path / "run", steps=STEPS, on_step=stepped)
    assert looks[0][0]
    assert looks[0][1] in ("preparing", "running")
    view = watch.look()
    live = view.live
    assert (live.state, live.step, live.steps, view.is_live) == ("ended", STEPS, STEPS, False)
    assert live.loss == pytest.approx(ran.result.losses[-1])
    assert [stage.devices for stage in live.stages] == [(name,) for name in devices]
    assert live.round is not None
    assert live.round.step % 3 == 2  # the round that was looked at last
    for spans in (live.round.measured, live.round.predicted):
        for number, name in enumerate(devices):
            passes = [span for span in spans if span.device == name and span.kind in ("forward", "backward")]
            assert {span.stage for span in passes} == {number}
            assert {span.text for span in passes} == {"0", "1"}  # micro-batches
        assert min(span.start for span in spans) >= 0
    assert max(span.end for span in live.round.measured) <= live.round.seconds + 1e-6
    for device in live.devices:
        assert (device.state, device.peak_bytes > 0, device.resident_bytes > device.peak_bytes) == ("here", True, True)
        assert 0 < (device.busy or 0) <= 1
    sent = {(link.source, link.target): link.sent_bytes for link in live.links}
    assert {pair: count for pair, count in sent.items() if count} == dict(ran.result.bytes_between)
    assert all(stage.seconds and stage.predicted_seconds for stage in live.stages)


@pytest.mark.slow
def test_who_was_lost_is_shown_as_lost_and_the_others_go_on(session: Coordinator, tmp_path: Path) -> None:
    restart(session)
    devices = names(session)
    struck: list[int] = []

    def stepped(step: int, loss: float, seconds: float) -> None:
        if step == 4 and not struck:
            struck.append(step)
            kill(session, devices[1])

    train(session, shared(devices, 4, 4, 4), tmp_path / "run", steps=STEPS, on_step=stepped, replan="light")
    assert struck, "the fault did not fire"
    view = RunWatch(tmp_path / "run").look()
    live: Live = view.live
    assert {device.name: device.state for device in live.devices} == {
        devices[0]: live.devices[0].state, devices[1]: "lost", devices[2]: live.devices[2].state
    }  # fmt: skip
    assert {live.devices[0].state, live.devices[2].state} <= {"here", "idle"}
    assert next(device for device in live.devices if device.state == "lost").reason
    assert live.generation == 1
    assert {name for stage in live.stages for name in stage.devices} <= {devices[0], devices[2]}
    assert live.batch_size == BATCH
    told = [event["event"] for event in view.events]
    assert told.index("lost") < told.index("replanned") < told.index("recovered")
    restart(session)


def test_who_left_is_not_called_lost(tmp_path: Path) -> None:
    living = Living(tmp_path, command="train", model="chain", first_step=0, steps=9, batch_size=4)
    known: dict[str, Any] = {"channel": SimpleNamespace(peer_host="10.0.0.2"), "facts": SimpleNamespace(compute="cpu")}
    ends: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"is_leaving": True},
        "c": {"is_leaving": True, "is_lost": True, "has_left": True, "reason": "it left by itself"},
        "d": {"is_lost": True, "reason": "the connection broke"},
    }
    devices = {device.name: device for device in made_cluster(tuple(ends)).devices}
    members = {
        name: Member(name, address=("10.0.0.2", 1), device=devices[name], identity=Identity(), **known, **how)
        for name, how in ends.items()
    }
    coordinator: Any = SimpleNamespace(is_closing=False, members=members, local=SimpleNamespace(running=dict))
    living.coordinated_by(coordinator)
    living.close("ended")
    found = read_live(tmp_path)
    assert found is not None
    told = {one.name: (one.state, one.reason) for one in found.devices}
    assert told == {"a": ("here", ""), "b": ("leaving", ""), "c": ("left", ""), "d": ("lost", "the connection broke")}
