"""Plans for inference: simulated, chosen, and planned again when devices come or go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, BadValue
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.planner.inference import (
    inference_candidates,
    inference_plans,
    inference_task,
    objective_named,
)
from manyhands.planner.pricing import MicroBatchPrice, Pricer
from manyhands.plans.planned import Planned
from manyhands.plans.simulating import cluster_of, network_of, simulate
from manyhands.schedule.shortage import MORE_MEMORY
from manyhands.schedule.synchronisation import sync_points
from manyhands.simulator.result import Simulation

LONG, SHORT = 16, 8
"""Micro-batches of two streams; the difference of their times is what one micro-batch takes within a long stream."""


def _stream(plan: Plan, count: int) -> Plan:
    return msgspec.structs.replace(plan, micro_batches=count, batch_size=count * plan.micro_batch_size)


def plan_to_show(plan: Plan, objective: str) -> Plan:
    """Return the plan that is shown: one answer alone, or a stream that is long enough."""
    return _stream(plan, 1 if objective_named(objective) == "latency" else max(LONG, plan.micro_batches))


def _simulated(plan: Plan, count: int, network: Network, cluster: Cluster, profile: Profile) -> Simulation:
    return simulate(_stream(plan, count), network, cluster, profile, keep_spans=False, within_memory=True)


def _price_alone(plan: Plan, network: Network, cluster: Cluster, profile: Profile) -> MicroBatchPrice:
    """Return the price of one micro-batch, per sample."""
    result = _simulated(plan, 1, network, cluster, profile)
    busiest = 0.0
    for name, totals in result.devices.items():
        device = cluster.device(name)
        ports = 0.0 if device.host else max(
            totals.bytes_sent / device.up_bytes_per_second, totals.bytes_received / device.down_bytes_per_second
        )  # fmt: skip
        busiest = max(busiest, totals.busy_seconds, ports)
    return MicroBatchPrice(result.seconds / result.samples, busiest / result.samples)


def _steady(plan: Plan, network: Network, cluster: Cluster, profile: Profile) -> float:
    long, short = (_simulated(plan, count, network, cluster, profile) for count in (LONG, SHORT))
    return (long.seconds - short.seconds) / (long.samples - short.samples)


def sample_seconds(
    plan: Plan, network: Network, cluster: Cluster, profile: Profile | None = None, objective: str = "latency"
) -> float:
    """Return the simulated seconds of a sample: alone, or between two answers of a long stream."""
    profile = profile or estimate_cluster(network, cluster)
    if objective_named(objective) == "latency":
        return _price_alone(plan, network, cluster, profile).seconds
    return _steady(plan, network, cluster, profile)


def stream_seconds(plan: Plan, network: Network, cluster: Cluster, profile: Profile, samples: int) -> float:
    """Return the simulated seconds of a stream, from its first sample to its last answer."""
    count = -(-samples // plan.micro_batch_size)
    begun = _simulated(plan, min(count, LONG), network, cluster, profile).seconds
    if count <= LONG:
        return begun
    return begun + (count - LONG) * plan.micro_batch_size * _steady(plan, network, cluster, profile)


def plan_for(
    network: Network | str,
    cluster: Cluster | str | Path,
    profile: Profile | None = None,
    *,
    objective: str = "latency",
    strategy: str = "auto",
    home: str = "",
) -> Planned:
    """Return the plan of a strategy (`auto`: the fastest of all) for latency or throughput, within every device's
    memory.

    `home`: the device that has the inputs; empty: they are at hand wherever they are read.
    """
    network, cluster = network_of(network), cluster_of(cluster)
    profile = profile or estimate_cluster(network, cluster)
    task, named_objective = inference_task(network, cluster, profile, home), objective_named(objective)
    pricer = Pricer(
        task, named_objective,
        once=lambda plan: _price_alone(plan, network, cluster, profile),
        steady=lambda plan: _steady(plan, network, cluster, profile),
    )  # fmt: skip
    if strategy == "auto":
        ranked = inference_candidates(task, pricer)
    else:
        ranked = inference_plans(strategy, task, pricer)
    best = ranked[0]
    if best.plan is None:
        reasons = "\n".join(f"  {candidate.name}: {candidate.reason}" for candidate in ranked)
        raise BadPlan(
            f"No plan for inference of {network.name} fits cluster {cluster.name}:\n{reasons}",
            hint=f"Use more devices, or {MORE_MEMORY}.",
        )
    runners_up = tuple(
        resolve(candidate.plan, network, cluster) for candidate in ranked[1:] if candidate.plan is not None
    )
    return Planned(resolve(best.plan, network, cluster), ranked, runners_up, named_objective)


def inference_table(planned: Planned, network: Network) -> list[dict[str, Any]]:
    """Return the candidates as a table, the fastest first: seconds, samples a second, and how often devices wait for
    each other."""
    rows: list[dict[str, Any]] = []
    for candidate in planned.candidates:
        row: dict[str, Any] = {"name": candidate.name, "seconds_per_sample": None, "reason": candidate.reason}
        if candidate.plan is not None:
            row["seconds_per_sample"] = candidate.seconds
            row["samples_per_second"] = 1.0 / candidate.seconds if candidate.seconds else None
            row |= sync_points(candidate.plan, network).to_dict()
            row["devices"] = list(candidate.plan.devices)
            row["plan"] = candidate.plan.to_dict()
        rows.append(row)
    return rows


def refuse_beside_objective(options: dict[str, object]) -> None:
    """Refuse options that only matter in training: with an objective they would be ignored."""
    conflicting = [option for option, value in options.items() if value not in (None, False, "")]
    if conflicting:
        raise BadValue(
            f"{' and '.join(conflicting)} cannot be given with --for: a plan for inference decides that.",
            hint="Leave that out, or --for.",
        )
