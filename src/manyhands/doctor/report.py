"""`manyhands doctor`: checks whether a run would work on these machines, and if not, how to fix it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.doctor.check import BROKEN, HERE, OK, WARNING, Check, Findings
from manyhands.doctor.machine import machine_checks
from manyhands.facts.errors import AddressTaken, BadValue, ManyhandsError, TimedOut
from manyhands.facts.hosts import host_and_port
from manyhands.files.documents import load_cluster
from manyhands.session.joining import refuse_preset

if TYPE_CHECKING:
    from manyhands.facts.cluster import Cluster
    from manyhands.runtime.coordinator import Coordinator

JOIN_SECONDS = 120.0
WORKERS = 2
MOST_WORKERS = 64
DISCOVERY_SECONDS = 4.0
MULTICAST = "multicast DNS, for workers that find the coordinator; --join works without"
Say = Callable[[str], None]
OnCheck = Callable[[Check], None]


@dataclass(frozen=True)
class DoctorOptions:
    """The subject of the examination: this machine and workers started on it, workers that join, or a lab."""

    workers: int | None = None
    """Workers to start on this machine; None: two, unless other workers are named."""
    cluster: str = ""
    listen: str = ""
    devices: int = 1
    """The number of workers that join."""
    token: str = ""
    lab: str = ""
    join: str = ""
    """A coordinator that a worker of this machine would join: HOST:PORT."""
    wait_seconds: float = JOIN_SECONDS

    def check(self) -> None:
        options = {"--workers": self.workers is not None, "--listen": bool(self.listen or self.cluster),
                 "--lab": bool(self.lab), "--join": bool(self.join)}  # fmt: skip
        conflicting = [name for name, is_given in options.items() if is_given]
        if len(conflicting) > 1:
            raise BadValue(
                f"{conflicting[0]} and {conflicting[1]} ask for different workers.", hint="Give one of them."
            )
        if self.workers is not None and not 0 <= self.workers <= MOST_WORKERS:
            raise BadValue(f"--workers is {self.workers}; it must be 0 to {MOST_WORKERS}.")
        if self.devices < 1:
            raise BadValue(f"--devices is {self.devices}; it must be at least 1.")
        if not 0 < self.wait_seconds <= 3600:
            raise BadValue(f"--wait is {self.wait_seconds:g}; it must be above 0 and at most 3600 seconds.")
        if self.cluster:
            refuse_preset(load_cluster(self.cluster), self.listen)

    @property
    def started_here(self) -> int:
        """The number of workers to start on this machine."""
        if self.listen or self.cluster or self.lab or self.join:
            return 0
        return WORKERS if self.workers is None else self.workers


def examine(options: DoctorOptions, say: Say = lambda text: None, on_check: OnCheck = lambda check: None) -> Findings:
    """Run all checks. `say` receives what is being examined; `on_check` receives each check as soon as it is made."""
    options.check()
    findings = Findings()
    for check in _checks(options, findings, say):
        findings.checks.append(check)
        on_check(check)
    return findings


def _checks(options: DoctorOptions, findings: Findings, say: Say) -> Iterator[Check]:
    say("this machine")
    yield from machine_checks(options.started_here)
    if any(check.subject in ("torch", "packages", "Python") for check in findings.broken):
        fix = "Fix what is broken above first."
        yield Check("workers", WARNING, "not looked at: none would start", "Python, torch and packages", fix)
        return
    if options.join:
        yield join_check(options.join)
        yield discovery_check(say)
        return
    if options.workers == 0:
        yield discovery_check(say)
        return
    with tempfile.TemporaryDirectory(prefix="manyhands-doctor-") as logs, contextlib.ExitStack() as stack:
        events: list[str] = []
        try:
            coordinator = stack.enter_context(_workers(options, Path(logs), say, events))
        except ManyhandsError as error:
            yield _not_there(options, error)
            return
        yield from _joined(options, coordinator, events)
        yield from _network(coordinator, findings, say)
    yield discovery_check(say)


def _network(coordinator: Coordinator, findings: Findings, say: Say) -> Iterator[Check]:
    from manyhands.doctor import network

    members = sorted(coordinator.alive(), key=lambda member: (len(member.name), member.name))  # local-2 before local-10
    if not members:
        return
    yield from network.worker_checks(members)
    names = [member.name for member in members]
    say("clocks")
    yield from network.clock_checks(coordinator, names)
    yield from network.pair_checks(coordinator, names, findings.links, say)


# Workers, wherever they are


@contextlib.contextmanager
def _workers(options: DoctorOptions, logs: Path, say: Say, events: list[str]) -> Iterator[Coordinator]:
    """Yield a coordinator with its workers; some of other machines may still be missing when the timeout is over."""
    from manyhands.facts.cluster import Cluster
    from manyhands.runtime.coordinator import Coordinator

    if options.lab:
        from manyhands.session.lab_session import lab_cluster, lab_session

        say(f"the lab {options.lab}")
        with lab_session(lab_cluster(options.lab), logs=logs, say=say, limit_seconds=options.wait_seconds) as session:
            yield session.coordinator
        return
    cluster = load_cluster(options.cluster) if options.cluster else None
    is_local = cluster is not None and all(device.kind == "local" for device in cluster.devices)
    if options.started_here or is_local:
        machines = cluster or Cluster.local(options.started_here)
        say(f"starting {len(machines.devices)} worker(s)")
        with Coordinator.local_cluster(machines, logs=logs, limit_seconds=options.wait_seconds) as coordinator:
            yield coordinator
        return
    with _listening(options, cluster, say, events) as coordinator:
        yield coordinator


@contextlib.contextmanager
def _listening(options: DoctorOptions, cluster: Cluster | None, say: Say, events: list[str]) -> Iterator[Coordinator]:
    from manyhands.runtime.addresses import DEFAULT_PORT
    from manyhands.runtime.coordinator import Coordinator
    from manyhands.runtime.shared_token import shared_token
    from manyhands.session.joining import join_text, parse_address

    host, port = parse_address(options.listen or "0.0.0.0", DEFAULT_PORT)
    token = options.token or shared_token(events.append)
    with Coordinator(host, port, token, on_event=events.append) as coordinator:
        awaited = list(cluster.names) if cluster is not None else options.devices
        named = " --name NAME" if cluster is not None else ""
        description = ", ".join(awaited) if isinstance(awaited, list) else f"{awaited} worker(s)"
        say(f"Waiting {options.wait_seconds:g} s for {description}. On each device:\n{join_text(coordinator, named)}")
        if isinstance(awaited, list):
            coordinator.wanted = set(awaited)
        with contextlib.suppress(TimedOut):  # which is a finding
            coordinator.wait_for(awaited, options.wait_seconds)
        yield coordinator


def _not_there(options: DoctorOptions, error: ManyhandsError) -> Check:
    if isinstance(error, AddressTaken):
        fix = error.hint or "Give another port: --listen HOST:PORT"
        return Check("workers", BROKEN, error.message, f"a free port at {options.listen or '0.0.0.0:7077'}", fix)
    from manyhands.doctor.network import lost_before_joining

    return lost_before_joining(error)


def _joined(options: DoctorOptions, coordinator: Coordinator, events: list[str]) -> Iterator[Check]:
    """Yield checks of whether all expected workers joined, and which were refused."""
    present = sorted(member.name for member in coordinator.alive())
    expected = sorted(coordinator.wanted or ()) or [f"worker {number + 1}" for number in range(options.devices)]
    if not (options.listen or options.cluster):
        yield Check("workers", OK, f"{', '.join(present)} joined", f"{len(present)} that join")
        return
    for text in events:
        if text.startswith("refused") or "turned away" in text:
            yield Check("workers", WARNING, text, "workers that may join", "See the message at that worker.")
    missing = [name for name in expected if name not in present] if coordinator.wanted else expected[len(present) :]
    if not missing:
        yield Check("workers", OK, f"{', '.join(present)} joined", f"{len(expected)} that join")
        return
    yield missing_check(coordinator, present, missing, len(expected), options.wait_seconds)


def missing_check(coordinator: Coordinator, present: list[str], missing: list[str], count: int, waited: float) -> Check:
    from manyhands.doctor.firewall import firewall_here, opening
    from manyhands.transport.security import is_loopback

    host, port = coordinator.address[:2]
    joined = f"{len(present)} of {count} joined within {waited:g} s"
    if coordinator.wanted:
        joined += f"; {', '.join(missing)} did not"
    fix = f"On each device: {coordinator.join_command()}\nWhat stands in its way: manyhands doctor --join HOST:{port}"
    if is_loopback(host):
        fix += f"\n{host} is for workers of this machine only; for others: --listen 0.0.0.0:{port}"
    else:
        tool = firewall_here()
        which = f" ({tool} is on)" if tool else ", one of"
        lines = "\n".join(opening("DEVICE", port, tool))
        fix += f"\nIf that times out or is refused, open port {port} on {HERE}{which}:\n{lines}"
    return Check("workers", BROKEN, joined, f"{count} that join", fix)


# This machine as one of the workers


def join_check(address: str) -> Check:
    """Return a check of whether a coordinator's port can be reached from here."""
    from manyhands.doctor.firewall import remedy
    from manyhands.runtime.addresses import DEFAULT_PORT
    from manyhands.runtime.reachability import probe
    from manyhands.session.joining import parse_address

    host, port = parse_address(address, DEFAULT_PORT)
    answer = probe(host, port)
    where = host_and_port(host, port)
    if answer.is_open:
        reached = f"{where} answers, after {answer.seconds * 1000:.1f} ms"
        return Check("coordinator", OK, reached, "a port that is open", where=where)
    fix = remedy(answer, HERE, _own_address(host, port), "the coordinator's machine", fixed_port=True)
    if answer.outcome == "refused":
        fix = f"Is the coordinator running (manyhands train --listen 0.0.0.0:{port})? {fix}"
    reached = f"{where}: {answer.outcome} ({answer.text})"
    return Check("coordinator", BROKEN, reached, "a port that is open", fix, where)


