"""The inputs of `plan` and `simulate`: a network, a cluster, and a profile if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from manyhands.facts.cluster import Cluster
    from manyhands.facts.network import Network
    from manyhands.facts.profile import Profile
    from manyhands.simulator.result import Simulation


@dataclass(frozen=True)
class TaskInputs:
    """The inputs of planning or simulating."""

    network: Network
    cluster: Cluster
    profile: Profile | None
    """None: estimated from the device catalogue."""
    times: str = ""
    """The origin of the times of this machine's workers, in a sentence; empty: the cluster is another one."""


def load_task(
    model: str, input: str, granularity: str, cluster: str, profile: str, *, training: bool = True
) -> TaskInputs:
    """Load the inputs that the user named. Workers of this machine (`local:N`) get this machine's own times."""
    from manyhands.cli.show import working
    from manyhands.files.documents import load_cluster
    from manyhands.plans.networks import load_network, parse_input
    from manyhands.plans.planning import read_profiles

    machines = load_cluster(cluster)
    with working(f"capturing {model}") as say:
        network = load_network(model, parse_input(input), granularity)
        from manyhands.plans.local_profiles import is_plain_local, local_times

        if not is_plain_local(machines):
            return TaskInputs(network, machines, read_profiles(profile, network, machines) if profile else None)
        say("looking at this machine")
        local = local_times(network, machines, training=training)
    if not profile:
        return TaskInputs(network, local.cluster, local.profile, local.note)
    return TaskInputs(network, local.cluster, read_profiles(profile, network, local.cluster, local.profile))


def print_notes(task: TaskInputs, result: Simulation) -> None:
    """Print where the times come from, and the simulation's warnings."""
    if task.times:
        typer.echo(task.times)
    for warning in result.warnings:
        typer.echo(f"Note: {warning}")
