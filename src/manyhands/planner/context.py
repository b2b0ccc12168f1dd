"""The planning context: the facts about devices and layers before anything is cut. It holds the order of the devices,
their speeds and memory, the links between them, and the time and bytes of every layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy
from numpy.typing import NDArray

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.network import Network, WeightSpec
from manyhands.facts.plan import WarmUp
from manyhands.facts.profile import DeviceProfile, Profile, Timing
from manyhands.planner.shares import Counts, Numbers

DeviceGroup = tuple[int, int]
"""An interval of the devices, in order of memory."""


@dataclass(frozen=True)
class Batch:
    """A way to cut a mini-batch into micro-batches, and the settings of a round."""

    samples: int
    """Samples of one micro-batch."""
    count: int
    optimizer_slots: int = 1
    is_synchronised: bool = True
    """Whether batch normalisation takes its statistics over all devices of a stage."""
    warm_up: WarmUp = "2(P-p)-1"

    def ahead(self, from_end: int) -> int:
        """Return K_p, the warm-up of a stage, from the number of stages from it to the end, itself included."""
        by_policy = {
            "2(P-p)-1": 2 * from_end - 1,
            "2(P-p)": 2 * from_end,
            "P-p": from_end,
            "2(P-p)+1": 2 * from_end + 1,
        }
        return max(1, min(by_policy[self.warm_up], self.count))


MOST_WITH_GAPS = 12
"""The most devices for which the search is exhaustive: it may leave devices out between two stages, tries other orders,
and keeps every sub-pipeline that nothing beats. With more devices it does none of these."""
MOST_RUNS = 20
"""The most devices for which any run of them may share a stage."""
ALIKE = 0.9
"""Devices whose memory differs by a smaller ratio count as equal: the memory left after starting a worker always
varies."""


def by_memory(cluster: Cluster) -> tuple[str, ...]:
    """Return the devices' names, the largest memory first (ASTEROID §3.3); among about equal memory, the faster
    first."""
    ordered: list[Device] = []
    alike: list[Device] = []
    for device in sorted(cluster.devices, key=lambda device: -device.memory_bytes):
        if alike and device.memory_bytes < ALIKE * alike[0].memory_bytes:
            ordered += sorted(alike, key=lambda device: -device.gflops)
            alike = []
        alike.append(device)
    return tuple(device.name for device in [*ordered, *sorted(alike, key=lambda device: -device.gflops)])


def orders(cluster: Cluster) -> list[tuple[str, ...]]:
    """Return the orders in which devices may follow each other along a pipeline: the paper's, and by speed, either
    way."""
    by_speed = tuple(device.name for device in sorted(cluster.devices, key=lambda device: -device.gflops))
    return list(dict.fromkeys([by_memory(cluster), by_speed, by_speed[::-1]]))


class Ladders:
    """Seconds of every layer on every kind of device for 0 to `most` samples, as running sums over the layers."""

    def __init__(self, profiles: Sequence[DeviceProfile], most: int) -> None:
        self.forward: list[Numbers] = []
        self.backward: list[Numbers] = []
        self._least: list[Numbers] = []
        samples = numpy.arange(most + 1)
        for profile in profiles:
            ahead, back = _tables(profile.ladders, most)
            self._least.append(_down((ahead + back)[1:] / samples[1:, None], numpy.minimum))
            self.forward.append(_running(ahead))
            self.backward.append(_running(back))
        self.total = [ahead + back for ahead, back in zip(self.forward, self.backward)]

    def only(self, kinds: Sequence[int]) -> Ladders:
        """Return the tables of these kinds only, in this order."""
        part = copy(self)
        part.forward, part.backward, part.total, part._least = (
            [tables[kind] for kind in kinds] for tables in (self.forward, self.backward, self.total, self._least)
        )
        return part

    def best(self, kind: int, most: int) -> Numbers:
        """Return running sums of the least seconds per sample, of up to `most` at once: no division is faster."""
        sums: Numbers = _running(self._least[kind][most - 1 : most])[0]
        return sums


def _running(table: Numbers) -> Numbers:
    """Return sums over the first n columns, for n from 0."""
    sums = numpy.zeros((len(table), table.shape[1] + 1))
    table.cumsum(1, out=sums[:, 1:])
    return sums


def _down(table: Numbers, choice: numpy.ufunc) -> Numbers:
    """Replace each row by the least, or most, of the rows so far, in place. This goes row by row, because `accumulate`
    goes column by column and is slower."""
    for above, row in pairwise(table):
        choice(above, row, out=row)
    return table


def _tables(ladders: Sequence[tuple[Timing, ...]], most: int) -> tuple[Numbers, Numbers]:
    """Return [samples, layer] -> seconds forward and backward, interpolated as profiles are; more samples never take
    less time."""
    ahead, back = (numpy.zeros((most + 1, len(ladders))) for _ in range(2))
    first = 0
    for sizes, run in groupby(ladders, lambda ladder: [timing.samples for timing in ladder]):
        same_sizes = list(run)
        last = first + len(same_sizes)
        _read(ahead[:, first:last], sizes, [[timing.forward_seconds for timing in ladder] for ladder in same_sizes])
        _read(back[:, first:last], sizes, [[timing.backward_seconds for timing in ladder] for ladder in same_sizes])
        first = last
    return _down(ahead, numpy.maximum), _down(back, numpy.maximum)


def _read(table: Numbers, sizes: Sequence[int], seconds: Sequence[Sequence[float]]) -> None:
    """Fill in [samples, layer] of layers that were measured with the same sizes."""
    measured, samples = numpy.array(seconds).T, numpy.arange(len(table), dtype=float)[:, None]
    slopes = numpy.diff(measured, axis=0) / numpy.diff(sizes)[:, None]
    for low, (a, b) in enumerate(pairwise(sizes)):
        table[a:b] = slopes[low] * (samples[a:b] - a) + measured[low]
    first, last = sizes[0], sizes[-1]
    table[:first] = measured[0] * samples[:first] / first
    table[last : last + 1] = measured[-1]
    beyond, more = table[last + 1 :], samples[last + 1 :]
    if len(sizes) > 1:
        numpy.multiply(slopes[-1], more - last, out=beyond)
        beyond += measured[-1]
        numpy.maximum(beyond, measured[-1], out=beyond)
    else:
        beyond[:] = measured[0] * more / first


class LayerBytes:
    """The bytes of layers: running sums over the network, and the bytes that cross each cut."""

    def __init__(self, network: Network, optimizer_slots: int) -> None:
        layers = range(len(network.layers) + 1)
        static, trained, saved, fixed = (numpy.zeros(len(layers)) for _ in range(4))
        norms, sums = numpy.zeros((2, len(layers))), numpy.zeros((2, len(layers)))
        self.work = numpy.zeros(len(layers))
        """For each layer, the most bytes that one of its operators moves for one sample."""
        self.weights = numpy.zeros(len(layers))
        """For each layer, the most bytes that one of its operators has in trained weights."""
        readers: dict[str, list[int]] = {}
        for index, layer in enumerate(network.layers, 1):
            for name in layer.weights:
                weight = network.weights[name]
                copies = 2 + optimizer_slots if weight.trainable else 1
                static[index] += weight.bytes * copies * (name not in readers)
                trained[index] += weight.bytes * (weight.trainable and name not in readers)
                readers.setdefault(name, []).append(index - 1)
            for op in network.ops[layer.first : layer.last]:
                saved[index] += op.saved_bytes
                fixed[index] += op.saved_fixed_bytes
                for way in range(1 + any(network.tensors[name].differentiable for name in op.outputs)):
                    norms[way, index] += op.statistics > 0
                    sums[way, index] += 4 * op.statistics
                self.work[index] = max(self.work[index], op.moved_bytes)
                if op is network.ops[-1]:
                    self.work[index] = max(self.work[index], network.loss_bytes)
                weights = (network.weights[name] for name in op.weights)
                self.weights[index] = max(
                    self.weights[index], sum(weight.bytes for weight in weights if weight.trainable)
                )
        self.static, self.trained, self.saved, self.fixed = (e.cumsum() for e in (static, trained, saved, fixed))
        self.norms, self.sums = norms.cumsum(1), sums.cumsum(1)
        """[forward or backward] -> normalisations over all devices of a stage, and the bytes of their sums."""
        self.crossing, self.returning = carried(network)
        self._lowest_trained = _lowest_trained(network)
        read_again = {network.weights[name]: layers for name, layers in readers.items() if len(layers) > 1}
        self._copied, self._tied = _of_tied(read_again, len(network.layers), 2 + optimizer_slots)

    def held(self, first: Counts, last: Counts) -> Numbers:
        """Return the bytes of the weights of layers [first, last) with their gradients and the optimiser's state."""
        bytes_held: Numbers = self.static[last] - self.static[first] + self._copied[first, last]
        return bytes_held

    def has_backward(self, last: Counts) -> NDArray[numpy.bool_]:
        """Return whether a stage that ends before layer `last` has a backward pass: not where nothing is trained up to
        there."""
        above: NDArray[numpy.bool_] = last > self._lowest_trained
        return above

    def held_at_once(self, last: Counts, ahead: int) -> Counts:
        """Return how many micro-batches a stage that ends before layer `last` keeps something of, where `ahead` of them
        await their gradients: one without a backward pass."""
        held: Counts = numpy.where(self.has_backward(last), ahead, 1)
        return held

    def tied(self, first: Counts, last: Counts) -> Numbers:
        """Return the bytes of the trained weights that layers [first, last) are the first to read, and later ones read
        too."""
        tied_bytes: Numbers = self._tied[first, last]
        return tied_bytes

    def summed(self, first: Counts, last: Counts) -> Numbers:
        """Return the bytes of the trained weights that layers [first, last) alone read."""
        summed_bytes: Numbers = self.trained[last] - self.trained[first] - self._tied[first, last]
        return summed_bytes

    @cached_property
    def widest(self) -> Numbers:
        """[first, last] -> the most bytes that one operator of these layers moves for one sample."""
        return _most(self.work)

    @cached_property
    def heaviest(self) -> Numbers:
        """[first, last] -> the most bytes that one operator of these layers has in trained weights."""
        return _most(self.weights)


