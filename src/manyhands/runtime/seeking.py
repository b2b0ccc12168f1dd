"""The search of a worker without a coordinator's address: it looks around, and takes the coordinator its token fits."""

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
"""Seconds for which a worker that has found only others' coordinators goes on looking for its own."""
REOPEN_SECONDS = 10.0
"""Seconds after which the search is opened anew, to include a network that came up meanwhile."""
CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5
_MOST_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Found:
    """A coordinator that was found and has accepted a connection from this worker; it has not been greeted yet."""

    announcement: Announcement
    joining: Joining
    """The options for joining it, with its address."""
    reached: ControlConnection


def seek(
    joining: Joining, transport: Transport, *, avoid: Collection[str] = (), grace_seconds: float = GRACE_SECONDS
) -> Found:
    """Return the first coordinator that the token fits and that can be reached, looked for until joining's limit.

    `avoid`: instances that are not tried. Raises Refused where there were only others', after `grace_seconds`; TimedOut
    where there were none.
    """
    end = time.monotonic() + joining.limit_seconds
    search = _Search(joining, transport, avoid, end)
    while True:
        try:
            with Lookout() as lookout:
                reopen = time.monotonic() + REOPEN_SECONDS
                while time.monotonic() < min(end, reopen):
                    lookout.wait(min(_PAUSE_SECONDS, max(0.0, end - time.monotonic())))
                    if (coordinator := search.look(lookout)) is not None:
                        return coordinator
                    if search.first_seen is not None and time.monotonic() - search.first_seen > grace_seconds:
                        raise search.failure()
        except OSError as error:  # no network yet
            search.problem = (error.strerror or str(error)).lower()
            time.sleep(max(0.0, min(1.0, end - time.monotonic())))
        if time.monotonic() >= end:
            raise search.failure()


class _Search:
    """The state of a search: coordinators seen and tried so far."""

    def __init__(self, joining: Joining, transport: Transport, avoid: Collection[str], end: float = math.inf) -> None:
        self._joining, self._transport, self._avoid, self._end = joining, transport, avoid, end
        self.first_seen: float | None = None
        """When the first coordinator was seen that is not suitable."""
        self.problem = ""
        """The reason why the network could not be searched."""
        self._others: dict[str, Announcement] = {}
        self._old: dict[str, Announcement] = {}
        """Coordinators of another version."""
        self._failures: dict[str, tuple[Announcement, ManyhandsError]] = {}
        self._known_keys = known_coordinators(joining)

    def look(self, lookout: Lookout) -> Found | None:
        self.problem, is_avoided = "", False
        for candidate in sorted(lookout.seen(), key=lambda item: item.instance in self._failures):  # untried first
            if candidate.instance in self._avoid:
                is_avoided = True
                continue
            if candidate.instance in self._others or not candidate.fits(self._joining.token, self._known_keys):
                self._others[candidate.instance] = candidate
            elif not candidate.is_same_version:
                self._old[candidate.instance] = candidate
            elif (coordinator := self._try(candidate)) is not None:
                return coordinator
        if self.first_seen is None and (is_avoided or self._others or self._old) and not self._failures:
            self.first_seen = time.monotonic()
        return None

    def _try(self, candidate: Announcement) -> Found | None:
        for host in nearest_first(candidate.hosts, tuple(addresses())):
            joining = dataclasses.replace(self._joining, host=host, port=candidate.port)
            seconds_left = self._end - time.monotonic()
            if seconds_left <= 0:
                return None
            try:
                reached = reach_either(
                    self._transport, joining.name, (host, candidate.port), joining.token,
                    min(CONNECT_SECONDS * joining.timeout_factor, seconds_left),
                    encrypted=joining.encrypted, timeout_factor=joining.timeout_factor, once=True,
                    credentials=joining.credentials,
                )  # fmt: skip
                return Found(candidate, joining, reached)
            except WrongToken:  # its mark did not show this; each attempt would give it a guess
                self._others[candidate.instance] = candidate
                return None
            except (Refused, TimedOut) as error:
                self._failures[candidate.instance] = candidate, error
        return None

    def failure(self) -> ManyhandsError:
        """Return the error that explains why no coordinator was found, and what to do."""
        for candidate, error in self._failures.values():
            hint = f"{error.hint}\nOr give its address: manyhands worker --join HOST:{candidate.port}"
            return type(error)(
                f"{candidate.text} was found, and could not be joined: {error.message}", hint=hint.strip()
            )
        for candidate in self._old.values():
            return Refused(
                f"{candidate.text} fits the token; this is manyhands {__version__}.",
                hint=f"Install the same on both, here: pip install manyhands=={candidate.version}",
            )
        if self._others:
            listed = "".join(f"\n  {candidate.text}" for candidate in list(self._others.values())[:_MOST_LISTED])
            return Refused(
                f"This worker's token fits none of the {len(self._others)} coordinator(s) that were found:{listed}",
                hint="Give the token of yours, as it was printed there: manyhands worker --token-file FILE, or "
                "MANYHANDS_TOKEN.",
            )
        local_hosts = [f"{address} ({interface})" for address, interface in addresses().items() if ":" not in address]
        where = self.problem or (
            f"looked from {', '.join(local_hosts[:6])}" if local_hosts else "this machine has no network address"
        )
        return TimedOut(
            f"No coordinator was found within {self._joining.limit_seconds:g} s ({where}).",
            hint="Is it running, and does it listen: manyhands train --listen 0.0.0.0:7077? It cannot be found from "
            "another subnet, or where multicast (UDP port 5353) is blocked, as guest Wi-Fi and firewalls do.\n"
            "Give its address: manyhands worker --join HOST:PORT",
        )


def known_coordinators(joining: Joining) -> list[bytes]:
    """Return the keys of coordinators that this device has joined before."""
    credentials = joining.credentials() if joining.encrypted is not False else None
    return credentials.book.public_keys(Role.COORDINATOR) if credentials is not None else []


def nearest_first(hosts: Collection[str], local_hosts: Collection[str]) -> list[str]:
    """Return addresses in the order to try them: those that share most bits with one of this machine's go first."""

    def closeness(host: str) -> int:
        address = ipaddress.ip_address(host.partition("%")[0])
        return max((_common_bits(address, ipaddress.ip_address(local)) for local in local_hosts), default=0)

    return sorted(hosts, key=closeness, reverse=True)


def _common_bits(
    left: ipaddress.IPv4Address | ipaddress.IPv6Address, right: ipaddress.IPv4Address | ipaddress.IPv6Address
) -> int:
    if left.version != right.version:
        return -1
    return left.max_prefixlen - (int(left) ^ int(right)).bit_length()
