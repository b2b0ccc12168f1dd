"""How often the devices of a plan wait for each other in one inference, and what travels then (DECNN Tables 1 and 3).

A *synchronisation point* is a place at which the devices of a stage exchange something before they go on: halos of
tiles, channels that others have made, partial sums, sums over a whole map. What goes from one stage to the next is
counted apart: it waits for one stage only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.reads import Window
from manyhands.schedule.actions import Message, Reduce, Send
from manyhands.schedule.lowering import Lowering
from manyhands.schedule.reduction import pair_bytes, rounds_of

BETWEEN = ("value", "input")
"""Kinds of messages between stages, and from an input's home."""


@dataclass(frozen=True)
class SyncCount:
    """Of one micro-batch."""

    points: int
    messages: int
    bytes: int
    between_messages: int = 0
    """From stage to stage, or from an input's home."""
    between_bytes: int = 0

    def to_dict(self) -> dict[str, int]:
        return {
            "sync_points": self.points,
            "messages": self.messages,
            "bytes": self.bytes,
            "between_stages_messages": self.between_messages,
            "between_stages_bytes": self.between_bytes,
        }


def sync_points(plan: Plan, network: Network) -> SyncCount:
    """Counted from the plan's own forward actions: what is here is what travels."""
    lowering = Lowering(resolve(plan, network), network)
    inside: list[Message] = []
    between: list[Message] = []
    sums: dict[object, Reduce] = {}
    for work in lowering.work.values():
        for action in (*work.before, *work.forward_actions):
            if isinstance(action, Send):
                (between if action.message.kind in BETWEEN else inside).append(action.message)
            elif isinstance(action, Reduce):
                sums[action.key] = action
    groups = [group for geometry in lowering.geometries for group in geometry.groups]
    points = sum(bool(group.fetches or group.sums) for group in groups)
    hops = sum(len(hops) for reduce in sums.values() for hops in rounds_of(reduce))
    summed = sum(sum(pair_bytes(reduce, network).values()) for reduce in sums.values())
    return SyncCount(
        points + len(sums),
        len(inside) + hops,
        sum(message.bytes for message in inside) + summed,
        len(between),
        sum(message.bytes for message in between),
    )


def window_exchanges(network: Network, rows: int, columns: int) -> SyncCount:
    """Exchanges of a grid of equal tiles as the paper counts them: one at every convolution whose window is larger than
    one place, between all neighbours (corners included) and both ways, of half a window's rows and columns.

    A run does it a little differently: nobody sends the input's border, which is at hand; where a window moves by two
    places one side has all it needs; max pooling exchanges too; and maps that do not divide evenly are moved a little.
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
    """Half the window of a convolution on maps in rows and columns; None: it reads nothing beyond its own place."""
    if len(rules) != 4:
        return None
    windows = [rule for rule in rules[2:] if isinstance(rule, Window)]
    found = tuple(rule.reach // 2 for rule in windows)
    return (found[0], found[1]) if len(found) == 2 and any(found) else None
