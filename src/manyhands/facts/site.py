"""Sites: devices behind an uplink that they share, and the tree of links that sites within sites make.

    backbone (the cluster's link)
    │ 100 Mbit/s, 10 ms          │ 1 Gbit/s, 2 ms        a site's uplink: all that leaves or enters it
  paris                        campus
pi-1 ── pi-2  (its link)       │         │
                              lab-a     lab-b            sites within a site
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from manyhands.facts.device import DEVICE_NAME, NAME_HINT
from manyhands.facts.errors import BadValue, unknown
from manyhands.facts.link import Link

MOST_LEVELS = 8
"""The most sites within each other."""


class Site(msgspec.Struct, frozen=True):
    """A place whose devices share an uplink to all others."""

    name: str
    up_bytes_per_second: float = math.inf
    down_bytes_per_second: float = math.inf
    delay_seconds: float = 0.0
    """The one-way delay of the uplink, on top of that of the link between sites."""
    link: Link | None = None
    """The link between two devices inside; None: that of the site it is within, or the cluster's."""
    within: str = ""
    """The site that this one is part of; empty: none."""

    def __post_init__(self) -> None:
        if not DEVICE_NAME.fullmatch(self.name):
            raise BadValue(f"'{self.name:.80}' cannot name a site.", hint=NAME_HINT)
        for field in ("up_bytes_per_second", "down_bytes_per_second"):
            if not getattr(self, field) > 0:
                raise BadValue(f"{self.name}: {field} is {getattr(self, field)}; it must be > 0.")
        if not 0 <= self.delay_seconds < math.inf:
            raise BadValue(f"{self.name}: delay_seconds is {self.delay_seconds}; it must be finite and >= 0.")


class Way(NamedTuple):
    """The way from one site to another: the sites that it leaves and those that it enters, in order."""

    leaves: tuple[Site, ...]
    enters: tuple[Site, ...]
    link: Link
    """The link that two devices have, uplinks included: the least rate, and all delays."""


class SiteTree:
    """The sites of a cluster, and the ways between them. The name of no site is empty: a device that is in none."""

    def __init__(self, sites: Iterable[Site], link: Link) -> None:
        self.link = link
        self.sites: dict[str, Site] = {}
        for site in sites:
            if site.name in self.sites:
                raise BadValue(f"sites: two sites have the name '{site.name}'.", hint="Give each its own name.")
            self.sites[site.name] = site
        self.paths: Mapping[str, tuple[Site, ...]] = {"": (), **{name: self._path(name) for name in self.sites}}
        """Site -> the sites that it is in, the outermost first, itself included."""
        self._ways: dict[tuple[str, str], Way] = {}

    def _path(self, name: str) -> tuple[Site, ...]:
        path: list[Site] = []
        while name:
            site = self.sites.get(name)
            if site is None:
                raise unknown("site", name, self.sites)
            if len(path) == MOST_LEVELS:
                problem = "is within itself" if site in path else f"is more than {MOST_LEVELS} levels deep"
                raise BadValue(f"sites: '{site.name}' {problem}.", hint="Leave out `within` at the outermost site.")
            path.append(site)
            name = site.within
        return tuple(reversed(path))

    def way(self, sender: str, receiver: str) -> Way:
        """Return the way from one site to another, or inside one."""
        way = self._ways.get((sender, receiver))
        if way is None:
            way = self._ways[sender, receiver] = self._way(self.paths[sender], self.paths[receiver])
        return way

    def _way(self, sender: tuple[Site, ...], receiver: tuple[Site, ...]) -> Way:
        common = 0
        while common < min(len(sender), len(receiver)) and sender[common] is receiver[common]:
            common += 1
        leaves, enters = sender[common:][::-1], receiver[common:]
        link = next((site.link for site in reversed(sender[:common]) if site.link is not None), self.link)
        uplinks = [site.up_bytes_per_second for site in leaves] + [site.down_bytes_per_second for site in enters]
        delay = link.delay_seconds + sum(site.delay_seconds for site in (*leaves, *enters))
        return Way(leaves, enters, Link(min([link.bytes_per_second, *uplinks]), delay))
