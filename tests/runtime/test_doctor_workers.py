"""The doctor and real workers: ports that refuse or stay silent, wrong clocks, workers that hang or are dead."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from doctor_ports import closed_port, deaf_port
from manyhands.doctor import report as doctor
from manyhands.doctor.check import BROKEN, OK, WARNING, Check, PairRate
from manyhands.doctor.network import clock_checks, pair_checks
from manyhands.doctor.report import DoctorOptions, examine
from manyhands.facts.cluster import Cluster
from manyhands.runtime import measuring
from manyhands.runtime.coordinator import Coordinator
from manyhands.transport.endpoint import Address

pytestmark = pytest.mark.xdist_group("doctor workers")

ONE, TWO, THREE = NAMES = ("local-1", "local-2", "local-3")


@pytest.fixture(scope="module")
def workers() -> Iterator[Coordinator]:
    with Coordinator.local_cluster(Cluster.local(3)) as coordinator:
        yield coordinator


def examined(coordinator: Coordinator) -> tuple[list[Check], list[PairRate]]:
    links: list[PairRate] = []
    return list(pair_checks(coordinator, NAMES, links, lambda text: None)), links


def test_every_pair_is_measured(workers: Coordinator) -> None:
    checks, links = examined(workers)
    assert [(check.subject, check.state, check.where) for check in checks] == [
        ("link", OK, f"{ONE}, {TWO}"), ("link", OK, f"{ONE}, {THREE}"), ("link", OK, f"{TWO}, {THREE}"),
    ]  # fmt: skip
    assert {(link.source, link.target) for link in links} == {(a, b) for a in NAMES for b in NAMES if a != b}
    assert all(link.bytes_per_second > 1e6 and link.delay_seconds < 1 for link in links)


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_a_worker_behind_a_port_that_is_shut(workers: Coordinator, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The others are looked at all the same, and who must open what is said."""
    monkeypatch.setattr(measuring, "LIMIT_OF_OWN_PROBE", 0.5)
    monkeypatch.setattr(measuring, "LIMIT_OF_MEMBER_PROBE", 0.5)
    member = workers.members[TWO]
    before, addresses = member.address, workers.addresses

    def shut_for_others(names: Any, reader: str, **named: Any) -> dict[str, Address]:
        """One whose port has changed is taken for another process: who has a connection to it keeps the old port."""
        found = addresses(names, reader, **named)
        return found if reader != THREE or TWO not in found else found | {TWO: found[TWO]._replace(port=before[1])}

    monkeypatch.setattr(workers, "addresses", shut_for_others)
    with deaf_port() as deaf:
        member.address = ("127.0.0.1", closed_port() if how == "refused" else deaf)
        try:
            checks, links = examined(workers)
        finally:
            member.address = before
    shut = [check for check in checks if check.subject == "reach"]
    assert [check.where for check in shut] == [f"{ONE}, {TWO}"], "to the coordinator workers connect by themselves"
    assert all(check.state == BROKEN and "On local-2" in check.fix for check in shut)
    assert "no member answers" in shut[0].found, "a worker says the same of all ports that no member has"
    assert [(check.where, check.state) for check in checks if check.subject == "link"] == [
        (f"{ONE}, {THREE}", OK), (f"{TWO}, {THREE}", OK),
    ]  # fmt: skip
    assert {link.source for link in links} == set(NAMES)


def test_clocks_are_compared(workers: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check.state for check in clock_checks(workers, NAMES)] == [OK, OK, OK]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)  # this process alone: the workers have the right time
    found = list(clock_checks(workers, NAMES))
    assert [check.state for check in found] == [WARNING] * 3
    assert all("behind" in check.found and "timedatectl" in check.fix for check in found)


@pytest.mark.slow
def test_a_worker_that_hangs_is_a_finding(workers: Coordinator) -> None:
    """The last test here: its worker is lost. Nobody waits for it longer than the limits say."""
    process = workers.members[THREE].facts.pid
    os.kill(process, signal.SIGSTOP)
    start = time.monotonic()
    try:
        clocks = {check.where: check.state for check in clock_checks(workers, NAMES)}
        checks, _ = examined(workers)
    finally:
        os.kill(process, signal.SIGCONT)
    assert time.monotonic() - start < 60
    assert clocks == {ONE: OK, TWO: OK, THREE: BROKEN}
    by_worker = {check.where: check for check in checks}
    assert by_worker[THREE].state == BROKEN
    assert "lost" in by_worker[THREE].found
    assert by_worker[f"{ONE}, {TWO}"].state == OK


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is not looked at; tests/cli has that."""
    monkeypatch.setattr(doctor, "machine_checks", lambda workers: iter(()))
    monkeypatch.setattr(doctor, "discovery_check", lambda say: Check("mDNS", OK, "not looked at"))


@pytest.mark.usefixtures("healthy")
def test_workers_that_do_not_come() -> None:
    """With a port on this machine, and nobody who joins: a finding with what to type."""
    found = examine(DoctorOptions(listen="127.0.0.1:0", devices=2, wait_seconds=0.5))
    (missing,) = [check for check in found.broken if check.subject == "workers"]
    assert missing.found == "0 of 2 joined within 0.5 s"
    assert "manyhands worker --join 127.0.0.1:" in missing.fix
    assert "--listen 0.0.0.0:" in missing.fix
    assert "--token" not in missing.fix, "it may be kept in a log"


@pytest.mark.usefixtures("healthy")
def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = examine(DoctorOptions(listen=f"127.0.0.1:{port}", wait_seconds=0.5))
    assert [check.subject for check in found.broken] == ["workers"]
    assert str(port) in found.broken[0].found
