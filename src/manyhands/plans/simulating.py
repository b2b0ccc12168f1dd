"""Simulate a plan, with network and cluster by name or by value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.files.documents import load_cluster
from manyhands.plans.networks import load_network
from manyhands.schedule.checker import check
from manyhands.schedule.policy import Schedule
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import simulate as simulate_plan

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph


def network_of(network: Graph | Network | str) -> Network:
    if isinstance(network, str):
        return load_network(network)
    return network if isinstance(network, Network) else network.network


def cluster_of(cluster: Cluster | str | Path) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else load_cluster(cluster)


def simulate(
    plan: Plan,
    network: Network | str,
    cluster: Cluster | str | Path,
    profile: Profile | None = None,
    *,
    keep_spans: bool = True,
    within_memory: bool = False,
) -> Simulation:
    """Simulate one round of a plan under a virtual clock.

    A device that would run out of memory is named in the result's warnings; with `within_memory` it is an error.
    """
    network, cluster = network_of(network), cluster_of(cluster)
    result = simulate_plan(plan, network, cluster, profile, keep_spans=keep_spans)
    if within_memory and any(device.peak_bytes > device.memory_bytes for device in result.devices.values()):
        check(
            Schedule(resolve(plan, network, cluster), network), cluster, result.log
        )  # raises an error that names the device
    return result
