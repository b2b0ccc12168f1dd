"""Sums among devices: rounds of hops that simulator and executor both follow.

    direct, three devices                 round 0: every device sends chunk j to device j, which adds up
        chunks   0 │ 1 │ 2                round 1: device j sends the sum of chunk j to all others

Each device sends 2(n-1)/n of the bytes, as in a ring (ASTEROID Eq. 5), but waits for two delays in place of 2(n-1).

    two hosts of two workers              round 0: in each host, chunks 0-1 to one worker, 2-3 to the other
        chunks   0 │ 1 │ 2 │ 3            round 1: between the hosts, chunk j to the worker that owns it
                                          rounds 2, 3: back, between the hosts and inside them

Where devices are grouped in hosts and sites (`Reduce.places`), and where they are more than `MOST_DIRECT`, there are
two rounds for each level of groups (`device_tree`). Statistics and the gradients' norm are small and waited for: every
device's own reaches all others as it is, in one round where there are no groups.

Terms are added in a fixed order (own first, then those of the others in the order of the tree), so that a run repeated
gives the same bits; a chunk is added up on one device, so that replicas agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from manyhands.facts.boxes import cut_points
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.schedule.actions import Reduce
from manyhands.schedule.device_tree import Level, Places, device_tree, leaves, row_rounds, sum_levels

Counts = NDArray[numpy.int64]


class Hop(NamedTuple):
    """Chunks [first, last) go from one device to another, which adds them to its own or stores them. Of rows there is
    one for each device, in the order of `row_order`."""

    source: str
    target: str
    first: int
    last: int
    adds: bool


Rounds = tuple[tuple[Hop, ...], ...]


@lru_cache(maxsize=256)
def gradient_rounds(devices: tuple[str, ...], places: tuple[str, ...] = ()) -> Rounds:
    """Return the rounds of an all-reduce, in `gradient_chunks` chunks."""
    _, levels = sum_levels(len(devices), places)
    up = [_hops(devices, level) for level in levels]
    down = [tuple(Hop(hop.target, hop.source, hop.first, hop.last, False) for hop in hops) for hops in reversed(up)]
    return (*up, *down)


def _hops(devices: tuple[str, ...], level: Level) -> tuple[Hop, ...]:
    columns = (column.tolist() for column in level)
    return tuple(Hop(devices[a], devices[b], first, last, True) for a, b, first, last in zip(*columns))


def gradient_chunks(devices: Collection[str], places: tuple[str, ...] = ()) -> int:
    """Return the number of chunks of an all-reduce."""
    return sum_levels(len(devices), places)[0]


@lru_cache(maxsize=256)
def statistics_rounds(devices: tuple[str, ...], places: tuple[str, ...] = ()) -> Rounds:
    """Return the rounds after which every device has everybody's row."""
    return tuple(
        tuple(Hop(devices[hop.source], devices[hop.target], hop.first, hop.last, True) for hop in hops)
        for hops in row_rounds(len(devices), places)
    )


