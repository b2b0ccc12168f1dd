"""The groups that a plan's sums go through: hosts, sites, both or none, whichever is priced best.

A sum among workers in hosts sends less through every port if it is formed inside each host first, and one among sites
less through every uplink; but each level waits for two delays more. So it is tried, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.plan import Plan

MOST_COMPARED = 64
"""The most devices with which sums without groups, or with only some of them, are priced too: with more they are never
better, and take long to simulate."""


def placed(plan: Plan, cluster: Cluster, *, hosts: bool = True, sites: bool = True) -> Plan:
    """Return the plan with its devices' places in the cluster, for its sums."""
    places = {name: cluster.place(name, hosts=hosts, sites=sites) for name in plan.devices}
    return msgspec.structs.replace(plan, places={name: place for name, place in places.items() if place})


def best_placed(plan: Plan, cluster: Cluster, price: Callable[[Plan], float]) -> Plan:
    """Return the plan with the groups for its sums that make it best."""
    every = placed(plan, cluster)
    if not every.places or len(plan.devices) > MOST_COMPARED:
        return every
    best, least = every, price(every)
    for hosts, sites in ((True, False), (False, True), (False, False)):
        other = placed(plan, cluster, hosts=hosts, sites=sites)
        if other.places in (every.places, best.places):
            continue
        try:
            seconds = price(other)
        except ManyhandsError:
            continue
        if seconds < least:
            best, least = other, seconds
    return best
