"""The exchanges of tiles, counted as in DECNN Table 1."""

from __future__ import annotations

from itertools import product

from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.reads import Window
from manyhands.schedule.synchronisation import SyncCount


def window_exchanges(network: Network, rows: int, columns: int) -> SyncCount:
    """Return the exchanges of a grid of equal tiles as the paper counts them: one at every convolution whose window is
    larger than one place, between all neighbours (corners included) and both ways, of half a window's rows and columns.

    A run differs a little: no device sends the input's border, which is at hand; if a window moves by two places, one
    side has all it needs; max pooling exchanges too; and maps that do not divide evenly are moved a little.
    """
    places = list(product(range(rows), range(columns)))
    ways = [(b[0] - a[0], b[1] - a[1]) for a in places for b in places]
    pairs = [(down, right) for down, right in ways if max(abs(down), abs(right)) == 1]
    points = messages = size = 0
    for op in network.ops:
        reach = _reach(op.reads[0].rules) if "conv" in op.target and op.reads else None
        if reach is None or not op.macs:
            continue
        spec = network.tensors[op.inputs[0]]
        _, channels, height, width = spec.shape
        each = channels * DTYPE_BYTES[spec.dtype]
        points += 1
        messages += len(pairs)
        for down, right in pairs:
            tall = reach[0] if down else height / rows
            wide = reach[1] if right else width / columns
            size += round(each * tall * wide)
    return SyncCount(points, messages, size)


def _reach(rules: tuple[object, ...]) -> tuple[int, int] | None:
    """Return half the window of a convolution on maps, in rows and columns; None: it reads nothing beyond its own
    place."""
    if len(rules) != 4:
        return None
    windows = [rule for rule in rules[2:] if isinstance(rule, Window)]
    reaches = tuple(rule.reach // 2 for rule in windows)
    return (reaches[0], reaches[1]) if len(reaches) == 2 and any(reaches) else None
