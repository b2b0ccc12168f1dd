"""Lines for ip, tc and bridge that make a lab's network: pure functions of names and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from manyhands.facts.errors import BadValue

MOST_STATIC = 256
"""Up to this many members, each knows every other's hardware address; larger labs use ARP."""
UNLIMITED_BYTES_PER_SECOND = 12.5e9
"""The rate of a port without a limit where its pairs, or an earlier limit, need a qdisc there."""

_LAB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]{0,63}")
_FRAME = 1514
_PAYLOAD = 1448
_LARGE_UNIT = 65_536  # what TCP hands down in one piece unless it is limited
_LARGE_BURST = 48 * _FRAME  # such a piece, with a header for each of its packets
_MOST_BURST_SECONDS = 0.02  # that a burst may last at a rate it was not made for
_QUEUE_SECONDS = 0.2
_LEAST_QUEUE = 64 * _FRAME  # TCP's slow start, at 0.05 Mbit/s, ends by itself at about 45
_PARENT, _OTHERS, _FIRST_SENDER = 1, 2, 0x10  # htb classes: the port, senders without a class, member 0
_FIRST_LEAF, _FIRST_HOLD = 0x10, 0x8000  # handles of the qdiscs below classes; netem's below those


# Names and addresses


def is_lab_name(text: str) -> bool:
    return _LAB.fullmatch(text) is not None


def check_lab_name(lab: str) -> str:
    """Return the name if a lab can have it. It has no '-', so that no lab's namespaces look like another's."""
    if not is_lab_name(lab):
        hint = "Use 1 to 64 letters, digits, '.' and '_', beginning with a letter or digit; '-' begins a device's name."
        raise BadValue(f"'{lab:.80}' cannot name a lab.", hint=hint)
    return lab


def hub_of(lab: str) -> str:
    return f"mh-{lab}"


def namespace_of(lab: str, member: str) -> str:
    return f"mh-{lab}-{member}"


def address_of(number: int) -> str:
    return f"10.77.{(number + 1) >> 8}.{(number + 1) & 255}"


def hardware_of(number: int) -> str:
    return f"02:6d:68:00:{number >> 8:02x}:{number & 255:02x}"


# Lines for tc and ip: pure functions


@dataclass(frozen=True)
class PortFlow:
    """A flow into a port from one sender, whose link is slower than the port, or delayed."""

    number: int
    bytes_per_second: float
    delay_seconds: float = 0.0


def burst_bytes(bytes_per_second: float) -> int:
    """Return how much may pass at once: 2 packets while that is 2 ms or more, 8 while one of TCP's large pieces is 4.5
    ms or more, then at least such a piece and 2 ms, since timers may be late. There are few steps, so that a rate that
    changes little keeps its burst."""
    if bytes_per_second * 0.002 <= 2 * _FRAME:
        return 2 * _FRAME
    if bytes_per_second * 0.0045 <= _LARGE_BURST:
        return 8 * _FRAME
    return max(_LARGE_BURST, round(bytes_per_second * 0.002))


def kept_burst(before: int, bytes_per_second: float) -> int:
    """Return the burst after a change. A smaller one would strand longer pieces already queued, so the old one stays if
    possible."""
    suitable = burst_bytes(bytes_per_second)
    is_close = before <= suitable * 1.01  # the kernel rounds
    return before if suitable < before and (is_close or before <= bytes_per_second * _MOST_BURST_SECONDS) else suitable


def queue_bytes(bytes_per_second: float) -> int:
    return max(_LEAST_QUEUE, 2 * burst_bytes(bytes_per_second), round(bytes_per_second * _QUEUE_SECONDS))