def _of_tied(read_again: Mapping[WeightSpec, Sequence[int]], layers: int, copies: int) -> tuple[Numbers, Numbers]:
    """Return what a weight that several layers read adds to the running sums, which count it at the first of them.

    [first, last] -> bytes of the copies in layers [first, last) that the sums leave out, and bytes of those trained
    weights that they count, but that other layers read after them.
    """
    shape = (layers + 1, layers + 1)
    if not read_again:
        nothing = numpy.broadcast_to(0.0, shape)
        return nothing, nothing
    copied, tied = numpy.zeros(shape), numpy.zeros(shape)
    for weight, places in read_again.items():
        for before, place in pairwise(places):
            copied[before + 1 : place + 1, place + 1 :] += weight.bytes * (copies if weight.trainable else 1)
        if weight.trainable:
            tied[: places[0] + 1, places[0] + 1 : places[-1] + 1] += weight.bytes
    return copied, tied


def _lowest_trained(network: Network) -> int:
    """Return the first layer with a backward pass; where there is none, how many layers there are."""
    for index, layer in enumerate(network.layers):
        names = (name for op in network.ops[layer.first : layer.last] for name in op.outputs)
        if any(network.tensors[name].differentiable for name in names) or any(
            network.weights[name].trainable for name in layer.weights
        ):
            return index
    return len(network.layers)


