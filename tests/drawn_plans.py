"""Drawn plans that fit a given network: every share, order, codec and home; and plans that mix tiles with others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

from hypothesis import assume
from hypothesis import strategies as st

from manyhands.facts.boxes import cut_points
from manyhands.facts.network import Network
from manyhands.facts.plan import (
    EVERYWHERE,
    ByChannels,
    BySamples,
    ByTiles,
    Codec,
    LayerName,
    Order,
    Plan,
    Share,
    Single,
    Stage,
    WarmUp,
)
from manyhands.schedule.tileable import maps_of

FIXED_ORDERS: tuple[Order, ...] = ("sequential", "gpipe", "1f1b", "stream")
GRIDS = ((2, 1), (1, 2), (3, 1), (2, 2))
UNEVEN_GRIDS: tuple[tuple[Sequence[float], Sequence[float]], ...] = (
    ((1,), (1, 1)), ((1, 1), (1,)), ((1, 1), (1, 1)), ((1, 1, 1), (1, 1)), ((2, 1), (1, 3)), ((1, 3, 1), (1,)),
)  # fmt: skip


@st.composite
def groups(draw: st.DrawFn, first: int, last: int) -> tuple[int, ...] | None:
    """Layers at which groups of a stage [first, last) start, or None for every layer."""
    if draw(st.booleans()):
        return None
    return (first, *sorted(draw(st.sets(st.integers(first + 1, last - 1))))) if last > first + 1 else (first,)


@st.composite
def shares(
    draw: st.DrawFn, kinds: tuple[str, ...], samples: int, first: int, last: int, *, least: int = 1
) -> tuple[Share, int]:
    """A share of layers [first, last), and how many devices it takes; `least`: by samples, where there are enough."""
    kind = draw(st.sampled_from(kinds))
    if kind == "samples":
        fewest = min(least, samples) - 1
        cuts = sorted(draw(st.sets(st.integers(1, samples - 1), min_size=fewest, max_size=2))) if samples > 1 else []
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


def warm_ups(stages: int, micro_batches: int) -> st.SearchStrategy[WarmUp | tuple[int, ...]]:
    """A rule, or numbers that do not increase."""
    rules: st.SearchStrategy[WarmUp] = st.sampled_from(get_args(WarmUp))
    counts = st.lists(st.integers(1, micro_batches), min_size=stages, max_size=stages)
    return rules | counts.map(lambda ahead: tuple(sorted(ahead, reverse=True)))


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
    warm_up = draw(warm_ups(len(stages), micro_batches))
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
        gradient_norm=order != "stream" and draw(st.booleans()),
        homes=homes,
        optimizer_slots=draw(st.integers(0, 2)),
        bucket_bytes=draw(st.sampled_from((1, 500, 25_000_000))),
    )


# Tiles of a captured network


@st.composite
def drawn_groups(draw: st.DrawFn, network: Network, first: int, last: int) -> tuple[LayerName, ...] | None:
    """None, one group, or groups that start at some operators of layers [first, last), by number or name."""
    kind = draw(st.sampled_from(("none", "one", "some", "some")))
    if kind == "none":
        return None
    inside = list(range(first + 1, last))
    chosen = sorted(draw(st.sets(st.sampled_from(inside), max_size=6))) if kind == "some" and inside else []
    names = [network.ops[network.layers[layer].first].name if draw(st.booleans()) else layer for layer in chosen]
    return (first, *names)


def _has_no_empty_tile(image: tuple[int, ...], rows: Sequence[float], columns: Sequence[float]) -> bool:
    """Of the map that a stage begins with, each tile has something, or the map has no rows and columns to share."""
    if len(image) != 4 or image[2] * image[3] == 1:
        return True
    points = cut_points(image[2], rows), cut_points(image[3], columns)
    return all(a < b for cuts in points for a, b in pairwise(cuts))


def grids_for(network: Network, first: int) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Those that leave no tile of a stage's first map empty."""
    read = network.ops[network.layers[first].first].inputs  # none of a counter of batches
    image = network.tensors[read[0]].shape if read else ()
    return [grid for grid in UNEVEN_GRIDS if _has_no_empty_tile(image, *grid)]