def _own_address(host: str, port: int) -> str:
    """Return this machine's address as the other machine would see it: connecting a UDP socket sends nothing."""
    import socket

    with contextlib.suppress(OSError, OverflowError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return "THIS_DEVICE"


def discovery_check(say: Say) -> Check:
    """Return a check of whether a multicast DNS announcement is received on this machine; without it workers need
    --join."""
    import importlib.util

    if importlib.util.find_spec("zeroconf") is None:
        return Check("mDNS", WARNING, "zeroconf is not installed", MULTICAST, "pip install zeroconf, or give --join")
    from manyhands.runtime.discovery import interface_asked

    say("multicast DNS")
    try:
        interface = interface_asked()
    except ManyhandsError as error:
        return Check("mDNS", WARNING, error.message, MULTICAST, error.hint)
    if interface is None:
        return Check("mDNS", WARNING, "switched off by MANYHANDS_DISCOVERY", MULTICAST, "unset MANYHANDS_DISCOVERY")
    return discovery_verdict(_discovery_problem(interface))


def _discovery_problem(interface: str) -> str:
    """Return why our own announcement is not received, or an empty string if it is."""
    import time

    from manyhands.runtime.discovery import PROBE, Announcer, Lookout
    from manyhands.transport.security import new_token

    problems: list[str] = []
    host = interface or "0.0.0.0"
    end = time.monotonic() + DISCOVERY_SECONDS
    try:
        announced = Announcer((host, 9), new_token(), "doctor", problems.append, interface, PROBE)
        with Lookout(PROBE) as lookout, announced as announcer:
            while (remaining_seconds := end - time.monotonic()) > 0:
                if any(announcement.salt == announcer.salt for announcement in lookout.seen()):
                    return ""
                lookout.wait(min(remaining_seconds, 0.2))
    except (OSError, ManyhandsError) as error:
        return str(error)
    return problems[0] if problems else f"nothing was heard of an announcement within {DISCOVERY_SECONDS:g} s"


def discovery_verdict(why: str) -> Check:
    if not why:
        return Check("mDNS", OK, "what is announced here is heard here", MULTICAST)
    fix = "Let UDP port 5353 through (sudo ufw allow 5353/udp), or give workers --join HOST:PORT"
    return Check("mDNS", WARNING, why, MULTICAST, fix)
