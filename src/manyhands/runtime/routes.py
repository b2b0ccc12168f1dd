"""Decides how each pair of workers is connected: directly, from the side that reaches the other one, or by a relay.

A worker behind a router that translates addresses (NAT) can be reached from its own site only; so can one that listens
on loopback. Pairs with such a worker, and pairs that failed to connect, are probed from both sides before they are
connected (`route_probing`); all others connect as they always did, at no cost.

    both reach each other, or nothing is known    the smaller name connects
    one reaches the other                         that one connects
    neither does                                  both connect to a relay: a worker that offers it (`worker --relay`),
                                                  else the coordinator, which all workers have reached, else any worker
                                                  that both reach

A relay that is lost, or through which a pair fails to connect, is followed by the next one of that list. No thread, and
no clock of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.hosts import plain_host
from manyhands.runtime.member import Member
from manyhands.transport.security import is_loopback

Pair = frozenset[Member]


class WayBetween(NamedTuple):
    """The way that two workers connect to each other."""

    dialler: str
    """The one that connects; through a relay, the one that begins the handshake."""
    relay: str = ""
    """The device through which both connect; empty: directly."""


class Routes:
    """The known ways between members, and what follows from them. A worker that joins again is another
    member, of which nothing is known yet."""

    def __init__(self, members: Mapping[str, Member], *, is_active: bool) -> None:
        """`members`: by name, lost ones too. `is_active`: False where all are on one machine, and reach each other."""
        self._members, self.is_active = members, is_active
        self._reaches: dict[tuple[Member, Member], bool] = {}
        """(From, to) -> whether a probe succeeded."""
        self._suspects: set[Pair] = set()
        """Pairs that failed to connect."""
        self._failed: dict[Pair, set[Member | str]] = {}
        """Pair -> relays through which it failed to connect."""
        self._reported: dict[Pair, str] = {}

    # What is known

    def unknown(self, names: Iterable[str]) -> list[tuple[Member, Member]]:
        """Return the pairs among these workers that should be probed before they are connected."""
        if not self.is_active:
            return []
        members = [self._members[name] for name in sorted(names)]
        pairs = combinations([member for member in members if not member.is_invited], 2)
        return [pair for pair in pairs if self._is_doubtful(*pair) and pair not in self._reaches]

    def suspect(self, names: Iterable[str]) -> None:
        """Mark all pairs among these workers, so that they are probed before they are connected again."""
        if self.is_active:
            self._suspects.update(map(frozenset, combinations([self._members[name] for name in names], 2)))

    def _is_doubtful(self, first: Member, second: Member) -> bool:
        if frozenset((first, second)) in self._suspects:
            return True
        are_here = is_loopback(first.address[0]) and is_loopback(second.address[0])
        return not are_here and (is_behind(first) or is_behind(second))

    def note(self, source: str, target: str, *, is_open: bool) -> None:
        """Note the answer to a probe, and forget what was known of members that are lost."""
        self._reaches[self._members[source], self._members[target]] = is_open
        if any(member.is_lost for pair in self._reaches for member in pair):
            self._reaches = {
                pair: is_open for pair, is_open in self._reaches.items() if not any(member.is_lost for member in pair)
            }
            self._suspects = {pair for pair in self._suspects if not any(member.is_lost for member in pair)}
            self._failed = {
                pair: tried for pair, tried in self._failed.items() if not any(member.is_lost for member in pair)
            }

    # What follows

    def between(self, name: str, other: str) -> WayBetween | None:
        """Return how two workers connect; None: as any two do, or one of them was invited."""
        pair = self._members.get(name), self._members.get(other)
        if not self.is_active or None in pair:
            return None
        first, second = (member for member in pair if member is not None)
        if first.is_invited or second.is_invited or (first, second) not in self._reaches:
            return None
        there, back = self._reaches[first, second], self._reaches.get((second, first), False)
        if there != back:
            return WayBetween(name if there else other)
        relay = "" if there else self._relay(first, second)
        return WayBetween(min(name, other), relay) if relay else None

    def relay(self, name: str, other: str) -> str:
        """Return the relay of a pair; empty: none."""
        route = self.between(name, other)
        return route.relay if route is not None else ""

    def is_news(self, name: str, other: str, relay: str) -> bool:
        """Return whether a pair's relay is another one than at the last call."""
        pair = frozenset((self._members[name], self._members[other]))
        before, self._reported[pair] = self._reported.get(pair, ""), relay
        return before != relay

    def relayed(self, names: Collection[str]) -> dict[tuple[str, str], str]:
        """Return the pairs among these that are relayed, with their relays."""
        pairs = {(a, b): self.relay(a, b) for a, b in combinations(sorted(names), 2)} if self.is_active else {}
        return {pair: relay for pair, relay in pairs.items() if relay}

    def _relay(self, first: Member, second: Member) -> str:
        tried = self._failed.get(frozenset((first, second)), set())
        candidates = (name for name, key in self._candidates(first, second) if key not in tried)
        return next(candidates, "")

    def _candidates(self, first: Member, second: Member) -> Iterator[tuple[str, Member | str]]:
        """Yield the devices that both can reach, in the order of preference."""
        others = [
            member
            for member in self._members.values()
            if member not in (first, second) and not member.is_lost and not member.is_invited
            and self._is_reachable(first, member) and self._is_reachable(second, member)
        ]  # fmt: skip
        yield from ((member.name, member) for member in others if member.facts.is_relay)
        yield COORDINATOR, COORDINATOR
        yield from ((member.name, member) for member in others if not member.facts.is_relay)

    def _is_reachable(self, source: Member, target: Member) -> bool:
        return self._reaches.get((source, target), not is_behind(target))

    # When two could not be connected

    def give_up(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Note that these pairs could not be connected; return whether there is another way to try for each."""
        return self.is_active and all(self._give_up(*pair) for pair in pairs)

    def _give_up(self, name: str, other: str) -> bool:
        first, second = self._members[name], self._members[other]
        if first.is_invited or second.is_invited:
            return False
        pair = frozenset((first, second))
        relay = self.relay(name, other)
        if relay:
            self._failed.setdefault(pair, set()).add(relay if relay == COORDINATOR else self._members[relay])
        elif (first, second) in self._reaches:  # the probe came through, and then nothing did
            self._reaches[first, second] = self._reaches[second, first] = False
        else:
            self._suspects.add(pair)
            return True
        return bool(self._relay(first, second))


def is_behind(member: Member) -> bool:
    """Return whether others may not reach a worker at its own address: the coordinator sees it at another one, or it
    listens on this machine alone."""
    if member.is_invited:
        return False
    host, seen = member.address[0], member.channel.peer_host
    return is_loopback(host) or plain_host(host) != plain_host(seen)