def carried(network: Network) -> tuple[Numbers, Numbers]:
    """Return [layer] -> bytes that a cut before it carries for one sample, and those of their gradients; both ends are
    0."""
    starts, whole = [layer.first for layer in network.layers], set(network.outputs)
    changes = numpy.zeros((2, len(starts) + 1))
    for name, producer in network.producer.items():
        read = len(network.ops) if name in whole else max(network.readers.get(name, (0,)))
        first, last = bisect_right(starts, producer), bisect_right(starts, read)
        if first < last:
            tensor = network.tensors[name]
            for way in range(1 + tensor.differentiable):
                changes[way, first] += tensor.bytes_per_sample
                changes[way, last] -= tensor.bytes_per_sample
    crossing, returning = changes.cumsum(1)
    return crossing, returning


def _most(each: Numbers) -> Numbers:
    """Return [first, last] -> the largest value of layers [first, last)."""
    count = len(each)
    largest = numpy.zeros((count, count))
    for first in range(count):
        largest[first, first + 1 :] = numpy.maximum.accumulate(each[first + 1 :])
    return largest


@dataclass(frozen=True)
class DevicePairs:
    """[from, to] -> rate and delay between every pair of some devices."""

    rates: Numbers
    """Bytes per second: the link's, and between different hosts also limited by the ports."""
    delays: Numbers
    has_own_hosts: bool
    """Whether every device of the cluster has a host of its own."""

    @staticmethod
    def of(cluster: Cluster, names: Sequence[str]) -> DevicePairs:
        devices, count = [cluster.device(name) for name in names], len(names)
        has_own_hosts = len({device.host_name for device in cluster.devices}) == len(cluster.devices)
        if cluster.links or not has_own_hosts:
            pairs = [[(a, b) for b in names] for a in names]
            between, link = cluster.bytes_per_second_between, cluster.link_between
            rates = numpy.array([[between(a, b) if a != b else numpy.inf for a, b in row] for row in pairs])
            delays = [[link(a, b).delay_seconds if a != b else 0.0 for a, b in row] for row in pairs]
            return DevicePairs(rates, numpy.array(delays), has_own_hosts)
        ups, downs = (
            numpy.array([getattr(device, port) for device in devices])
            for port in ("up_bytes_per_second", "down_bytes_per_second")
        )
        ports = numpy.minimum(ups[:, None], downs[None, :])
        if not cluster.sites:
            rates = numpy.minimum(ports, cluster.link.bytes_per_second)
            return DevicePairs(rates, numpy.full((count, count), cluster.link.delay_seconds), has_own_hosts)
        sites = list(dict.fromkeys(device.site for device in devices))
        links = [[cluster.tree.way(a, b).link for b in sites] for a in sites]
        site = numpy.array([sites.index(device.site) for device in devices])
        at = numpy.ix_(site, site)
        rates = numpy.minimum(ports, numpy.array([[link.bytes_per_second for link in row] for row in links])[at])
        return DevicePairs(
            rates, numpy.array([[link.delay_seconds for link in row] for row in links])[at], has_own_hosts
        )


