"""Pipelines written by hand: `mh.pipeline_plan` completes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan
from manyhands.facts.keywords import settings_from, takes_settings
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, LayerName, Plan, Share, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.planner.context import by_memory
from manyhands.planner.simple import balanced_cuts, proportional
from manyhands.planner.task import Task
from manyhands.plans.settings import StepOptions, StepSettings
from manyhands.plans.simulating import cluster_of, network_of

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph


@takes_settings(StepSettings)
def pipeline_plan(
    graph: Graph | Network | str,
    cluster: Cluster | str | Path,
    cuts: Sequence[LayerName] | None = None,
    devices: Sequence[str | Sequence[str]] | None = None,
    shares: Sequence[Sequence[int] | None] | None = None,
    micro_batches: int = 1,
    *,
    batch_size: int = 32,
    profile: Profile | None = None,
    **options: Unpack[StepOptions],
) -> Plan:
    """Return a pipeline written by hand; what is left out is filled in.

    cuts           the layers, by number or name, at which a new stage starts; None: so that stages are balanced
    devices        for every stage a device, or several that share its samples; None: one each, in order of memory
    shares         for every stage how many samples of a micro-batch each of its devices takes, None where there is
                   one; None: by speed
    micro_batches  in how many parts a mini-batch goes through
    options        order, warm_up, batch_norm and optimizer_slots, as the plan keeps them (`StepSettings`)

    To have all of it chosen, ask for strategy="pipeline": mh.plan(graph, cluster, strategy="pipeline").
    """
    settings = settings_from(StepSettings, "pipeline_plan", options)
    network, machines = network_of(graph), cluster_of(cluster)
    if batch_size < 1 or micro_batches < 1 or batch_size % micro_batches:
        raise BadPlan(f"micro_batches is {micro_batches}; it must divide batch_size = {batch_size}.")
    times = profile or estimate_cluster(network, machines)
    task = Task(network, machines, times, batch_size, micro_batches, settings.order, settings.optimizer_slots)
    groups = _groups(devices, cuts, task)
    ends = _ends(cuts, groups, task)
    if shares is not None and len(shares) != len(groups):
        raise BadPlan(f"shares has {len(shares)} entries; there are {len(groups)} stages.")
    stages = []
    for number, ((first, last), group) in enumerate(zip(pairwise([0, *ends]), groups)):
        given = shares[number] if shares is not None else None
        stages.append(Stage((first, last), group, _share(given, group, first, last, task)))
    plan = Plan(
        network.name, batch_size, tuple(stages), micro_batches, settings.order, settings.warm_up, settings.batch_norm,
        optimizer_slots=settings.optimizer_slots,
        gradient_norm=settings.gradient_norm,
    )  # fmt: skip
    return resolve(plan, network, machines)


def _groups(
    devices: Sequence[str | Sequence[str]] | None, cuts: Sequence[LayerName] | None, task: Task
) -> list[tuple[str, ...]]:
    if devices is not None:
        groups = [(stage,) if isinstance(stage, str) else tuple(stage) for stage in devices]
        if cuts is not None and len(groups) != len(cuts) + 1:
            raise BadPlan(f"{len(cuts)} cuts make {len(cuts) + 1} stages; devices has {len(groups)} entries.")
        if not groups or not all(groups):
            raise BadPlan("devices has a stage without a device; every stage needs one.")
        return groups
    names = by_memory(task.cluster)
    count = len(cuts) + 1 if cuts is not None else min(len(names), len(task.network.layers))
    if count > len(names):
        raise BadPlan(
            f"{count - 1} cuts make {count} stages; cluster {task.cluster.name} has {len(names)} devices.",
            hint="Use fewer cuts or more devices.",
        )
    return [(name,) for name in names[:count]]


def _ends(cuts: Sequence[LayerName] | None, groups: list[tuple[str, ...]], task: Task) -> list[int]:
    layers = len(task.network.layers)
    if cuts is not None:
        starts = [task.network.find_layer(cut) for cut in cuts]
        if any(a >= b for a, b in pairwise([0, *starts, layers])):
            raise BadPlan(f"cuts are {list(cuts)}; they must increase, between layers 1 and {layers - 1}.")
        return [*starts, layers]
    if len(groups) > layers:
        raise BadPlan(f"{task.network.name} has {layers} layers; {len(groups)} stages are too many.")
    size = task.batch_size // (task.micro_batches or 1)
    costs = []
    for group in groups:
        each = [
            [1 / sum(task.profile.of(name).layer_seconds(layer, size)) for name in group] for layer in range(layers)
        ]
        costs.append([1 / sum(speeds) for speeds in each])
    return balanced_cuts(costs)


def _share(samples: Sequence[int] | None, group: tuple[str, ...], first: int, last: int, task: Task) -> Share:
    size = task.batch_size // (task.micro_batches or 1)
    if samples is not None:
        if len(samples) != len(group) or sum(samples) != size:
            raise BadPlan(
                f"A stage of {len(group)} device(s) has shares {list(samples)}; they must be {len(group)} numbers that "
                f"add up to the {size} samples of a micro-batch."
            )
        return BySamples(tuple(samples)) if len(group) > 1 else Single()
    if len(group) == 1:
        return Single()
    if size < len(group):
        raise BadPlan(f"A micro-batch of {size} sample(s) cannot be shared by {len(group)} devices.")
    profiles = [task.profile.of(name) for name in group]
    speeds = [1 / max(1e-12, sum(sum(p.layer_seconds(layer, size)) for layer in range(first, last))) for p in profiles]
    counts = [1 + extra for extra in proportional(size - len(group), speeds)]
    return BySamples(tuple(counts))
