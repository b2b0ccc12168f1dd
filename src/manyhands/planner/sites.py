"""Sites as replicas: every site has the whole network, as a pipeline of its own or by samples, and takes samples of
every micro-batch in proportion to its speed.

    stage 0      paris: pi-1, pi-2   rome: pi-4          samples 0-5 stay in paris, 6-8 in rome
    stage 1      paris: pi-3         rome: pi-5          from stage to stage nothing crosses an uplink

It is one plan: each stage is shared by samples over the sites, listed in one order, so that a site's samples are the
same in every stage. What crosses the uplinks are the sums of gradients, and of statistics where batch norms are
synchronised, each through the groups of `planner.placing`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from manyhands.facts.errors import BadPlan, ManyhandsError
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.planner.refining import refined
from manyhands.planner.simple import balanced_cuts, divisor_near, proportional
from manyhands.planner.task import PlanCandidate, Price, Task, fitting

STAGES = (1, 2, 3, 4, 6, 8)
"""The numbers of stages that are tried."""
MICRO_BATCHES = (4, 2)
"""Micro-batches for each stage that are tried."""
STAGES_OF_MANY, MICRO_BATCHES_OF_MANY = (1, 2, 4), (2,)
MOST_FEW = 128
"""The most devices with which all of them are tried; with more a simulation takes many seconds."""
MOST_REFINED = 64
"""The most devices with which the best plan's cuts are moved by single layers, since each place is simulated."""


def ranked_sites(task: Task, price: Price) -> list[PlanCandidate]:
    """Return plans with a replica in every site, simulated, the best first."""
    groups = site_groups(task)
    if len(groups) < 2:
        raise BadPlan(
            f"{task.cluster.name} has devices in {len(groups)} site(s); a replica in each takes two.",
            hint="Write `sites` in the cluster's file, and the `site` of each device.",
        )
    refusal: ManyhandsError | None = None
    ranked: list[PlanCandidate] = []
    for stages, micro_batches in _shapes(task, groups):

        def make(subtask: Task, stages: int = stages, usual: int = micro_batches) -> Plan:
            return replicas(subtask, groups, stages, subtask.micro_batches or usual)

        try:
            ranked.append(fitting("sites", make, task, price))
        except ManyhandsError as error:
            refusal = refusal or error
    if not ranked:
        assert refusal is not None
        raise refusal
    ranked.sort(key=lambda candidate: candidate.seconds)
    if len(task.cluster.devices) <= MOST_REFINED:
        ranked[0] = refined(ranked[0], task, price)
    return ranked


def site_groups(task: Task) -> list[list[str]]:
    """Return the devices of each outermost site; each device that is in none is a group."""
    groups: dict[str, list[str]] = defaultdict(list)
    for device in task.cluster.devices:
        path = task.cluster.tree.paths[device.site]
        groups[f"site {path[0].name}" if path else f"device {device.name}"].append(device.name)
    return list(groups.values())


def _shapes(task: Task, groups: list[list[str]]) -> Iterator[tuple[int, int]]:
    """Yield numbers of stages and of micro-batches: no more stages than the smallest site has devices."""
    most = min(len(task.network.layers), min(map(len, groups)))
    is_few = len(task.cluster.devices) <= MOST_FEW
    each_stage = MICRO_BATCHES if is_few else MICRO_BATCHES_OF_MANY
    for stages in STAGES if is_few else STAGES_OF_MANY:
        if stages > most:
            return
        counts = [each * stages for each in each_stage] if stages > 1 else [1]
        targets = [min(count, max(1, task.batch_size // len(groups))) for count in counts]
        yield from dict.fromkeys(
            (stages, task.micro_batches or divisor_near(task.batch_size, target)) for target in targets
        )


def replicas(task: Task, groups: list[list[str]], stages: int, micro_batches: int) -> Plan:
    """Return the plan in which every group has all stages."""
    size = task.batch_size // micro_batches
    if size < len(groups):
        raise BadPlan(
            f"A micro-batch of {size} sample(s) cannot be shared by {len(groups)} sites: each takes at least one.",
            hint="Use a larger batch, or fewer micro-batches.",
        )
    each = max(1, size * stages // len(task.cluster.devices))
    layers = range(len(task.network.layers))
    kinds = {id(task.profile.of(name)): name for name in task.cluster.names}
    seconds = {key: [task.layer_seconds(name, layer, each) for layer in layers] for key, name in kinds.items()}
    speed = {name: 1 / max(sum(seconds[id(task.profile.of(name))]), 1e-12) for name in task.cluster.names}
    mean = [sum(column) / len(seconds) for column in zip(*seconds.values())]
    bounds = [0, *balanced_cuts([mean] * stages)]
    parts = _at_least_one(size, [sum(speed[name] for name in group) for group in groups])
    devices: list[list[str]] = [[] for _ in range(stages)]
    samples: list[list[int]] = [[] for _ in range(stages)]
    for group, part in zip(groups, parts):
        by_speed = sorted(group, key=lambda name: -speed[name])
        for stage in range(stages):
            names = _dealt(by_speed, stage, stages)[:part]
            devices[stage] += names
            samples[stage] += _at_least_one(part, [speed[name] for name in names])
    planned = [
        Stage(layers_of, tuple(names), BySamples(tuple(counts)) if len(names) > 1 else Single())
        for layers_of, names, counts in zip(pairwise(bounds), devices, samples)
    ]
    return task.plan(planned, micro_batches)


def _dealt(by_speed: list[str], stage: int, stages: int) -> list[str]:
    """Return a stage's devices, dealt to and fro so that all stages are about as fast."""
    rounds = [by_speed[place : place + stages] for place in range(0, len(by_speed), stages)]
    dealt = []
    for number, names in enumerate(rounds):
        place = stage if number % 2 == 0 else stages - 1 - stage
        if place < len(names):
            dealt.append(names[place])
    return dealt


def _at_least_one(total: int, weights: list[float]) -> list[int]:
    """Return whole numbers in proportion to weights, none of them zero."""
    counts = (
        [1 + extra for extra in proportional(total - len(weights), weights)] if total > len(weights) else [1] * total
    )
    exact = proportional(total, weights)
    return exact if min(exact) >= 1 else counts
