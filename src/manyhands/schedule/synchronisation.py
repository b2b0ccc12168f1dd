"""Counts of how often a plan's devices wait for each other in an inference, and of what travels (DECNN Tables 1 and 3).

A *synchronisation point* is a place at which the devices of a stage exchange something before they go on: halos of
tiles, channels that other devices have made, partial sums, sums over a whole map. What goes from one stage to the next
is counted apart: it waits for one stage only.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Message, Reduce, Send
from manyhands.schedule.lowering import Lowering
from manyhands.schedule.reduction import pair_bytes, rounds_of

BETWEEN = ("value", "input")
"""Kinds of messages between stages, and from an input's home."""


@dataclass(frozen=True)
class SyncCount:
    """The synchronisation points of one micro-batch, and what travels at them."""

    points: int
    messages: int
    bytes: int
    between_messages: int = 0
    """Messages from stage to stage, or from an input's home."""
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
    """Return the counts for a plan, taken from its own forward actions: what is counted is what travels."""
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