@lru_cache(maxsize=256)
def row_order(devices: tuple[str, ...], places: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return whose row each row is."""
    return tuple(devices[place] for place in leaves(device_tree(len(devices), places)))


def rounds_of(reduce: Reduce) -> Rounds:
    make = gradient_rounds if reduce.what == "gradients" else statistics_rounds
    return make(reduce.devices, reduce.places)


def topic(reduce: Reduce, number: int, chunk: int) -> str:
    """Return the name of one hop's message: the reduction, its round, its first chunk."""
    when = "" if reduce.micro_batch < 0 else f" m{reduce.micro_batch}{'b' if reduce.backward else ''}"
    tied = f" of {reduce.weights[0]}" if reduce.weights else ""
    return f"reduce s{reduce.stage} {reduce.what}{when} {reduce.first}:{reduce.last}{tied} r{number} c{chunk}"


def element_bytes(reduce: Reduce, network: Network) -> int:
    """Return the bytes of one number in a reduction of gradients: a shared stage trains weights of one type."""
    if reduce.weights:
        return DTYPE_BYTES[network.weights[reduce.weights[0]].dtype]
    for op in range(reduce.last - 1, reduce.first - 1, -1):
        for name in network.ops[op].weights:
            if network.weights[name].trainable:
                return DTYPE_BYTES[network.weights[name].dtype]
    return 1


def chunk_points(reduce: Reduce, network: Network) -> tuple[int, ...]:
    """Return where the chunks of a reduction of gradients begin and end, counted in numbers."""
    return _even_points(reduce.bytes // element_bytes(reduce, network), gradient_chunks(reduce.devices, reduce.places))


@lru_cache(maxsize=4096)
def _even_points(count: int, parts: int) -> tuple[int, ...]:
    return cut_points(count, (1,) * parts)


def byte_points(reduce: Reduce, network: Network) -> tuple[int, ...]:
    """Return where the chunks, or rows, of a reduction begin and end, in bytes."""
    if reduce.what != "gradients":
        return tuple(row * reduce.bytes for row in range(len(reduce.devices) + 1))
    size = element_bytes(reduce, network)
    return tuple(point * size for point in chunk_points(reduce, network))


class SumFlows(NamedTuple):
    """The bytes that travel in one phase of a sum, along each pair of devices. The next phase begins when it has ended:
    a level of groups, up or down; the highest, which goes both ways, is one."""

    sources: Places
    targets: Places
    rounds: int
    """The rounds of the phase, each of which waits for a delay."""
    hop_flows: Places
    """The flow of each hop, and the chunks that it carries."""
    firsts: Places
    lasts: Places


@lru_cache(maxsize=64)
def _phases(count: int, places: tuple[str, ...], is_gradients: bool) -> tuple[SumFlows, ...]:
    if count == 1:
        return ()
    if not is_gradients:
        columns = (numpy.array(hops).reshape(-1, 4).T for hops in row_rounds(count, places))
        return tuple(_flows(count, Level(*each), 1) for each in columns)
    *inside, top = (Level(*level) for level in sum_levels(count, places)[1])
    down = [Level(level.targets, level.sources, level.firsts, level.lasts) for level in (*inside, top)]
    both = Level(*map(numpy.concatenate, zip(top, down.pop())))
    ups, downs = ([_flows(count, level, 1) for level in levels] for levels in (inside, reversed(down)))
    return (*ups, _flows(count, both, 2), *downs)


def _flows(count: int, level: Level, rounds: int) -> SumFlows:
    pairs, hop_flows = numpy.unique(level.sources * count + level.targets, return_inverse=True)
    sources, targets = numpy.divmod(pairs, count)
    return SumFlows(sources, targets, rounds, hop_flows.reshape(-1), level.firsts, level.lasts)


def phases(reduce: Reduce) -> tuple[SumFlows, ...]:
    """Return what travels for a sum, phase by phase: places among its devices, one pair for each flow."""
    return _phases(len(reduce.devices), reduce.places, reduce.what == "gradients")


def flow_bytes(reduce: Reduce, network: Network, flows: SumFlows) -> Counts:
    """Return the bytes that travel along each flow of a phase."""
    if reduce.what == "gradients":
        points = numpy.array(byte_points(reduce, network))
        sizes = points[flows.lasts] - points[flows.firsts]
    else:
        sizes = (flows.lasts - flows.firsts) * reduce.bytes
    return numpy.bincount(flows.hop_flows, sizes, len(flows.sources)).astype(numpy.int64)


def pair_bytes(reduce: Reduce, network: Network) -> dict[tuple[str, str], int]:
    """Return the bytes that travel between each pair, all rounds together."""
    total: dict[tuple[str, str], int] = defaultdict(int)
    for flows in phases(reduce):
        sources, targets = (map(reduce.devices.__getitem__, ends.tolist()) for ends in (flows.sources, flows.targets))
        for source, target, size in zip(sources, targets, flow_bytes(reduce, network, flows).tolist()):
            total[source, target] += size
    return dict(total)


def message_counts(reduce: Reduce) -> Counts:
    """Return the number of messages that each device of a sum sends and receives for it."""
    counts: Counts = numpy.zeros(len(reduce.devices), numpy.int64)
    for flows in phases(reduce):
        for ends in (flows.sources, flows.targets):
            counts += numpy.bincount(ends[flows.hop_flows], minlength=len(counts))
    return counts


def completed_at(network: Network, first: int, last: int, tied: Collection[str]) -> dict[int, list[str]]:
    """Return for each operator of a stage [first, last) the trainable weights whose gradient it completes.

    Such a gradient is complete once backward has passed the operator. That of a weight in `tied` is not, since other
    stages add to it.
    """
    assigned = set(tied)
    completed: dict[int, list[str]] = defaultdict(list)
    for op in range(first, last):
        for name in network.ops[op].weights:
            if name not in assigned and network.weights[name].trainable:
                assigned.add(name)
                completed[op].append(name)
    return completed
