"""Sums among devices: every rounds' bytes, and that following the hops gives everybody the whole sum."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_made import chain
from manyhands.schedule.actions import Reduce
from manyhands.schedule.device_tree import MOST_DIRECT, sum_levels
from manyhands.schedule.reduction import (
    byte_points,
    gradient_chunks,
    gradient_rounds,
    message_counts,
    pair_bytes,
    phases,
    rounds_of,
    row_order,
    statistics_rounds,
    topic,
)

PLACE = st.sampled_from(["", "a", "b", "paris/a", "paris/b", "rome/a", "paris", "x/y/z"])
PLACES = st.integers(2, MOST_DIRECT + 4).flatmap(
    lambda count: st.one_of(st.just(("",) * count), st.lists(PLACE, min_size=count, max_size=count).map(tuple))
)
"""Where the devices of a sum are: nowhere in particular, or here and there."""


def names(count: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(count))


@pytest.mark.slow
@given(PLACES)
def test_following_the_rounds_gives_every_device_every_term_once(places: tuple[str, ...]) -> None:
    devices, chunks = names(len(places)), gradient_chunks(places, places)
    held = {d: [{d} for _ in range(chunks)] for d in devices}  # device -> chunk -> whose terms are in it
    for hops in gradient_rounds(devices, places):
        sent = {hop: [set(terms) for terms in held[hop.source][hop.first : hop.last]] for hop in hops}
        for hop, parts in sent.items():
            for chunk, terms in enumerate(parts, hop.first):
                own = held[hop.target][chunk]
                if hop.adds:
                    assert not own & terms, "a term would count twice"
                    own |= terms
                else:
                    held[hop.target][chunk] = set(terms)
    assert all(chunk == set(devices) for chunks in held.values() for chunk in chunks)


@given(PLACES)
def test_no_sum_comes_back_before_its_terms_have_arrived(places: tuple[str, ...]) -> None:
    """A sum is written straight over the gradients that a device has sent: they must have been added by then."""
    devices = names(len(places))
    for device in devices:
        sent_in: dict[int, int] = {}
        for number, hops in enumerate(gradient_rounds(devices, places)):
            for hop in hops:
                chunks = range(hop.first, hop.last)
                if hop.adds and hop.source == device:
                    sent_in.update(dict.fromkeys(chunks, number))
                elif not hop.adds and hop.target == device:
                    assert all(sent_in[chunk] < number for chunk in chunks)


@given(PLACES)
def test_following_the_rounds_gives_every_device_every_row_once(places: tuple[str, ...]) -> None:
    devices = names(len(places))
    order = row_order(devices, places)
    assert sorted(order) == sorted(devices)
    held = {device: Counter({order.index(device): 1}) for device in devices}
    for hops in statistics_rounds(devices, places):
        before = {device: set(rows) for device, rows in held.items()}
        for hop in hops:
            rows = range(hop.first, hop.last)
            assert before[hop.source] >= set(rows), "a row is handed on before it has come"
            held[hop.target].update(rows)
    assert all(rows == Counter(range(len(devices))) for rows in held.values())


@given(st.integers(2, MOST_DIRECT + 4))
def test_statistics_without_groups_take_one_round(count: int) -> None:
    (hops,) = statistics_rounds(names(count))
    assert len(hops) == count * (count - 1)
    assert len({(hop.source, hop.target) for hop in hops}) == len(hops)


@given(PLACES, st.integers(1, 5000))
def test_each_device_sends_its_part(places: tuple[str, ...], elements: int) -> None:
    network, count = chain(2, weight_elements=elements), len(places)
    reduce = Reduce(0, "gradients", 0, 2, names(count), 2 * 4 * elements, places=places)
    points = byte_points(reduce, network)
    assert points[0] == 0
    assert points[-1] == reduce.bytes
    assert all(point % 4 == 0 for point in points)
    assert sum(pair_bytes(reduce, network).values()) == 2 * (count - 1) * reduce.bytes


@given(PLACES, st.sampled_from(["gradients", "statistics", "norm"]))
def test_topics_are_distinct_for_each_receiver(places: tuple[str, ...], what: str) -> None:
    reduce = Reduce(0, what, 0, 2, names(len(places)), 800, places=places)  # type: ignore[arg-type]
    seen: set[tuple[str, str, str]] = set()
    messages: Counter[str] = Counter()
    for number, hops in enumerate(rounds_of(reduce)):
        for hop in hops:
            key = (hop.source, hop.target, topic(reduce, number, hop.first))
            assert key not in seen
            seen.add(key)
            messages.update([hop.source, hop.target])
    assert message_counts(reduce).tolist() == [messages[name] for name in reduce.devices]
    assert sum(flows.rounds for flows in phases(reduce)) == len(rounds_of(reduce))


@pytest.mark.parametrize(("count", "levels"), [(2, 1), (MOST_DIRECT, 1), (MOST_DIRECT + 1, 2), (1000, 3)])
def test_many_devices_are_summed_in_groups(count: int, levels: int) -> None:
    assert len(sum_levels(count, ())[1]) == levels
    assert count > 100 or len(gradient_rounds(names(count))) == 2 * levels


def crossing(places: tuple[str, ...], what: str, size: int) -> Counter[str]:
    """Bytes that leave each host, of a sum over workers in hosts."""
    network = chain(1, weight_elements=size // 4)
    reduce = Reduce(0, what, 0, 1, names(len(places)), size, places=places)  # type: ignore[arg-type]
    host = dict(zip(reduce.devices, places))
    out: Counter[str] = Counter()
    for (source, target), count in pair_bytes(reduce, network).items():
        if host[source] != host[target]:
            out[host[source]] += count
    return out


@pytest.mark.parametrize(("hosts", "workers"), [(4, 4), (2, 2), (3, 5), (20, 3)])
def test_no_more_leaves_a_host_than_if_it_were_one_device(hosts: int, workers: int) -> None:
    size = 4 * 3600
    places = tuple(f"h{host}" for host in range(hosts) for _ in range(workers))
    out = crossing(places, "gradients", size)
    assert out.total() == 2 * (hosts - 1) * size
    assert max(out.values()) == pytest.approx(2 * (hosts - 1) / hosts * size, rel=0.2)  # 20: groups of 4 x 5
    rows = crossing(places, "statistics", 8)
    assert set(rows.values()) == {(hosts - 1) * workers * 8}  # each worker's row once to each other host


def test_hosts_of_different_sizes_share_what_leaves_them() -> None:
    """A host's part is not that of its number of workers: four in one, one in each of two others."""
    out = crossing(("a",) * 4 + ("b", "c"), "gradients", 4 * 3600)
    assert max(out.values()) == min(out.values())


def test_sites_hosts_and_workers() -> None:
    """What crosses from site to site is as little as if a site were one device, whatever its hosts."""
    places = tuple(f"s{site}/h{host}" for site in range(3) for host in range(2) for _ in range(2))
    network, size = chain(1, weight_elements=900), 3600
    reduce = Reduce(0, "gradients", 0, 1, names(12), size, places=places)
    assert len(gradient_rounds(reduce.devices, places)) == 6
    site = {name: place.split("/")[0] for name, place in zip(reduce.devices, places)}
    sent = sum(count for (a, b), count in pair_bytes(reduce, network).items() if site[a] != site[b])
    assert sent == 2 * (3 - 1) * size
