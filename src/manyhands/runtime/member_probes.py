"""Reachability probes that a worker makes for its coordinator: they find members of the cluster, and nothing else.

A coordinator tells workers where the others are, and the doctor asks each worker whether it can reach them. A worker
cannot verify alone that an address belongs to a member. If it reported what the network says to a connection (refused,
silent, no route), any coordinator could scan the worker's network through it, behind its firewall. So:

- A probe is the handshake of the data connections. Only what proves that it knows the token is reported as open.
- Every other outcome is one and the same answer, NO_MEMBER, after one and the same time: a closed port, a filtered one,
  a machine that is not there, a web server, somebody with another token. Every probe that fails takes all of its limit,
  so that timing tells no more than the answer.
- A target is an IP address and a port, never a name: nobody is made to ask a name server. Loopback is only probed by a
  worker that is itself there for its own machine alone; addresses of groups and of nobody are not probed at all.
- A worker probes at most `MOST_TARGETS` different targets for one coordinator, as many as can be members.

What remains to a coordinator is to have workers open connections and send 12 bytes, of which it learns nothing. The
network's own answer is shown where somebody asks for it on the device itself: `manyhands doctor --join HOST:PORT`.
The coordinator's own probes (`reachability`) say it too: they are made by the machine of whoever reads them.
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
from manyhands.transport.security import Purpose, Security, is_loopback

MEMBER_LIMIT_SECONDS = 10.0
"""A handshake takes about six round trips: enough for a link with most of a second of delay."""
MOST_TARGETS = 1200
"""As many as a coordinator can have members."""
_MOST_AT_ONCE = 64


class MemberProbes:
    """One worker's probes for one coordinator."""

    def __init__(self, name: str, security: Security, own_host: str) -> None:
        """`own_host`: the address at which the worker is reached itself."""
        self._name, self._security = name, security
        self._is_local = is_loopback(own_host)
        self._targets: set[tuple[str, int]] = set()

    def run(self, peers: Mapping[str, Address], limit_seconds: float) -> dict[str, ProbeAnswer]:
        """Peer -> whether a member answers at its address, for each that this worker is the one to connect to."""
        wanted = {
            name: address
            for name, address in list(peers.items())[:MOST_TARGETS]
            if name != self._name and address.is_dialled_by(self._name, name)
        }
        if not wanted:
            return {}
        limit = min(max(0.0, limit_seconds), MEMBER_LIMIT_SECONDS)
        allowed = {name: self._is_allowed(address) for name, address in wanted.items()}
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(wanted)), "probe") as pool:
            attempts = {
                name: pool.submit(self._probe, address, limit, is_allowed=allowed[name])
                for name, address in wanted.items()
            }
        return {name: attempt.result() for name, attempt in attempts.items()}

    def _is_allowed(self, address: Address) -> bool:
        """Whether a member could be there, and not too many targets were named already."""
        try:
            found = ipaddress.ip_address(address.host.partition("%")[0])
        except ValueError:
            return False
        if found.is_unspecified or found.is_multicast or (found.is_loopback and not self._is_local):
            return False
        target = address.host, address.port
        if not 0 < address.port < 65536 or (target not in self._targets and len(self._targets) >= MOST_TARGETS):
            return False
        self._targets.add(target)
        return True

    def _probe(self, address: Address, limit_seconds: float, *, is_allowed: bool) -> ProbeAnswer:
        """One attempt; never raises. One that fails takes all of its limit."""
        start = time.monotonic()
        deadline = start + limit_seconds
        security = address.security or self._security
        try:
            if is_allowed:
                dial(address.host, address.port, security, Purpose.DATA, deadline, once=True).close()
                return ProbeAnswer(address.host, address.port, OPEN, time.monotonic() - start)
        except (ManyhandsError, OSError, OverflowError, UnicodeError):
            pass  # whatever it was: it is the same to the coordinator
        time.sleep(max(0.0, deadline - time.monotonic()))
        text = f"nobody who knows the token within {limit_seconds:g} s"
        return ProbeAnswer(address.host, address.port, NO_MEMBER, limit_seconds, text)
