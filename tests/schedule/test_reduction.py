"""Sums among devices: every rounds' bytes, and that following the hops gives everybody the whole sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_made import chain
from manyhands.schedule.actions import Reduce
from manyhands.schedule.reduction import (
    MOST_DIRECT,
    gradient_rounds,
    hop_bytes,
    pair_bytes,
    rounds_of,
    statistics_rounds,
    topic,
)

COUNTS = st.integers(2, MOST_DIRECT + 4)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(count))


@given(COUNTS)
def test_following_the_rounds_gives_every_device_every_term_once(count: int) -> None:
    devices = names(count)
    held = {d: [{d} for _ in range(count)] for d in devices}  # device -> chunk -> whose terms are in it
    for hops in gradient_rounds(devices):
        sent = {hop: set(held[hop.source][hop.chunk]) for hop in hops}
        for hop, terms in sent.items():
            own = held[hop.target][hop.chunk]
            if hop.adds:
                assert not own & terms, "a term would count twice"
                own |= terms
            else:
                held[hop.target][hop.chunk] = set(terms)
    assert all(chunk == set(devices) for chunks in held.values() for chunk in chunks)


@given(COUNTS)
def test_statistics_take_one_round(count: int) -> None:
    (hops,) = statistics_rounds(names(count))
    assert len(hops) == count * (count - 1)
    assert len({(hop.source, hop.target) for hop in hops}) == len(hops)


@given(COUNTS, st.integers(1, 5000))
def test_each_device_sends_its_part(count: int, elements: int) -> None:
    network = chain(2, weight_elements=elements)
    reduce = Reduce(0, "gradients", 0, 2, names(count), 2 * 4 * elements)
    sizes = hop_bytes(reduce, network)
    assert sum(sizes) == reduce.bytes
    assert all(size % 4 == 0 for size in sizes)
    total = sum(pair_bytes(reduce, network).values())
    assert total == 2 * (count - 1) * reduce.bytes


@given(COUNTS)
def test_topics_are_distinct_for_each_receiver(count: int) -> None:
    reduce = Reduce(0, "gradients", 0, 2, names(count), 800)
    seen = set()
    for number, hops in enumerate(rounds_of(reduce)):
        for hop in hops:
            key = (hop.source, hop.target, topic(reduce, number, hop.chunk))
            assert key not in seen
            seen.add(key)


@pytest.mark.parametrize("count", [MOST_DIRECT, MOST_DIRECT + 1])
def test_many_devices_form_a_ring(count: int) -> None:
    rounds = gradient_rounds(names(count))
    assert len(rounds) == (2 if count <= MOST_DIRECT else 2 * (count - 1))
