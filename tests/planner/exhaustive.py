"""Every pipeline of a small instance, one after another, priced as ASTEROID writes it (Eq. 3-8): slow, and without the
arrays, bounds and fronts of `hybrid`, which is checked against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network, Op, TensorSpec, WeightSpec
from manyhands.facts.profile import Profile
from manyhands.planner.context import Batch, by_memory
from manyhands.planner.pipeline_stages import PlannedStage


@dataclass(frozen=True)
class PricedStep:
    """A stage or a communication between two: seconds of one micro-batch, and of the all-reduce at the end."""

    forward: float
    backward: float
    reduce: float = 0.0

    @property
    def both(self) -> float:
        return self.forward + self.backward


def round_seconds(steps: Sequence[PricedStep], micro_batches: int) -> float:
    """Eq. 4-6: the latency of a round."""
    before = [0.0]
    down = [0.0]
    for step in steps:
        before.append(before[-1] + step.both)
        down.append(down[-1] + step.backward)
    dominant = max(range(len(steps)), key=lambda s: micro_batches * steps[s].both + before[s])
    executing = micro_batches * steps[dominant].both + before[dominant]
    waiting = [sum(step.forward for step in steps[:s]) for s in range(len(steps))]
    return max(waiting[s] + (executing - before[s]) + step.reduce for s, step in enumerate(steps))


class Exhaustive:
    """All pipelines of a small network on a few devices."""

    def __init__(self, network: Network, cluster: Cluster, profile: Profile, batch: Batch) -> None:
        self.network, self.cluster, self.profile, self.batch = network, cluster, profile, batch
        self.names = by_memory(cluster)

    def times(self, device: str, first: int, last: int, samples: int) -> tuple[float, float]:
        profile = self.profile.of(device)
        seconds = [profile.layer_seconds(layer, samples) for layer in range(first, last)]
        return sum(ahead for ahead, _ in seconds), sum(back for _, back in seconds)

    def memory(self, first: int, last: int, samples: int, ahead: int) -> float:
        ops, slots = self.ops(first, last), self.batch.optimizer_slots
        if not self.has_backward(first, last):
            ahead = 1
        static = sum(w.bytes * (2 + slots if w.trainable else 1) for w in self.weights(first, last))
        received = sum(tensor.bytes_per_sample for tensor in self.crossing(first))
        returned = sum(tensor.bytes_per_sample for tensor in self.crossing(last) if tensor.differentiable)
        fixed = static + ahead * sum(op.saved_fixed_bytes for op in ops)
        trained = [[self.network.weights[name] for name in op.weights] for op in ops]
        heaviest = max(sum(weight.bytes for weight in weights if weight.trainable) for weights in trained)
        fixed += max(self.batch.count > 1, slots) * heaviest
        saved = sum(op.saved_bytes for op in ops) + received
        return fixed + samples * (ahead * saved + max(returned, *(op.moved_bytes for op in ops)))

    def has_backward(self, first: int, last: int) -> bool:
        return any(self.network.tensors[name].differentiable for op in self.ops(first, last) for name in op.outputs)

    def ops(self, first: int, last: int) -> tuple[Op, ...]:
        layers = self.network.layers
        return self.network.ops[layers[first].first : layers[last - 1].last]

    def weights(self, first: int, last: int) -> list[WeightSpec]:
        layers = self.network.layers
        names = self.network.weights_of(layers[first].first, layers[last - 1].last)
        return [self.network.weights[name] for name in names]

    def crossing(self, layer: int) -> tuple[TensorSpec, ...]:
        return self.network.cut(layer) if 0 < layer < len(self.network.layers) else ()

    def shares(self, first: int, last: int, devices: Sequence[str], ahead: int) -> tuple[int, ...] | None:
        """Return the share whose slowest device is fastest; None: none fits in memory."""
        samples = self.batch.samples
        cuts = combinations(range(1, samples), len(devices) - 1)
        best: tuple[float, tuple[int, ...]] | None = None
        for inside in cuts:
            share = tuple(b - a for a, b in pairwise((0, *inside, samples)))
            budgets = [self.cluster.device(device).memory_bytes for device in devices]
            if any(self.memory(first, last, y, ahead) > most for y, most in zip(share, budgets)):
                continue
            slowest = max(sum(self.times(d, first, last, y)) for y, d in zip(share, devices))
            if best is None or slowest < best[0] - 1e-12:
                best = slowest, share
        return None if best is None else best[1]

    def step(self, first: int, last: int, devices: Sequence[str], share: Sequence[int]) -> PricedStep:
        times = [self.times(d, first, last, y) for d, y in zip(devices, share)]
        ahead, back = max(forward for forward, _ in times), max(backward for _, backward in times)
        count, cluster = len(devices), self.cluster
        tied = self.tied_seconds(first, last, devices)
        if count == 1:
            return PricedStep(ahead, back, tied)
        rate = min(cluster.bytes_per_second_between(a, b) for a in devices for b in devices if a != b)
        delay = max(cluster.link_between(a, b).delay_seconds for a in devices for b in devices if a != b)
        if self.batch.is_synchronised:
            norms = [op for op in self.ops(first, last) if op.statistics]
            going_back = [op for op in norms if self.network.tensors[op.outputs[0]].differentiable]
            extra, extra_back = (
                len(ops) * delay + 2 * sum(4 * op.statistics for op in ops) * (count - 1) / rate
                for ops in (norms, going_back)
            )
            ahead, back = ahead + extra, back + extra_back
        weights = sum(weight.bytes for weight in self.trained(first, last) if not self.is_read(weight, 0, first, last))
        wait = 2 * delay if weights else 0.0
        return PricedStep(ahead, back, 2 * (count - 1) / count * weights / rate + wait + tied)

    def trained(self, first: int, last: int) -> list[WeightSpec]:
        return [weight for weight in self.weights(first, last) if weight.trainable]

    def is_read(self, weight: WeightSpec, start: int, first: int, last: int) -> bool:
        """Whether a layer from `start` on reads the weight that is not among layers [first, last)."""
        layers = self.network.layers
        return any(weight.name in layers[n].weights for n in range(start, len(layers)) if not first <= n < last)

    def tied_seconds(self, first: int, last: int, devices: Sequence[str]) -> float:
        """Adding up the gradients of weights that later stages read too, at the first stage that reads them."""
        weights = [
            weight.bytes
            for weight in self.trained(first, last)
            if self.is_read(weight, last, first, last) and weight not in (self.weights(0, first) if first else [])
        ]
        if not weights:
            return 0.0
        between, link, others = self.cluster.bytes_per_second_between, self.cluster.link_between, self.cluster.names
        pairs = [pair for a in devices for b in others if a != b for pair in ((a, b), (b, a))]
        rate, delay = min(between(*pair) for pair in pairs), max(link(*pair).delay_seconds for pair in pairs)
        count = len(devices) + 1
        return 2 * (count - 1) / count * sum(weights) / rate + 2 * delay

    def parts(self, devices: Sequence[str]) -> list[tuple[float, float]]:
        """Return the part of a cut that each device has: by its speed over the whole network."""
        samples, layers = self.batch.samples, len(self.network.layers)
        speeds = [1 / sum(self.times(d, 0, layers, samples)) for d in devices]
        points = [0.0]
        for speed in speeds:
            points.append(points[-1] + speed / sum(speeds))
        return list(pairwise(points))

    def cut(self, layer: int, upstream: Sequence[str], downstream: Sequence[str]) -> PricedStep:
        cluster = self.cluster
        forward = sum(tensor.bytes_per_sample for tensor in self.crossing(layer)) * self.batch.samples
        back = sum(t.bytes_per_sample for t in self.crossing(layer) if t.differentiable) * self.batch.samples
        seconds, delay = [], 0.0
        for size, senders, receivers in ((forward, upstream, downstream), (back, downstream, upstream)):
            ups, downs, links = dict.fromkeys(senders, 0.0), dict.fromkeys(receivers, 0.0), [0.0]
            for (a, (low, high)), (b, (start, end)) in product(
                zip(senders, self.parts(senders)), zip(receivers, self.parts(receivers))
            ):
                part = min(high, end) - max(low, start)
                if part > 1e-12:
                    link = cluster.link_between(a, b)
                    delay = max(delay, link.delay_seconds)
                    links.append(part / link.bytes_per_second)
                    ups[a] += part / cluster.device(a).up_bytes_per_second
                    downs[b] += part / cluster.device(b).down_bytes_per_second
            seconds.append(size * max(*ups.values(), *downs.values(), *links))
        return PricedStep(seconds[0] + delay, seconds[1] + delay if seconds[1] else 0.0)

    def all(self) -> Iterator[tuple[float, tuple[PlannedStage, ...]]]:
        layers, batch = len(self.network.layers), self.batch
        for count in range(1, min(layers, len(self.names)) + 1):
            for inside in combinations(range(1, layers), count - 1):
                cuts = list(pairwise((0, *inside, layers)))
                for groups in self.groups(0, count):
                    stages = []
                    for number, ((first, last), devices) in enumerate(zip(cuts, groups)):
                        share = self.shares(first, last, devices, batch.ahead(count - number))
                        if share is None:
                            break
                        stages.append(PlannedStage(first, last, devices, share))
                    else:
                        yield self.price(stages), tuple(stages)

    def groups(self, start: int, count: int) -> Iterator[list[tuple[str, ...]]]:
        if count == 0:
            yield []
            return
        for a in range(start, len(self.names)):
            for b in range(a + 1, len(self.names) + 1):
                for later in self.groups(b, count - 1):
                    yield [self.names[a:b], *later]

    def price(self, stages: Sequence[PlannedStage]) -> float:
        steps = [self.step(stage.first, stage.last, stage.devices, stage.samples) for stage in stages[:1]]
        for before, stage in pairwise(stages):
            steps.append(self.cut(stage.first, before.devices, stage.devices))
            steps.append(self.step(stage.first, stage.last, stage.devices, stage.samples))
        return round_seconds(steps, self.batch.count)
