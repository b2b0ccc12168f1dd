"""The lab's network: a namespace per device, a hub between them, and the rate of every port kept by the kernel.

    mh-LAB-desk          mh-LAB-pi4-1                mh-LAB-pi4-2
       eth0                 eth0  tbf: up               eth0  tbf: up
         |                    |                           |
        p0                   p1   tbf: down              p2   tbf: down     (htb over a tbf per sender where a
         +------------------ br0 ------------------------+                  pair's own link is slower or delayed)
                            mh-LAB

A rate counts the bits of Ethernet frames as `tc` sees them: 14 bytes of header, then a packet of up to 1500; no
preamble, checksum or gap. A TCP stream in full packets moves 1448 bytes of payload in each 1514, so its goodput is
0.956 of the rate (measured: 0.953 to 0.956 from 0.05 to 1000 Mbit/s, up and down). Delays belong to pairs of devices:
netem delays the packets where the kernel has it; else there is no bridge, and a switch outside this module carries
the frames from port to port.

Nothing is learned or resolved on the wire: forwarding entries and (up to MOST_STATIC members) neighbours are static,
so that no port carries frames meant for others, and no ARP request times out in a slow port's queue.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, LabError, unknown
from manyhands.lab.lines import (
    UNLIMITED_BYTES_PER_SECOND,
    PortFlow,
    address_of,
    check_lab_name,
    finite,
    forwarding_lines,
    hub_lines,
    hub_of,
    making_lines,
    member_lines,
    namespace_of,
    reshaping_lines,
    shaping_lines,
    tbf,
    unit_bytes,
)

COORDINATOR_SPACE = "desk"
"""The name of the namespace in which the coordinator of a lab runs: member number 0, without limits."""

_FOLDER = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000
_LIMIT_SECONDS = 30.0


class Spaces:
    """The namespaces of one lab. Several objects, also in different processes, may represent the same lab."""

    def __init__(self, lab: str, cluster: Cluster, *, uses_switch: bool | None = None) -> None:
        self.lab = check_lab_name(lab)
        self.cluster = cluster
        if COORDINATOR_SPACE in cluster.names:
            raise LabError(
                f"No device of a lab can be called '{COORDINATOR_SPACE}': it is the coordinator's place.",
                hint="Rename that device.",
            )
        self.hub = hub_of(lab)
        self.members = (COORDINATOR_SPACE, *cluster.names)
        self._numbers = {member: number for number, member in enumerate(self.members)}
        self.has_delays = len(cluster.devices) > 1 and (
            cluster.link.delay_seconds > 0 or any(directed.link.delay_seconds > 0 for directed in cluster.links)
        )
        self.uses_switch = self.has_delays and not has_netem() if uses_switch is None else uses_switch

    def number(self, member: str) -> int:
        number = self._numbers.get(member)
        if number is None:
            raise unknown("device", member, self.members)
        return number

    def namespace(self, member: str) -> str:
        self.number(member)
        return namespace_of(self.lab, member)

    def address(self, member: str) -> str:
        return address_of(self.number(member))

    def port(self, member: str) -> str:
        return f"p{self.number(member)}"

    def flows(self, receiver: str) -> list[PortFlow]:
        """Return the flows for which `receiver`'s port has a class: senders whose own link is slower than both ends, or
        delayed by netem."""
        flows = []
        down = self.cluster.device(receiver).down_bytes_per_second
        for sender in self.cluster.devices:
            link = self.cluster.link_between(sender.name, receiver)
            delay = 0.0 if self.uses_switch else link.delay_seconds
            if link.bytes_per_second < min(sender.up_bytes_per_second, down) or delay > 0:
                flows.append(PortFlow(self.number(sender.name), link.bytes_per_second, delay))
        return flows

    def up(self) -> None:
        """Make all namespaces; if something fails, those that were made are removed again."""
        if self.exists(self.lab):
            hint = f"Type: manyhands lab down {self.lab}"
            raise LabError(f"A lab called '{self.lab}' is up already.", hint=hint)
        run_batch("ip", [f"netns add {self.hub}"])  # of two at once, one fails here and removes nothing
        try:
            self._make()
        except BaseException:
            self.down(self.lab)
            raise

    def _make(self) -> None:
        count = len(self.members)
        up_rates = [math.inf, *(device.up_bytes_per_second for device in self.cluster.devices)]
        run_batch("ip", making_lines(self.lab, self.members, up_rates))
        with entered(self.hub):
            _without_ipv6()
            shaping = [
                line
                for device in self.cluster.devices
                for line in shaping_lines(self.port(device.name), device.down_bytes_per_second, self.flows(device.name))
            ]
            run_batch("tc", shaping)
            run_batch("ip", hub_lines(count, has_bridge=not self.uses_switch))
            if not self.uses_switch:
                run_batch("bridge", forwarding_lines(count))
        for number, member in enumerate(self.members):
            with entered(self.namespace(member)):
                _without_ipv6()
                run_batch("tc", shaping_lines("eth0", up_rates[number]))
                run_batch("ip", member_lines(number, count, has_cubic=_has_cubic()))

    @staticmethod
    def names_of(lab: str) -> list[str]:
        """Return the namespaces of this lab that exist, the hub first."""
        hub = hub_of(check_lab_name(lab))
        return sorted(name for name in _namespaces() if name == hub or name.startswith(hub + "-"))

    @staticmethod
    def exists(lab: str) -> bool:
        return bool(Spaces.names_of(lab))

    @staticmethod
    def down(lab: str) -> None:
        """Remove what is left of the lab's namespaces. Processes inside keep theirs, cut off, until they end."""
        run_batch("ip", [f"netns delete {name}" for name in Spaces.names_of(lab)], forced=True)
        remaining = Spaces.names_of(lab)
        if remaining:
            raise LabError(f"These namespaces of lab '{lab}' cannot be removed: {', '.join(remaining)}.")

    def set_rates(self, device: str, up_bytes_per_second: float, down_bytes_per_second: float) -> None:
        """Set other rates from now on. Connections stay; see `reshaping_lines` for when packets are lost.

        The pairs whose own links are shaped are those that were slower than both ports when the lab came up.
        """
        self.cluster.device(device)
        for rate in (up_bytes_per_second, down_bytes_per_second):
            if not rate > 0:
                raise BadValue(
                    f"{device}: a rate is {rate} B/s; it must be > 0.", hint="A link of no rate at all: lab cut."
                )
        with entered(self.namespace(device)):
            unit = unit_bytes(finite(up_bytes_per_second))
            run_batch("tc", self._reshaping("eth0", up_bytes_per_second, []))
            run_batch("ip", [f"link set eth0 gso_max_size {unit}"])
            _write("/proc/sys/net/ipv4/route/flush", "1")  # open connections look their unit up again
        with entered(self.hub):
            run_batch("tc", self._reshaping(self.port(device), down_bytes_per_second, self.flows(device)))

    def rates(self, device: str) -> tuple[float, float]:
        """Return the bytes per second up and down, as the kernel has them now."""
        self.cluster.device(device)
        with entered(self.namespace(device)):
            up = port_rate(_qdiscs("eth0"))
        with entered(self.hub):
            return up, port_rate(_qdiscs(self.port(device)))

    def _reshaping(self, port: str, bytes_per_second: float, flows: list[PortFlow]) -> list[str]:
        qdiscs = _qdiscs(port)
        bursts = {qdisc["handle"]: int(qdisc["options"]["burst"]) for qdisc in qdiscs if qdisc["kind"] == "tbf"}
        is_shaped = any(qdisc.get("root") and qdisc["kind"] in ("tbf", "htb") for qdisc in qdiscs)
        return reshaping_lines(port, bytes_per_second, flows, bursts, is_shaped=is_shaped)

    def cut(self, device: str) -> None:
        """Pull the device's cable out of the hub: nothing passes, and no connection is closed."""
        self._set(device, "down")

    def heal(self, device: str) -> None:
        self._set(device, "up")

    def is_cut(self, device: str) -> bool:
        with entered(self.hub):
            flags = (
                run(["ip", "-oneline", "link", "show", "dev", self.port(device)]).partition("<")[2].partition(">")[0]
            )
        return "UP" not in flags.split(",")

    def _set(self, device: str, state: str) -> None:
        with entered(self.hub):
            run_batch("ip", [f"link set {self.port(device)} {state}"])


