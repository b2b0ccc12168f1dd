"""Reachability probes that a worker makes for its coordinator: they find members of the cluster, and nothing else.

A coordinator tells workers where the others are, and the doctor asks each worker whether it can reach them. A worker
cannot verify alone that an address belongs to a member. If it reported what the network answers to a connection
(refused, silent, no route), any coordinator could scan the worker's network through it, behind its firewall. Therefore:

- A probe is the handshake of the data connections. Only a peer that proves that it knows the token, and has the name
  that is looked for, is reported as open: two sites may use the same private addresses.
- Every other outcome is the same answer, NO_MEMBER, after the same time: a closed port, a filtered one, a machine that
  does not exist, a web server, a peer with another token. Every probe that fails takes all of its limit, so that timing
  reveals no more than the answer.
- A target is an IP address and a port, never a name: no name server is queried. Loopback is only probed by a worker
  that is itself reached over loopback; multicast and unspecified addresses are not probed at all.
- A worker probes at most `MOST_TARGETS` different targets for one coordinator, as many as can be members.

All that remains to a coordinator is to have workers open connections and send 12 bytes, from which it learns nothing.
The network's own answer is shown to a person who asks for it on the device itself: `manyhands doctor --join HOST:PORT`.
The coordinator's own probes (`reachability`) report it too: they are made by the machine of the person who reads them.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from manyhands.facts.errors import ManyhandsError
from manyhands.runtime.reachability import NO_MEMBER, OPEN, ProbeAnswer
from manyhands.transport.dialling import dial
from manyhands.transport.endpoint import Address
from manyhands.transport.rendezvous import answers_as
from manyhands.transport.security import Purpose, Security, is_loopback
from manyhands.transport.wire import Broken

MEMBER_LIMIT_SECONDS = 10.0
"""Longest time of a probe. A handshake takes about six round trips: this is enough for a link with most of a second of
delay."""
MOST_TARGETS = 1200
"""Most targets that are probed for one coordinator: it can have this many members."""
_MOST_AT_ONCE = 64


class MemberProbes:
    """One worker's probes for one coordinator."""

    def __init__(self, name: str, security: Security, own_host: str) -> None:
        """`own_host`: the address at which this worker is reached."""
        self._name, self._security = name, security
        self._is_local = is_loopback(own_host)
        self._targets: set[tuple[str, int]] = set()

    def run(self, peers: Mapping[str, Address], limit_seconds: float) -> dict[str, ProbeAnswer]:
        """Return peer -> whether a member answers at its address, for each that this worker is to connect to."""
        targets = {
            name: address
            for name, address in list(peers.items())[:MOST_TARGETS]
            if name != self._name and not address.relay and address.is_dialled_by(self._name, name)
        }
        if not targets:
            return {}
        limit = min(max(0.0, limit_seconds), MEMBER_LIMIT_SECONDS)
        allowed = {name: self._is_allowed(address) for name, address in targets.items()}
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(targets)), "probe") as pool:
            attempts = {
                name: pool.submit(self._probe, name, address, limit, is_allowed=allowed[name])
                for name, address in targets.items()
            }
        return {name: attempt.result() for name, attempt in attempts.items()}

    def _is_allowed(self, address: Address) -> bool:
        """Return whether a member could be at this address, and the limit of different targets is not reached."""
        try:
            ip = ipaddress.ip_address(address.host.partition("%")[0])
        except ValueError:
            return False
        if ip.is_unspecified or ip.is_multicast or (ip.is_loopback and not self._is_local):
            return False
        target = address.host, address.port
        if not 0 < address.port < 65536 or (target not in self._targets and len(self._targets) >= MOST_TARGETS):
            return False
        self._targets.add(target)
        return True

    def _probe(self, name: str, address: Address, limit_seconds: float, *, is_allowed: bool) -> ProbeAnswer:
        """Return the result of one attempt; never raises. An attempt that fails takes all of its limit."""
        start = time.monotonic()
        deadline = start + limit_seconds
        security = address.security or self._security
        try:
            if is_allowed:
                wire = dial(address.host, address.port, security, Purpose.DATA, deadline, once=True)
                if answers_as(wire, self._name, name, deadline):
                    return ProbeAnswer(address.host, address.port, OPEN, time.monotonic() - start)
        except (ManyhandsError, Broken, OSError, OverflowError, UnicodeError):
            pass  # whatever it was: the coordinator gets the same answer
        time.sleep(max(0.0, deadline - time.monotonic()))
        text = f"nobody who knows the token within {limit_seconds:g} s"
        return ProbeAnswer(address.host, address.port, NO_MEMBER, limit_seconds, text)