def every_group(count: int, most: int) -> list[DeviceGroup]:
    """Return every run of up to `most` devices out of `count`; with many devices, only runs of some lengths."""
    lengths = {1, *sizes(count)} if count > MOST_RUNS else range(1, count + 1)
    return [(a, a + size) for a in range(count) for size in sorted(lengths) if size <= min(most, count - a)]


def sizes(count: int) -> list[int]:
    """Return how many of `count` devices are tried together: any number up to eight, then in steps of about a quarter,
    and all of them."""
    tried, size = [], 2
    while size < count:
        tried.append(size)
        size += max(1, size // 4)
    return [*tried, count] if count > 1 else []


class PlanningContext:
    """The facts for planning that do not depend on the micro-batch size: the ordered devices, their kinds, times and
    bytes."""

    def __init__(
        self,
        network: Network,
        cluster: Cluster,
        profile: Profile,
        most: int,
        optimizer_slots: int = 1,
        names: tuple[str, ...] | None = None,
    ) -> None:
        """Compute the tables. `most`: the largest micro-batch; `names`: the order of the devices, by default that of
        their memory."""
        self.network, self.cluster = network, cluster
        self.names = names or by_memory(cluster)
        keys = [(id(profile.of(name)), cluster.device(name).memory_bytes) for name in self.names]
        unique = list(dict.fromkeys(keys))
        self.kinds = [unique.index(key) for key in keys]
        self.budgets = [memory for _, memory in unique]
        self.ladders = Ladders([profile.of(self.names[keys.index(key)]) for key in unique], most)
        self.bytes = LayerBytes(network, optimizer_slots)

    @cached_property
    def slowest_links(self) -> dict[str, tuple[float, float]]:
        """Device -> the slowest rate, in bytes per second, and the longest delay between it and any other device of the
        cluster."""
        names = self.cluster.names
        pairs, alone = DevicePairs.of(self.cluster, names), numpy.eye(len(names), dtype=bool)
        rates = numpy.where(alone, numpy.inf, numpy.minimum(pairs.rates, pairs.rates.T)).min(1)
        delays = numpy.where(alone, 0.0, numpy.maximum(pairs.delays, pairs.delays.T)).max(1)
        return dict(zip(names, zip(rates.tolist(), delays.tolist())))

    def ordered(self, names: tuple[str, ...]) -> PlanningContext:
        """Return the context for the devices in another order, their kinds numbered as they come."""
        other = self.only(names)
        unique = list(dict.fromkeys(other.kinds))
        other.kinds = [unique.index(kind) for kind in other.kinds]
        other.budgets = [self.budgets[kind] for kind in unique]
        other.ladders = self.ladders.only(unique)
        return other

    def only(self, names: tuple[str, ...]) -> PlanningContext:
        """Return the context for some of the devices."""
        part = copy(self)
        part.names, part.kinds = names, [self.kinds[self.names.index(name)] for name in names]
        return part
