"""What `plan` and `simulate` start from: a network, a cluster, and a profile if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.facts.cluster import Cluster
    from manyhands.facts.network import Network
    from manyhands.facts.profile import Profile


def load_task(
    model: str, input: str, granularity: str, cluster: str, profile: str
) -> tuple[Network, Cluster, Profile | None]:
    """Load the three by what the user typed."""
    from manyhands.api.networks import load_network, parse_input
    from manyhands.api.public import read_profiles
    from manyhands.cli.show import working
    from manyhands.files.documents import load_cluster

    machines = load_cluster(cluster)
    with working(f"capturing {model}"):
        network = load_network(model, parse_input(input), granularity)
    return network, machines, read_profiles(profile, network, machines) if profile else None
