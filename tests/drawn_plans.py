"""Drawn plans that fit a given network: every share, order, codec and home."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

from hypothesis import strategies as st

from manyhands.facts.network import Network
from manyhands.facts.plan import (
    EVERYWHERE,
    ByChannels,
    BySamples,
    ByTiles,
    Codec,
    Order,
    Plan,
    Share,
    Single,
    Stage,
    WarmUp,
)

FIXED_ORDERS: tuple[Order, ...] = ("sequential", "gpipe", "1f1b", "stream")
GRIDS = ((2, 1), (1, 2), (3, 1), (2, 2))


@st.composite
def groups(draw: st.DrawFn, first: int, last: int) -> tuple[int, ...] | None:
    """Layers at which groups of a stage [first, last) start, or None for every layer."""
    if draw(st.booleans()):
        return None
    return (first, *sorted(draw(st.sets(st.integers(first + 1, last - 1))))) if last > first + 1 else (first,)


@st.composite
def shares(draw: st.DrawFn, kinds: tuple[str, ...], samples: int, first: int, last: int) -> tuple[Share, int]:
    """A share of layers [first, last), and how many devices it takes."""
    kind = draw(st.sampled_from(kinds))
    if kind == "samples":
        cuts = sorted(draw(st.sets(st.integers(1, samples - 1), max_size=2))) if samples > 1 else []
        return BySamples(tuple(b - a for a, b in pairwise([0, *cuts, samples]))), len(cuts) + 1
    if kind == "tiles":
        rows, columns = draw(st.sampled_from(GRIDS))
        weights = st.integers(1, 2)
        heights = tuple(draw(weights) for _ in range(rows))
        widths = tuple(draw(weights) for _ in range(columns))
        early = tuple(sorted(draw(st.sets(st.integers(first, last - 1)))))
        forward, backward = draw(groups(first, last)), draw(groups(first, last))
        return ByTiles(heights, widths, forward, backward, early), rows * columns
    if kind == "channels":
        count = draw(st.integers(2, 3))
        return ByChannels(tuple(draw(st.integers(1, 2)) for _ in range(count))), count
    return Single(), 1


@st.composite
def plans(
    draw: st.DrawFn,
    network: Network,
    *,
    kinds: tuple[str, ...] = ("single", "samples", "tiles", "channels"),
    orders: tuple[Order, ...] = FIXED_ORDERS,
    most_stages: int = 3,
    repeats: bool = False,
) -> Plan:
    """With `repeats`, some plans in which a device may work in several stages have devices that do."""
    layers = len(network.layers)
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=most_stages - 1)))
    micro_batches, samples = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    order = draw(st.sampled_from(orders))
    if order not in ("stream", "interleave"):
        kinds = tuple(kind for kind in kinds if kind != "channels")
    stages = []
    used = most = 0
    again = repeats and (
        order in ("sequential", "gpipe", "stream", "interleave") or (micro_batches, order) == (1, "1f1b")
    )
    for first, last in pairwise([0, *cuts, layers]):
        share, count = draw(shares(kinds, samples, first, last))
        if again and draw(st.booleans()):
            used = 0
        devices = tuple(f"d{number}" for number in range(used, used + count))
        used += count
        most = max(most, used)
        codec = Codec(draw(st.sampled_from((2, 4, 8, 16, 32))), draw(st.booleans()), draw(st.booleans()))
        stages.append(Stage((first, last), devices, share, codec, "gateway" if draw(st.booleans()) else "allreduce"))
    rules: st.SearchStrategy[WarmUp] = st.sampled_from(get_args(WarmUp))
    counts = st.lists(st.integers(1, micro_batches), min_size=len(stages), max_size=len(stages))
    warm_up = draw(rules | counts.map(lambda ahead: tuple(sorted(ahead, reverse=True))))
    homes = {}
    home = draw(st.sampled_from(("none", EVERYWHERE, "d0", f"d{most - 1}", "phone")))
    if home != "none":
        homes = {network.inputs[0]: home}
    return Plan(
        network=network.name,
        batch_size=micro_batches * samples,
        stages=tuple(stages),
        micro_batches=micro_batches,
        order=order,
        warm_up=warm_up,
        batch_norm="local" if draw(st.booleans()) else "synchronised",
        homes=homes,
        optimizer_slots=draw(st.integers(0, 2)),
        bucket_bytes=draw(st.sampled_from((1, 500, 25_000_000))),
    )
