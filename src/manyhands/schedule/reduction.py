"""Sums among devices: rounds of hops that simulator and executor both follow.

    direct, three devices                 round 0: every device sends chunk j to device j, which adds up
        chunks   0 │ 1 │ 2                round 1: device j sends the sum of chunk j to all others

Each device sends 2(n-1)/n of the bytes, as in a ring (ASTEROID Eq. 5), but waits for two delays in place of 2(n-1).
Many devices would mean many connections: beyond `MOST_DIRECT` a ring is used. Statistics and the gradients' norm are
small and waited for: every device sends all of its own to all others, in one round.

Terms are added in a fixed order (of the devices; in a ring, from where each chunk starts), so that a run repeated gives
the same bits; a chunk is added up on one device, so that replicas agree.
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

MOST_DIRECT = 16

Places = NDArray[numpy.int64]
Counts = NDArray[numpy.int64]


class Hop(NamedTuple):
    """A chunk goes from one device to another, which adds it to its own or stores it."""

    source: str
    target: str
    chunk: int
    adds: bool


Rounds = tuple[tuple[Hop, ...], ...]


@lru_cache(maxsize=256)
def gradient_rounds(devices: tuple[str, ...]) -> Rounds:
    """Return the rounds of an all-reduce in len(devices) chunks."""
    if len(devices) > MOST_DIRECT:
        return _ring(devices)
    gather = tuple(Hop(a, b, j, True) for a in devices for j, b in enumerate(devices) if a != b)
    spread = tuple(Hop(a, b, j, False) for j, a in enumerate(devices) for b in devices if a != b)
    return (gather, spread)


def _ring(devices: tuple[str, ...]) -> Rounds:
    count = len(devices)
    rounds = []
    for number in range(2 * (count - 1)):
        rounds.append(
            tuple(
                Hop(device, devices[(place + 1) % count], (place - number) % count, number < count - 1)
                for place, device in enumerate(devices)
            )
        )
    return tuple(rounds)


@lru_cache(maxsize=256)
def statistics_rounds(devices: tuple[str, ...]) -> Rounds:
    """Return one round, in which every device sends its own to all others. The chunk is the sender's place."""
    return (tuple(Hop(a, b, i, True) for i, a in enumerate(devices) for b in devices if a != b),)


def rounds_of(reduce: Reduce) -> Rounds:
    return gradient_rounds(reduce.devices) if reduce.what == "gradients" else statistics_rounds(reduce.devices)


def topic(reduce: Reduce, number: int, chunk: int) -> str:
    """Return the name of one hop's message: the reduction, its round, its chunk."""
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
    return _even_points(reduce.bytes // element_bytes(reduce, network), len(reduce.devices))


@lru_cache(maxsize=4096)
def _even_points(count: int, parts: int) -> tuple[int, ...]:
    return cut_points(count, (1,) * parts)


def hop_bytes(reduce: Reduce, network: Network) -> tuple[int, ...]:
    """Return the bytes of each chunk."""
    if reduce.what != "gradients":
        return (reduce.bytes,) * len(reduce.devices)
    points, size = chunk_points(reduce, network), element_bytes(reduce, network)
    return tuple((points[i + 1] - points[i]) * size for i in range(len(reduce.devices)))


def flow_ends(reduce: Reduce) -> tuple[Places, Places]:
    """Return senders and receivers, all rounds together: places among the devices of a sum, one pair for each flow."""
    count = len(reduce.devices)
    if reduce.what == "gradients" and count > MOST_DIRECT:
        sources = numpy.arange(count)
        return sources, (sources + 1) % count
    sources, targets = numpy.divmod(numpy.arange(count * count), count)
    apart = sources != targets
    return sources[apart], targets[apart]


def flow_bytes(reduce: Reduce, network: Network) -> Counts:
    """Return the bytes that travel along each flow, all rounds together."""
    count = len(reduce.devices)
    if reduce.what != "gradients":
        return numpy.full(count * (count - 1), reduce.bytes)
    sizes: Counts = numpy.array(hop_bytes(reduce, network))
    sources, targets = flow_ends(reduce)
    if count > MOST_DIRECT:  # a device sends every chunk twice, except two, which it sends once
        twice: Counts = 2 * sizes.sum() - sizes[targets] - sizes[(targets + 1) % count]
        return twice
    flow_sizes: Counts = sizes[sources] + sizes[targets]
    return flow_sizes


def pair_bytes(reduce: Reduce, network: Network) -> dict[tuple[str, str], int]:
    """Return the bytes that travel between each pair, all rounds together."""
    sources, targets = (map(reduce.devices.__getitem__, ends.tolist()) for ends in flow_ends(reduce))
    return dict(zip(zip(sources, targets), flow_bytes(reduce, network).tolist()))


def rounds_in(reduce: Reduce) -> int:
    """Return how many rounds there are, each of which waits for the one before it."""
    if reduce.what != "gradients":
        return 1
    return 2 if len(reduce.devices) <= MOST_DIRECT else 2 * (len(reduce.devices) - 1)


def messages_each(reduce: Reduce) -> int:
    """Return the number of messages that a device of a sum sends and receives for it."""
    others = len(reduce.devices) - 1
    return 4 * others if reduce.what == "gradients" else 2 * others


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