def _namespaces() -> list[str]:
    try:
        return os.listdir(_FOLDER)
    except FileNotFoundError:
        return []


# Calls to the kernel


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(_library(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def _back_afterwards() -> Iterator[None]:
    """Return this thread to its namespace afterwards, whichever it enters meanwhile. An error inside is the one that is
    raised."""
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # a thread that may not leave may not come back either
                _call("setns", namespace, _CLONE_NEWNET)
            raise
        _call("setns", namespace, _CLONE_NEWNET)
    finally:
        os.close(namespace)


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Run with this thread, and whatever it starts meanwhile, in that network namespace; sockets stay where they were
    made."""
    with _back_afterwards():
        try:
            descriptor = os.open(_FOLDER / namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _call("setns", descriptor, _CLONE_NEWNET)
            finally:
                os.close(descriptor)
        except OSError as error:
            hint = "Type: manyhands lab status"
            raise LabError(f"Network namespace '{namespace}' cannot be entered: {error.strerror}.", hint=hint) from None
        yield


def _qdiscs(port: str) -> list[dict[str, Any]]:
    """Return the queueing disciplines of a port in this thread's namespace, as tc lists them."""
    qdiscs: list[dict[str, Any]] = json.loads(run(["tc", "-json", "qdisc", "show", "dev", port]) or "[]")
    return qdiscs


def port_rate(qdiscs: Sequence[dict[str, Any]]) -> float:
    """Return the bytes per second of a port: where pairs have queues of their own, the rate of all other senders is the
    fastest."""
    rate = max((float(qdisc["options"]["rate"]) for qdisc in qdiscs if qdisc["kind"] == "tbf"), default=math.inf)
    return rate if rate < UNLIMITED_BYTES_PER_SECOND else math.inf


def _without_ipv6() -> None:
    for scope in ("all", "default"):
        _write(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6", "1")


def _has_cubic() -> bool:
    try:
        return "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    except OSError:
        return False


def _write(path: str, text: str) -> None:
    """Write to a setting of the thread's namespace, if this kernel has it: the lab works without, but with more
    background traffic."""
    with contextlib.suppress(OSError):
        Path(path).write_text(text)


def _tool(name: str) -> str:
    """Return the path of a command; /usr/sbin and /sbin are searched even where PATH leaves them out."""
    path = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
    if path is None:
        raise LabError(f"There is no command `{name}` here.", hint="Install iproute2: apt install iproute2")
    return path


def run(words: Sequence[str], text: str = "", *, lines: Sequence[str] = (), forced: bool = False) -> str:
    """Return what a command prints; if it fails, the error has the kernel's message (and the line of `lines` that
    failed)."""
    completed = subprocess.run(
        [_tool(words[0]), *words[1:]], input=text, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )
    if completed.returncode != 0 and not forced:
        complaints = [line for line in completed.stderr.splitlines() if line and not line.startswith("Command failed")]
        at = re.search(r"^Command failed -:(\d+)", completed.stderr, re.MULTILINE)
        failed = " ".join(words) if at is None else f"{words[0]} {lines[int(at[1]) - 1]}"
        raise LabError(f"`{failed}` failed: {' '.join(complaints) or f'exit code {completed.returncode}'}")
    return completed.stdout


def run_batch(tool: str, lines: Iterable[str], *, forced: bool = False) -> None:
    """Run all lines in one process, in this thread's namespace; `forced`: go on after a line that fails."""
    lines = list(lines)
    if lines:
        flags = ["-force"] if forced else []
        run([tool, *flags, "-batch", "-"], "\n".join(lines) + "\n", lines=lines, forced=forced)


# What this machine can do


def missing() -> str:
    """Return why namespaces cannot be used here, as a sentence; empty if they can."""
    if platform.system() != "Linux":
        return f"Network namespaces exist on Linux only; this is {platform.system()}."
    if os.geteuid() != 0:
        return "Network namespaces need root: type sudo before the command."
    for tool in ("ip", "tc", "bridge"):
        try:
            _tool(tool)
        except LabError:
            return f"The command `{tool}` is not here: install iproute2 (apt install iproute2)."
    return _refused()


@functools.cache
def _refused() -> str:
    try:
        with _nowhere():
            run_batch("ip", ["link add v0 type veth peer name v1", "link add br0 type bridge"])
            run_batch(
                "tc", [f"qdisc add dev v0 root handle 1: {tbf(1e6)}", *shaping_lines("v1", 1e6, [PortFlow(1, 1e5)])]
            )
    except OSError as error:
        return f"The kernel refuses a network namespace: {error.strerror}."
    except LabError as error:
        return f"The kernel cannot do what a lab needs: {error.message}"
    return ""


@functools.cache
def has_netem() -> bool:
    """Return whether this kernel can delay packets, by trying it in a namespace of its own."""
    if missing():
        return False
    try:
        with _nowhere():
            run_batch("tc", ["qdisc add dev lo root netem delay 1ms"])
    except (OSError, LabError):
        return False
    return True


@contextlib.contextmanager
def _nowhere() -> Iterator[None]:
    """Run in a namespace without a name, which disappears when this thread leaves it, whatever happens."""
    with _back_afterwards():
        _call("unshare", _CLONE_NEWNET)
        yield
