"""Baselines: how other published systems would plan the same training, as plans for the same executor (ASTEROID §5.1).

data parallel      every device has the whole network, samples by speed, gradients added up by all
EDDL               the same, gradients added up by the fastest device, which sends the weights back: 2(N-1)P bytes
                   through one port and none of it beside computing, as ASTEROID's data parallel seems to have run
pipeline parallel  one device per stage, balanced for their speeds, 1F1B
GPipe              one device per stage, balanced as if all were alike, all forward before all backward
PipeDream          replicated stages with the least slowest one; devices alike, memory unlimited, every micro-batch
                   paying for an all-reduce, as its planner was published; run synchronously with 1F1B
DAPPLE             replicated stages with the least round, devices alike, memory unlimited; every device takes part,
                   and one sub-pipeline is kept for each place, as its planner was published
DAPPLE, dropping   the same by our search: devices may be left out, and all sub-pipelines that may win are kept
HetPipe            groups of devices, each with the whole network as a pipeline of its own, and a parameter server
                   between them. It is asynchronous: weights are stale, so it is priced here and reported apart

Each gets the number of micro-batches that suits it best. Those that treat devices as alike plan with their average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, ManyhandsError, OutOfMemory
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing
from manyhands.planner.context import Batch, PlanningContext, by_memory
from manyhands.planner.hybrid import Search, batches, coarse_cuts, pipelines
from manyhands.planner.simple import balanced_cuts, one_each, samples, usual_micro_batches
from manyhands.planner.steps import Steps
from manyhands.planner.task import Price, Task, fitting

MOST_TRIED = 5
"""The numbers of micro-batches that a baseline's plan is simulated with."""


def data_parallel(task: Task, price: Price) -> Plan:
    plan = fitting("data parallel", samples, task, price).plan
    assert plan is not None
    return plan


def eddl(task: Task, price: Price) -> Plan:
    """Return EDDL's plan. The leader's port carries the gradients and weights of all devices."""

    def led(subtask: Task) -> Plan:
        plan = samples(subtask)
        stage = plan.stages[0]
        order = sorted(
            range(len(stage.devices)), key=lambda d: subtask.step_seconds(stage.devices[d], subtask.batch_size)
        )
        share = stage.share
        assert isinstance(share, BySamples)
        devices = tuple(stage.devices[d] for d in order)
        counts = BySamples(tuple(share.samples[d] for d in order))
        changed = msgspec.structs.replace(stage, devices=devices, share=counts, reduce="gateway")
        return msgspec.structs.replace(plan, stages=(changed,))

    best = fitting("EDDL", led, task, price).plan
    assert best is not None
    return best


def pipeline_parallel(task: Task, price: Price) -> Plan:
    return _best_cut(task, price, one_each, "1f1b")


def gpipe(task: Task, price: Price) -> Plan:
    """Return GPipe's plan, cut by work alone: it ignores differences between devices and the bytes that cross the
    cuts."""

    def even(subtask: Task) -> Plan:
        names = by_memory(subtask.cluster)[: len(subtask.network.layers)]
        micro_batches = usual_micro_batches(subtask, len(names))
        alike = average(subtask).of("any")
        size = subtask.batch_size // micro_batches
        costs = [sum(alike.layer_seconds(layer, size)) for layer in range(len(subtask.network.layers))]
        ends = balanced_cuts([costs] * len(names))
        stages = [Stage((a, b), (name,)) for name, (a, b) in zip(names, pairwise([0, *ends]))]
        return subtask.plan(stages, micro_batches)

    return _best_cut(task, price, even, "gpipe")


def pipedream(task: Task, price: Price) -> Plan:
    return _best_cut(task, price, _least_slowest_stage, "1f1b")


def dapple(task: Task, price: Price) -> Plan:
    return _best_cut(task, price, _least_round, "1f1b")