def unit_bytes(bytes_per_second: float) -> int:
    """Return the largest piece TCP should hand to a port of this rate: one that fits its burst with a header for every
    packet."""
    return min(_LARGE_UNIT, burst_bytes(bytes_per_second) * _PAYLOAD // _FRAME)


def tbf(bytes_per_second: float, burst: int | None = None) -> str:
    rate = min(bytes_per_second, UNLIMITED_BYTES_PER_SECOND)
    burst = burst_bytes(rate) if burst is None else burst
    return f"tbf rate {max(8, round(8 * rate))}bit burst {burst} limit {queue_bytes(rate)}"


def shaping_lines(port: str, bytes_per_second: float, flows: Sequence[PortFlow] = ()) -> list[str]:
    """Return tc's lines that give a new port its rate, and a class for each of `flows`."""
    if not flows:
        return [] if math.isinf(bytes_per_second) else [f"qdisc add dev {port} root handle 1: {tbf(bytes_per_second)}"]
    lines = [f"qdisc add dev {port} root handle 1: htb default {_OTHERS:x}"]
    lines += _class_lines("add", port, bytes_per_second, flows)
    for leaf, rate, delay in _leaves(bytes_per_second, flows):
        lines += _leaf_lines(port, leaf, rate, delay)
    for flow in flows:
        match = f"u32 match ip src {address_of(flow.number)}/32 flowid 1:{_FIRST_SENDER + flow.number:x}"
        lines.append(f"filter add dev {port} parent 1: protocol ip prio 1 {match}")
    return lines


def reshaping_lines(
    port: str, bytes_per_second: float, flows: Sequence[PortFlow], bursts: Mapping[str, int], *, is_shaped: bool
) -> list[str]:
    """Return tc's lines for the same port at another rate, with its queues kept. `bursts`: the present bursts of its
    tbf qdiscs, by handle ('1:').

    tbf never lets a piece pass that is longer than its burst. So where the burst must become smaller, that tbf is made
    anew, and what waited in it is lost, as on a link that drops packets; elsewhere nothing is lost.
    """
    if not is_shaped:
        return shaping_lines(port, bytes_per_second, flows)
    lines = []
    if not flows:
        burst = kept_burst(bursts["1:"], finite(bytes_per_second))
        if burst < bursts["1:"]:
            lines.append(f"qdisc del dev {port} root")
        return [*lines, f"qdisc replace dev {port} root handle 1: {tbf(bytes_per_second, burst)}"]
    lines += _class_lines("change", port, bytes_per_second, flows)
    for leaf, rate, delay in _leaves(bytes_per_second, flows):
        before = bursts[f"{_handle(leaf)}:"]
        burst = kept_burst(before, rate)
        where = f"parent 1:{leaf:x} handle {_handle(leaf)}:"
        if burst < before:
            lines += [f"qdisc del dev {port} {where}", *_leaf_lines(port, leaf, rate, delay)]
        else:
            lines.append(f"qdisc change dev {port} {where} {tbf(rate, burst)}")
    return lines


def finite(bytes_per_second: float) -> float:
    return min(bytes_per_second, UNLIMITED_BYTES_PER_SECOND)


def _class_lines(verb: str, port: str, bytes_per_second: float, flows: Sequence[PortFlow]) -> list[str]:
    """Return the lines for the port's class, and for the children that share it. The children's own rates sum to the
    parent's, since htb grants those without checking the parent."""
    rate = finite(bytes_per_second)
    burst = 2 * burst_bytes(rate)
    options = f"burst {burst} cburst {burst} quantum {max(_FRAME, min(_LARGE_UNIT, burst_bytes(rate)))}"
    whole, share = max(8, round(8 * rate)), max(8, round(8 * rate / (len(flows) + 1)))
    lines = [f"class {verb} dev {port} parent 1: classid 1:{_PARENT:x} htb rate {whole}bit ceil {whole}bit {options}"]
    for leaf, _, _ in _leaves(rate, flows):
        where = f"dev {port} parent 1:{_PARENT:x} classid 1:{leaf:x}"
        lines.append(f"class {verb} {where} htb rate {share}bit ceil {whole}bit {options}")
    return lines


def _leaves(bytes_per_second: float, flows: Sequence[PortFlow]) -> Iterator[tuple[int, float, float]]:
    """Yield class, rate and delay of each leaf; tbf enforces the rate even where htb could, because it splits long
    pieces."""
    yield _OTHERS, finite(bytes_per_second), 0.0
    for flow in flows:
        yield _FIRST_SENDER + flow.number, min(finite(bytes_per_second), flow.bytes_per_second), flow.delay_seconds


def _handle(leaf: int) -> str:
    return f"{_FIRST_LEAF + leaf:x}"


def _leaf_lines(port: str, leaf: int, bytes_per_second: float, delay_seconds: float) -> list[str]:
    handle = _handle(leaf)
    lines = [f"qdisc add dev {port} parent 1:{leaf:x} handle {handle}: {tbf(bytes_per_second)}"]
    if delay_seconds > 0:
        held = queue_bytes(bytes_per_second) + bytes_per_second * delay_seconds
        netem = f"netem delay {round(delay_seconds * 1e6)}us limit {math.ceil(held / _FRAME) + 1000}"
        lines.append(f"qdisc add dev {port} parent {handle}:1 handle {_FIRST_HOLD + leaf:x}: {netem}")
    return lines


def making_lines(lab: str, members: Sequence[str], up_rates: Sequence[float]) -> list[str]:
    """Return ip's lines, on the host, that make the namespaces and a cable from each to the hub."""
    hub = hub_of(lab)
    lines = [f"netns add {namespace_of(lab, member)}" for member in members]
    for number, (member, rate) in enumerate(zip(members, up_rates)):
        unit = f" gso_max_size {unit_bytes(rate)}" if math.isfinite(rate) else ""
        device = f"name eth0 address {hardware_of(number)} mtu 1500{unit} netns {namespace_of(lab, member)}"
        lines.append(f"link add name p{number} netns {hub} mtu 1500 type veth peer {device}")
    return lines


def hub_lines(count: int, *, has_bridge: bool) -> list[str]:
    """Return ip's lines, in the hub, that make the ports of `count` members and the bridge."""
    if not has_bridge:
        return [f"link set p{number} up" for number in range(count)]
    lines = ["link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0", "link set br0 up"]
    for number in range(count):
        lines.append(f"link set p{number} master br0 up")
        lines.append(f"link set p{number} type bridge_slave learning off flood off")
    return lines


def forwarding_lines(count: int) -> list[str]:
    """Return bridge's lines, in the hub, that map each member to its port."""
    return [f"fdb replace {hardware_of(number)} dev p{number} master static" for number in range(count)]


def member_lines(number: int, count: int, *, has_cubic: bool = True) -> list[str]:
    """Return ip's lines, in a member's namespace: its address, the route, and the hardware addresses of the others.

    The route makes TCP use the congestion control that nearly all devices use, whatever this host prefers. (BBR, for
    one, takes the burst of a slow port for its rate, and floods it.)
    """
    control = " congctl cubic" if has_cubic else ""
    lines = [
        "link set lo up",
        f"address add {address_of(number)}/16 dev eth0 noprefixroute",
        "link set eth0 up",
        f"route add 10.77.0.0/16 dev eth0 scope link src {address_of(number)}{control}",
    ]
    if count <= MOST_STATIC:
        for other in range(count):
            if other != number:
                where = f"{address_of(other)} lladdr {hardware_of(other)} dev eth0"
                lines.append(f"neighbour replace {where} nud permanent")
    return lines