@st.composite
def drawn_tiles(draw: st.DrawFn, network: Network, first: int, last: int) -> ByTiles:
    rows, columns = draw(st.sampled_from(grids_for(network, first)))
    forward, backward = draw(drawn_groups(network, first, last)), draw(drawn_groups(network, first, last))
    early = draw(st.sampled_from((0, 0, 1))) * tuple(range(first, last))
    return ByTiles(tuple(rows), tuple(columns), forward, backward, early)


# Plans that mix shares


PATTERNS = (
    ("tiles", "samples", "single"), ("samples", "tiles", "single"), ("single", "tiles", "samples"),
    ("tiles", "tiles", "samples"), ("tiles", "single", "tiles", "samples"),
)  # fmt: skip
KINDS = ("tiles", "samples", "single")


@st.composite
def mixed_stages(draw: st.DrawFn, network: Network, samples: int) -> list[tuple[int, int, Share, int]]:
    """Two to four stages as (first, last, share, devices), by a pattern or any; at least one by tiles."""
    layers = len(network.layers)
    any_pattern = st.lists(st.sampled_from(KINDS), min_size=2, max_size=4)
    kinds = draw(st.sampled_from(PATTERNS) | any_pattern)
    assume(layers >= len(kinds))
    cuts = draw(st.sets(st.integers(1, layers - 1), min_size=len(kinds) - 1, max_size=len(kinds) - 1))
    stages: list[tuple[int, int, Share, int]] = []
    for (first, last), kind in zip(pairwise([0, *sorted(cuts), layers]), kinds):
        share: Share
        if kind == "tiles" and _can_be_tiled(network, first, last):
            share = tiles = draw(drawn_tiles(network, first, last))
            count = len(tiles.rows) * len(tiles.columns)
        else:
            own = "single" if kind == "single" else "samples"
            share, count = draw(shares((own,), samples, first, last, least=2))
        stages.append((first, last, share, count))
    assume(any(isinstance(share, ByTiles) for _, _, share, _ in stages))
    return stages


def _can_be_tiled(network: Network, first: int, last: int) -> bool:
    layers = network.layers
    return maps_of(network, layers[first].first, layers[last - 1].last)[1] is None and bool(grids_for(network, first))


@st.composite
def mixed_plans(draw: st.DrawFn, network: Network) -> Plan:
    """Training plans in which tiles, samples and single devices follow each other in any way, exact ones: no codec.

    Where the order lets it, half of them draw every stage's devices from one crew, in any order.
    """
    micro_batches, samples = draw(st.integers(1, 4)), draw(st.sampled_from((2, 3, 4, 1)))
    order: Order = draw(st.sampled_from(("sequential", "gpipe", "1f1b", "1f1b")))
    found = draw(mixed_stages(network, samples))
    may_repeat = order in ("sequential", "gpipe") or micro_batches == 1
    crew = [f"d{number}" for number in range(max(count for *_, count in found) + 1)]
    stages: list[Stage] = []
    used = 0
    repeats = may_repeat and draw(st.booleans())
    for first, last, share, count in found:
        if repeats:
            devices = tuple(draw(st.permutations(crew))[:count])
        else:
            devices = tuple(f"d{number}" for number in range(used, used + count))
            used += count
        stages.append(Stage((first, last), devices, share, reduce="gateway" if draw(st.booleans()) else "allreduce"))
    home = draw(st.sampled_from((None, None, EVERYWHERE, stages[0].devices[0], stages[-1].devices[-1], "phone")))
    return Plan(
        network=network.name,
        batch_size=micro_batches * samples,
        stages=tuple(stages),
        micro_batches=micro_batches,
        order=order,
        warm_up=draw(warm_ups(len(stages), micro_batches)),
        homes={} if home is None else {network.inputs[0]: home},
        gradient_norm=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from((1, 500, 25_000_000))),
    )