def _least_round(task: Task) -> Plan:
    """Return DAPPLE's plan by its dynamic program, whose round is that of Eq. 4-6: over devices that are all equal and
    have unlimited memory, and all of which take part."""
    alike, everywhere = _alike(task)
    count = usual_micro_batches(task, len(alike.devices))
    batch = replace(_settings(task), samples=task.batch_size // count, count=count)
    context = PlanningContext(task.network, alike, everywhere, batch.samples, batch.optimizer_slots)
    search = Search(Steps(context, batch), keep_fronts=False, may_leave_out=False)
    rough = search.best(coarse_cuts(task.network))
    best = search.best(bound=rough.seconds) if rough is not None else search.best()
    if (pipeline := best or rough) is None:
        raise BadPlan(
            f"A micro-batch of {batch.samples} sample(s) of {task.network.name} cannot be shared by all "
            f"{len(alike.devices)} devices."
        )
    return _on_real_devices(pipeline.plan(task.network), task)


def dapple_dropping(task: Task, price: Price) -> Plan:
    return _best_cut(task, price, _least_round_dropping, "1f1b")


def _least_round_dropping(task: Task) -> Plan:
    """Return the plan of a stronger DAPPLE: by our own search over devices that are all equal and have unlimited
    memory."""
    alike, everywhere = _alike(task)
    count = usual_micro_batches(task, len(alike.devices))
    pipeline = pipelines(
        task.network, alike, everywhere, task.batch_size, micro_batches=count, like=_settings(task), may_be_alone=False
    )[0]
    return _on_real_devices(pipeline.plan(task.network), task)


def _settings(task: Task) -> Batch:
    return Batch(1, 1, task.optimizer_slots, is_synchronised=task.batch_norm == "synchronised", warm_up=task.warm_up)


def _on_real_devices(plan: Plan, task: Task) -> Plan:
    """Return a plan over equal devices with the cluster's own in their place, in order of memory."""
    real = {f"any{number}": name for number, name in enumerate(by_memory(task.cluster))}
    stages = tuple(
        msgspec.structs.replace(stage, devices=tuple(real[name] for name in stage.devices)) for stage in plan.stages
    )
    return msgspec.structs.replace(plan, stages=stages)


SYNCHRONOUS: dict[str, Callable[[Task, Price], Plan]] = {
    "data parallel": data_parallel, "EDDL": eddl, "pipeline parallel": pipeline_parallel, "GPipe": gpipe,
    "PipeDream": pipedream, "DAPPLE": dapple, "DAPPLE, dropping": dapple_dropping,
}  # fmt: skip
"""Baselines whose result equals that of one device: they are candidates of our planner too."""


def _best_cut(task: Task, price: Price, make: Callable[[Task], Plan], order: str) -> Plan:
    """Return a baseline's plan with the number of micro-batches that simulates fastest, or any plan if none fits in
    memory."""
    counts = [batch.count for batch in batches(task.network, task.batch_size, Batch(1, 1), task.micro_batches)]
    usual = sorted(counts, key=lambda count: abs(count - 4 * len(task.cluster.devices)))
    best: tuple[float, Plan] | None = None
    refused: Plan | None = None
    for tried, count in enumerate([*usual[:MOST_TRIED], *sorted(usual[MOST_TRIED:])]):
        if tried >= MOST_TRIED and best is not None:
            break
        try:
            plan = msgspec.structs.replace(make(replace(task, micro_batches=count)), order=order)
            plan = resolve(plan, task.network, task.cluster)
        except ManyhandsError:
            continue  # another number may work
        try:
            seconds = price(plan)
        except OutOfMemory:
            refused = plan
            continue
        except ManyhandsError:
            continue
        if best is None or seconds < best[0]:
            best = seconds, plan
    if best is not None:
        return best[1]
    if refused is None:
        raise BadPlan(f"No number of micro-batches suits {task.network.name} cut this way.")
    return refused


def average(task: Task) -> Profile:
    """Return the mean of all devices' times, under the name `any`."""
    profiles = [task.profile.of(name) for name in task.cluster.names]
    first = profiles[0]
    sizes = sorted({timing.samples for profile in profiles for timing in profile.ladders[0]})
    layers = []
    for number, layer in enumerate(first.layers):
        ladder = []
        for size in sizes:
            times = [profile.layer_seconds(number, size) for profile in profiles]
            ladder.append(Timing(size, sum(t[0] for t in times) / len(times), sum(t[1] for t in times) / len(times)))
        layers.append(LayerTiming(layer.layer, tuple(ladder)))
    mean: DeviceProfile = msgspec.structs.replace(first, layers=tuple(layers), device="any")
    return Profile({"any": mean})


def _alike(task: Task) -> tuple[Cluster, Profile]:
    """Return a cluster of as many equal devices, with the slowest ports of all and unlimited memory, and their
    profile."""
    cluster = task.cluster
    up = min(device.up_bytes_per_second for device in cluster.devices)
    down = min(device.down_bytes_per_second for device in cluster.devices)
    average_device = msgspec.structs.replace(
        cluster.devices[0], host="", site="", memory_bytes=10**18, up_bytes_per_second=up, down_bytes_per_second=down
    )
    devices = tuple(
        msgspec.structs.replace(average_device, name=f"any{number}") for number in range(len(cluster.devices))
    )
    mean = average(task).of("any")
    return Cluster("alike", devices, cluster.link), Profile({device.name: mean for device in devices})


def _least_slowest_stage(task: Task) -> Plan:
    """Return PipeDream's plan by its dynamic program: A(j, m) = min over i, m' of max(A(i, m - m'), 2·a_i/b, T(i -> j,
    m'))."""
    network, count, layers = task.network, len(task.cluster.devices), len(task.network.layers)
    micro_batches = usual_micro_batches(task, count)
    size = task.batch_size // micro_batches
    profile = average(task).of("any")
    names = by_memory(task.cluster)
    between = task.cluster.bytes_per_second_between
    rate = min((between(a, b) for a in names for b in names if a != b), default=inf)
    times, weights = [0.0], [0]
    for number, layer in enumerate(network.layers):
        times.append(times[-1] + sum(profile.layer_seconds(number, size)))
        trained = sum(network.weights[name].bytes for name in layer.weights if network.weights[name].trainable)
        weights.append(weights[-1] + trained)
    cuts = [0.0] + [2 * network.cut_bytes(layer, size) / rate for layer in range(1, layers)] + [0.0]

    def stage(i: int, j: int, m: int) -> float:
        return max(times[j] - times[i], 2 * (m - 1) * (weights[j] - weights[i]) / rate) / m

    best = {(j, m): (stage(0, j, m), -1, 0) for j in range(1, layers + 1) for m in range(1, count + 1)}
    for j in range(2, layers + 1):
        for m in range(2, count + 1):
            for i in range(1, j):
                if cuts[i] >= best[j, m][0]:
                    continue
                for replicas in range(1, min(m, size + 1)):
                    slowest = max(best[i, m - replicas][0], cuts[i], stage(i, j, replicas))
                    if slowest < best[j, m][0]:
                        best[j, m] = (slowest, i, replicas)
    stages: list[tuple[int, int, int]] = []
    j, m = layers, count
    while j:
        _, i, replicas = best[j, m]
        stages.append((max(i, 0), j, replicas if i >= 0 else m))
        j, m = max(i, 0), m - replicas
    planned, place = [], 0
    for first, last, width in reversed(stages):
        devices = names[place : place + width]
        place += width
        planned.append(Stage((first, last), devices, _evenly(size, width)))
    return msgspec.structs.replace(task.plan(planned, micro_batches), warm_up="P-p")


def _evenly(size: int, count: int) -> BySamples | Single:
    if count == 1:
        return Single()
    if size < count:
        raise BadPlan(
            f"A micro-batch of {size} sample(s) cannot be shared by {count} devices: each takes at least one."
        )
    return BySamples(tuple(size // count + (place < size % count) for place in range(count)))


@dataclass(frozen=True)
class VirtualWorker:
    """A group of devices that trains the whole network as a pipeline of its own."""

    plan: Plan
    seconds: float
    samples: int


@dataclass(frozen=True)
class HetPipe:
    """Virtual workers and a parameter server on one of their devices."""

    workers: tuple[VirtualWorker, ...]
    seconds: float
    """Seconds of a whole mini-batch, with all virtual workers at work and the server's port shared."""
    bytes: int


def hetpipe(task: Task, price_on: Callable[[Plan, Cluster], float]) -> HetPipe:
    """Return the best of several ways to make groups of equal speed; each wave ends with a push and a pull of all
    weights.

    Virtual workers do not wait for each other, so a mini-batch takes what the server's port or the slowest of them,
    with its share, takes; staleness is not priced.
    """
    names = by_memory(task.cluster)
    weights = task.network.trained_bytes
    best: HetPipe | None = None
    for count in range(1, len(names) + 1):
        groups = [names[number::count] for number in range(count)]  # of each kind to each group, in turn
        try:
            grouping = _virtual_workers(task, groups, weights, price_on)
        except ManyhandsError:
            continue
        if best is None or grouping.seconds < best.seconds:
            best = grouping
    if best is None:
        raise BadPlan(f"No grouping of {len(names)} devices into virtual workers can train {task.network.name}.")
    return best


def _virtual_workers(
    task: Task, groups: list[tuple[str, ...]], weights: int, price_on: Callable[[Plan, Cluster], float]
) -> HetPipe:
    speeds = [sum(1 / task.step_seconds(name, max(1, task.batch_size // 8)) for name in group) for group in groups]
    parts = [task.batch_size * speed / sum(speeds) for speed in speeds]
    workers = []
    for group, part in zip(groups, parts):
        cluster = task.cluster.with_devices("group", tuple(task.cluster.device(name) for name in group))
        size = max(1, round(part / 8) * 8 if part >= 8 else round(part))
        subtask = replace(task, cluster=cluster, batch_size=size, micro_batches=None)
        plan = _best_cut(subtask, lambda plan, at=cluster: price_on(plan, at), one_each, "1f1b")  # type: ignore[misc]
        workers.append(VirtualWorker(plan, price_on(resolve(plan, task.network, cluster), cluster), size))
    each = max(worker.seconds * part / worker.samples for worker, part in zip(workers, parts))
    moved = 2 * len(groups) * weights if len(groups) > 1 else 0
    server = task.cluster.device(task.fastest())
    port = min(server.up_bytes_per_second, server.down_bytes_per_second, task.cluster.link.bytes_per_second)
    pipelined = sum(_crossing_bytes(worker.plan, task) * part / worker.samples for worker, part in zip(workers, parts))
    return HetPipe(tuple(workers), max(each, moved / 2 / port), round(moved + pipelined))


def _crossing_bytes(plan: Plan, task: Task) -> float:
    """Return the bytes that a pipeline's cuts carry for its mini-batch, both ways."""
    ends = [stage.layers[1] for stage in plan.stages[:-1]]
    return sum(2 * task.network.cut_bytes(task.network.find_layer(end), plan.batch_size) for end in ends)


def volume(plan: Plan, task: Task) -> int:
    """Return the bytes a mini-batch moves (Eq. 2): all-reduces inside stages, and transfers over the cuts between
    them."""
    network = task.network
    total = _crossing_bytes(plan, task)
    holders: dict[str, set[str]] = {}
    for stage in plan.stages:
        first, last = (network.find_layer(layer) for layer in stage.layers)
        for name in {name for layer in network.layers[first:last] for name in layer.weights}:
            holders.setdefault(name, set()).update(stage.devices)
    for name, devices in holders.items():
        total += 2 * (len(devices) - 1) * network.weights[name].bytes * network.weights[name].trainable
    return round(total)


def every_baseline(task: Task, price: Price) -> Iterator[tuple[str, Plan | ManyhandsError]]:
    """Yield each synchronous baseline with its plan, or with the error that says why it has none."""
    for name, make in SYNCHRONOUS.items():
        try:
            yield name, resolve(make(task, price), task.network, task.cluster)
        except ManyhandsError as error:
            yield name, error
