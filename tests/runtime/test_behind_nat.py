"""Two sites of two devices, each behind a router that lets nothing in: what crosses from site to site is relayed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.doctor.check import OK, WARNING, PairRate
from manyhands.doctor.network import pair_checks
from manyhands.executor.messages import COORDINATOR
from manyhands.runtime.coordinator import Coordinator
from manyhands.session import measuring
from nat_sites import DEVICES, HUB, ROOT_ONLY, NatSites, nat_sites
from real_runs import BATCH, assert_close, shared, train

pytestmark = ROOT_ONLY

FAR = {(a, b) for a in ("s1a", "s1b") for b in ("s2a", "s2b")}
PLAN = shared(DEVICES, 3, 3, 3, 3)
PATIENCE = 3.0
"""Nobody is lost because this machine has much to do: what dies here closes its connections."""


@pytest.fixture(scope="module")
def sites() -> Iterator[NatSites]:
    with nat_sites(f"nat-{os.getpid()}") as found:
        yield found


@contextlib.contextmanager
def joined(sites: NatSites, logs: Path, *, hub: bool = False) -> Iterator[tuple[Coordinator, list[str]]]:
    """A coordinator, a worker on each device, and, if asked for, one on the hub that offers to relay."""
    events: list[str] = []
    with Coordinator(
        "0.0.0.0", on_event=events.append, heartbeat_timeout_seconds=10.0, timeout_factor=PATIENCE
    ) as coordinator:
        for name in DEVICES:
            sites.start(name, coordinator.address[1], coordinator.token, logs)
        if hub:
            sites.start(HUB, coordinator.address[1], coordinator.token, logs, "--relay")
        coordinator.wait_for([*DEVICES, HUB] if hub else DEVICES, 180)
        yield coordinator, events
    for process in sites.processes.values():
        process.wait(180)
    sites.processes.clear()


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MEASURE_SECONDS", 0.1)


def forwarded(coordinator: Coordinator) -> int:
    return int(coordinator.endpoint._rendezvous.relay.forwarded_bytes)  # type: ignore[attr-defined]


def test_two_sites_train_exactly_through_the_coordinator(sites: NatSites, tmp_path: Path) -> None:
    with joined(sites, tmp_path) as (coordinator, events):
        assert {member.channel.peer_host.rpartition(".")[2] for member in coordinator.alive()} == {"11", "12"}
        links: list[PairRate] = []
        checks = {check.where: check for check in pair_checks(coordinator, DEVICES, links, lambda text: None)}
        ran = train(coordinator, PLAN, tmp_path / "sites", steps=20)
        ran.assert_as_planned()
        assert coordinator.routes.relayed(DEVICES) == dict.fromkeys(FAR, COORDINATOR)
        assert sum("the coordinator relays between them" in text for text in events) == len(FAR)
        assert forwarded(coordinator) > 0
        one = train(coordinator, shared(("s2b",), BATCH), tmp_path / "single", steps=20)
        assert_close(ran.state, one.state)
    assert {(link.source, link.target) for link in links if link.relay} == FAR | {pair[::-1] for pair in FAR}
    assert checks["s1a, s1b"].state == OK
    assert "through" not in checks["s1a, s1b"].found
    assert checks["s1a, s2b"].state == OK
    assert "through the coordinator" in checks["s1a, s2b"].found
    assert {check.state for check in checks.values()} <= {OK, WARNING}


def test_the_planner_sees_what_the_relay_carries(sites: NatSites, tmp_path: Path) -> None:
    with joined(sites, tmp_path) as (coordinator, _):
        ran = train(coordinator, "samples", tmp_path / "planned", steps=3)
        cluster = ran.planned.cluster
        relays = {(link.sender, link.receiver): link.relay for link in cluster.links}
        assert {pair for pair, relay in relays.items() if relay} == FAR | {pair[::-1] for pair in FAR}
        assert {relay for relay in relays.values() if relay} == {COORDINATOR}


def test_the_relay_dies_and_another_takes_over(sites: NatSites, tmp_path: Path) -> None:
    """The hub relays because it offers to; killed in the middle of the run, the coordinator relays instead."""
    fired: list[int] = []
    relays: list[set[str]] = []
    with joined(sites, tmp_path, hub=True) as (coordinator, _events):

        def at_step(step: int, loss: float, seconds: float) -> None:
            if step == 4:
                relays.append(set(coordinator.routes.relayed(DEVICES).values()))
                fired.append(forwarded(coordinator))
                sites.kill(HUB)

        start = time.monotonic()
        ran = train(coordinator, PLAN, tmp_path / "killed", steps=30, on_step=at_step)
        seconds = time.monotonic() - start
        assert fired == [0], "the fault fired once, and until then nothing went through the coordinator"
        assert relays == [{HUB}]
        assert coordinator.members[HUB].is_lost
        assert coordinator.routes.relayed(DEVICES) == dict.fromkeys(FAR, COORDINATOR)
        assert forwarded(coordinator) > 0
        assert set(ran.result.plan.devices) == set(DEVICES), "nobody was evicted for it"
        assert len(ran.result.recoveries) == 1
        assert ran.result.recoveries[0]["seconds"] < 60, seconds
        assert len(ran.result.losses) == 30
        one = train(coordinator, shared(("s2b",), BATCH), tmp_path / "single", steps=30)
        assert_close(ran.state, one.state)
