"""A worker that was not told where to join looks around, and takes the coordinator that its token fits."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import time
from collections.abc import Collection

from manyhands.facts.errors import ManyhandsError, Refused, TimedOut
from manyhands.facts.version import __version__
from manyhands.runtime.discovery import Announcement, Lookout
from manyhands.runtime.identity import addresses
from manyhands.runtime.joining import Joining
from manyhands.transport.keys import Role
from manyhands.transport.proofs import WrongToken
from manyhands.transport.transport import ControlConnection, Transport, reach_either

GRACE_SECONDS = 5.0
"""So long a worker that has found only others' coordinators goes on looking for its own."""
REOPEN_SECONDS = 10.0
"""A network that came up meanwhile is looked at by then."""
CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5
_MOST_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Found:
    """A coordinator that was found and let this worker in; it has not been greeted yet."""

    announcement: Announcement
    joining: Joining
    """Where it is."""
    reached: ControlConnection


def seek(
    joining: Joining, transport: Transport, *, avoid: Collection[str] = (), grace_seconds: float = GRACE_SECONDS
) -> Found:
    """The first coordinator that the token fits and that can be reached, looked for until joining's limit.

    `avoid`: instances that are not tried. Refused where only others were there, after `grace_seconds`; TimedOut where
    nobody was.
    """
    end = time.monotonic() + joining.limit_seconds
    search = _Search(joining, transport, avoid, end)
    while True:
        try:
            with Lookout() as lookout:
                reopen = time.monotonic() + REOPEN_SECONDS
                while time.monotonic() < min(end, reopen):
                    lookout.wait(min(_PAUSE_SECONDS, max(0.0, end - time.monotonic())))
                    if (found := search.look(lookout)) is not None:
                        return found
                    if search.first_seen is not None and time.monotonic() - search.first_seen > grace_seconds:
                        raise search.failure()
        except OSError as error:  # no network yet
            search.problem = (error.strerror or str(error)).lower()
            time.sleep(max(0.0, min(1.0, end - time.monotonic())))
        if time.monotonic() >= end:
            raise search.failure()


class _Search:
    """What has been seen and tried so far."""

    def __init__(self, joining: Joining, transport: Transport, avoid: Collection[str], end: float = math.inf) -> None:
        self._joining, self._transport, self._avoid, self._end = joining, transport, avoid, end
        self.first_seen: float | None = None
        """When the first one was there that will not do."""
        self.problem = ""
        """Why nothing could be looked at."""
        self._others: dict[str, Announcement] = {}
        self._old: dict[str, Announcement] = {}
        """Of another version."""
        self._failures: dict[str, tuple[Announcement, ManyhandsError]] = {}
        self._known_keys = known_coordinators(joining)

    def look(self, lookout: Lookout) -> Found | None:
        self.problem, is_avoided = "", False
        for one in sorted(lookout.seen(), key=lambda one: one.instance in self._failures):  # others first
            if one.instance in self._avoid:
                is_avoided = True
                continue
            if one.instance in self._others or not one.fits(self._joining.token, self._known_keys):
                self._others[one.instance] = one
            elif not one.is_same_version:
                self._old[one.instance] = one
            elif (found := self._try(one)) is not None:
                return found
        if self.first_seen is None and (is_avoided or self._others or self._old) and not self._failures:
            self.first_seen = time.monotonic()
        return None

    def _try(self, one: Announcement) -> Found | None:
        for host in nearest_first(one.hosts, tuple(addresses())):
            joining = dataclasses.replace(self._joining, host=host, port=one.port)
            left = self._end - time.monotonic()
            if left <= 0:
                return None
            try:
                reached = reach_either(
                    self._transport, joining.name, (host, one.port), joining.token,
                    min(CONNECT_SECONDS * joining.timeout_factor, left),
                    encrypted=joining.encrypted, patience=joining.timeout_factor, once=True,
                    credentials=joining.credentials,
                )  # fmt: skip
                return Found(one, joining, reached)
            except WrongToken:  # its mark did not tell; every attempt would be a guess for it
                self._others[one.instance] = one
                return None
            except (Refused, TimedOut) as error:
                self._failures[one.instance] = one, error
        return None

    def failure(self) -> ManyhandsError:
        """Why nobody was found, and what to do."""
        for one, error in self._failures.values():
            hint = f"{error.hint}\nOr give its address: manyhands worker --join HOST:{one.port}"
            return type(error)(f"{one.text} was found, and could not be joined: {error.message}", hint=hint.strip())
        for one in self._old.values():
            return Refused(
                f"{one.text} fits the token; this is manyhands {__version__}.",
                hint=f"Install the same on both, here: pip install manyhands=={one.version}",
            )
        if self._others:
            listed = "".join(f"\n  {one.text}" for one in list(self._others.values())[:_MOST_LISTED])
            return Refused(
                f"This worker's token fits none of the {len(self._others)} coordinator(s) that were found:{listed}",
                hint="Give the token of yours, as it was printed there: manyhands worker --token-file FILE, or "
                "MANYHANDS_TOKEN.",
            )
        own = [f"{address} ({interface})" for address, interface in addresses().items() if ":" not in address]
        where = self.problem or (f"looked from {', '.join(own[:6])}" if own else "this machine has no network address")
        return TimedOut(
            f"No coordinator was found within {self._joining.limit_seconds:g} s ({where}).",
            hint="Is it running, and does it listen: manyhands train --listen 0.0.0.0:7077? It cannot be found from "
            "another subnet, or where multicast (UDP port 5353) is blocked, as guest Wi-Fi and firewalls do.\n"
            "Give its address: manyhands worker --join HOST:PORT",
        )


def known_coordinators(joining: Joining) -> list[bytes]:
    """Keys of coordinators that this device has joined before."""
    credentials = joining.credentials() if joining.encrypted is not False else None
    return credentials.book.public_keys(Role.COORDINATOR) if credentials is not None else []


def nearest_first(hosts: Collection[str], own: Collection[str]) -> list[str]:
    """Addresses in the order to try them: those that share most with one of this machine's own go first."""

    def closeness(host: str) -> int:
        found = ipaddress.ip_address(host.partition("%")[0])
        return max((_common_bits(found, ipaddress.ip_address(one)) for one in own), default=0)

    return sorted(hosts, key=closeness, reverse=True)


def _common_bits(
    left: ipaddress.IPv4Address | ipaddress.IPv6Address, right: ipaddress.IPv4Address | ipaddress.IPv6Address
) -> int:
    if left.version != right.version:
        return -1
    return left.max_prefixlen - (int(left) ^ int(right)).bit_length()
