"""Plans for inference whose devices never wait for each other inside a stage: one device, samples, pipeline, split."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from manyhands.facts.errors import BadPlan, OutOfMemory
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.facts.units import format_bytes
from manyhands.planner.pricing import Named, alike
from manyhands.planner.simple import single
from manyhands.planner.task import Task
from manyhands.schedule.shortage import DIVIDED_LAYERS, MORE_MEMORY

MOST_SAMPLES = 64
"""The most samples of a micro-batch that is shared by samples."""
MOST_STAGES = 12
MOST_IN_ORDER = 8
"""The most devices that a pipeline tries in any order; with more, only in order of speed."""


_State = tuple[int, frozenset[str], str]
"""The number of layers assigned, the devices used, and the last of these."""
_Chosen = tuple[float, tuple[tuple[int, str], ...]]
"""The slowest stage or transfer, and the end and device of each stage."""


def singles(task: Task) -> Iterator[Named]:
    """Yield each kind of device alone."""
    seen_kinds: set[int] = set()
    for name, kind in sorted(alike(task).items(), key=lambda entry: task.step_seconds(entry[0], 1)):
        if kind not in seen_kinds:
            seen_kinds.add(kind)
            yield f"single on {name}", single(task, name)


def sample_shares(task: Task) -> Iterator[Named]:
    """Yield micro-batches of several samples, divided so that the slowest device is fastest; some devices may get
    none."""
    count = len(task.cluster.names)
    sizes = [size for size in (count * 2**power for power in range(4)) if size <= max(count, MOST_SAMPLES)]
    for size in sizes:
        counts = fair_samples(task, size)
        names = [name for name, count in counts.items() if count]
        if len(names) < 2:
            continue
        share = BySamples(tuple(counts[name] for name in names))
        stage = Stage((0, len(task.network.layers)), tuple(names), share)
        plan = Plan(
            network=task.network.name, batch_size=size, stages=(stage,), order="stream", optimizer_slots=0,
            homes=dict.fromkeys(task.network.inputs, task.home) if task.home else {},
        )  # fmt: skip
        yield f"{size} samples over {len(names)}", plan


def fair_samples(task: Task, size: int) -> dict[str, int]:
    """Return device -> samples. Each next sample goes to the device that would finish it first, which is optimal where
    time only grows."""
    counts = dict.fromkeys(task.cluster.names, 0)
    ready = {name: task.step_seconds(name, 1) for name in counts}
    for _ in range(size):
        name = min(ready, key=ready.__getitem__)
        counts[name] += 1
        ready[name] = task.step_seconds(name, counts[name] + 1)
    return counts


def splits(task: Task) -> Iterator[Named]:
    """Yield two stages for every cut: the first at home, which has the input, the second on any other device.

    One side may do everything: at home, or elsewhere with the input sent there.
    """
    network, layers = task.network, len(task.network.layers)
    home = task.home or task.cluster.names[0]
    yield f"split: all on {home}", single(task, home)
    for name in task.cluster.names:
        if name == home:
            continue
        for cut in range(1, layers):
            stages = [Stage((0, cut), (home,)), Stage((cut, layers), (name,))]
            yield f"split before {network.layers[cut].name}, {home} to {name}", task.plan(stages, 1)
        if task.home:
            yield f"split: all on {name}", single(task, name)


def pipelines(task: Task) -> Iterator[Named]:
    """Yield pipelines of one device per stage, for two stages, three and so on: cuts, devices and their order make the
    slowest stage or transfer as fast as possible."""
    counts = range(2, min(len(task.cluster.names), len(task.network.layers), MOST_STAGES) + 1)
    has_room = False
    for count in counts:
        stages = balanced_pipeline(task, count)
        if stages is not None:
            has_room = True
            yield f"pipeline of {count}", task.plan(stages, 1)
    if counts and not has_room:
        raise _no_room(task)


def _no_room(task: Task) -> OutOfMemory:
    """Return the error that says why no pipeline fits: all weights and those of the largest layer, beside the devices'
    memory."""
    weights, sizes = _weight_bytes(task), [device.memory_bytes for device in task.cluster.devices]
    size, place = max((from_here[1], place) for place, from_here in enumerate(weights))
    layer = f"layer {place} ({task.network.layers[place].name})"
    return OutOfMemory(
        f"No pipeline of {task.network.name} fits cluster {task.cluster.name}: its weights are "
        f"{format_bytes(weights[0][-1])}, {format_bytes(size)} of them in {layer}; "
        f"the devices have {format_bytes(sum(sizes))}, at most {format_bytes(max(sizes))} each.",
        hint=f"Use {DIVIDED_LAYERS}, more devices, or {MORE_MEMORY}.",
    )


def balanced_pipeline(task: Task, count: int) -> list[Stage] | None:
    """Return the pipeline of `count` stages whose slowest stage or transfer is fastest, or None if none fits in
    memory."""
    names = sorted(task.cluster.names, key=lambda name: task.step_seconds(name, 1))
    kinds = alike(task)
    layers = len(task.network.layers)
    if len(names) > MOST_IN_ORDER:
        names = names[:count]
    running = {name: _running(task, name) for name in names}
    weights = _weight_bytes(task)
    cuts = [task.network.cut_bytes(layer) for layer in range(layers + 1)]
    fixed_order = len(task.cluster.names) > MOST_IN_ORDER

    best: dict[_State, _Chosen] = {(0, frozenset(), ""): (0.0, ())}
    for place in range(count):
        further: dict[_State, _Chosen] = {}
        for (first, used, before), (slowest, stages) in best.items():
            for name in _next_devices(names, used, kinds, place if fixed_order else None):
                arriving = _transfer(task, before, name, cuts[first]) if before else 0.0
                lasts = (layers,) if place == count - 1 else range(first + 1, layers - (count - place - 1) + 1)
                for last in lasts:
                    if weights[first][last - first] > task.cluster.device(name).memory_bytes:
                        break
                    slowest_now = max(slowest, arriving, running[name][last] - running[name][first])
                    key = (last, used | {name}, name)
                    if slowest_now < further.get(key, (inf, ()))[0]:
                        further[key] = (slowest_now, (*stages, (last, name)))
        best = further
    if not best:
        return None
    _, chosen = min(best.values(), key=lambda entry: entry[0])
    starts = [0, *(last for last, _ in chosen[:-1])]
    return [Stage((first, last), (name,)) for first, (last, name) in zip(starts, chosen)]


def _next_devices(names: list[str], used: frozenset[str], kinds: dict[str, int], place: int | None) -> Iterator[str]:
    """Yield the devices that may come next, of equal ones the first; `place` allows only the device at this place."""
    if place is not None:
        yield names[place]
        return
    seen_kinds: set[int] = set()
    for name in names:
        if name not in used and kinds[name] not in seen_kinds:
            seen_kinds.add(kinds[name])
            yield name


def _running(task: Task, name: str) -> list[float]:
    """Return [n] -> seconds of the first n layers."""
    sums = [0.0]
    for layer in range(len(task.network.layers)):
        sums.append(sums[-1] + task.layer_seconds(name, layer, 1))
    return sums


def _weight_bytes(task: Task) -> list[list[int]]:
    """Return [first][n] -> bytes of the weights that the n layers from the first on read, each weight once."""
    weights, layers = task.network.weights, task.network.layers
    table = []
    for first in range(len(layers)):
        counted: set[str] = set()
        sums = [0]
        for layer in layers[first:]:
            new = set(layer.weights) - counted
            counted |= new
            sums.append(sums[-1] + sum(weights[name].bytes for name in new))
        table.append(sums)
    return table


def _transfer(task: Task, source: str, target: str, size: int) -> float:
    """Return how long a cut keeps a link busy: the delay is waited for, but does not hold up the next sample."""
    return size / task.cluster.bytes_per_second_between(source, target)


def one_sample_only(task: Task) -> BadPlan:
    return BadPlan(
        f"A single sample of {task.network.name} cannot be shared by samples.",
        hint="Ask for objective='throughput' (--for throughput), or share it by tiles, channels or as a pipeline.",
    )
