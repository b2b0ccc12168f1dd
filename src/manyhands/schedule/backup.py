"""Copies of devices' state (ASTEROID §3.4): stages of one device keep them at the next stage, the last at the first."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from manyhands.facts.plan import Plan

LINK_PART = 0.1
"""The fraction of a link's time that copies may take."""
COPY_BYTES_PER_SECOND = 4e9
COPY_PART = 0.01
"""The fraction of a round's time that taking a copy may take."""
MOST_REPLAYED_SECONDS = 30.0
"""However expensive copies are, rounds are not run again for longer than this."""


def holders(
    plan: Plan, weights: Mapping[str, Collection[str]], stepped: Mapping[str, Collection[str]] | None = None
) -> dict[str, str]:
    """Return for each device the one that holds a copy of its state.

    A device all of whose weights others have and step too needs none. `stepped`: the weights that each steps, whose
    optimizer state it has; None: all it has. A gateway alone steps what the other devices of its stage have.
    """
    stepped = weights if stepped is None else stepped
    holder_of: dict[str, str] = {}
    for device, weight_names in weights.items():
        others = [other for other in weights if other != device]
        is_elsewhere = set(weight_names) <= {name for other in others for name in weights[other]}
        if is_elsewhere and set(stepped[device]) <= {name for other in others for name in stepped[other]}:
            continue
        next_device = _next_device(plan, device)
        if next_device is not None:
            holder_of[device] = next_device
    return holder_of


def _next_device(plan: Plan, device: str) -> str | None:
    """Return the first device of the next stage that has another one; None: no stage has."""
    places = [place for place, stage in enumerate(plan.stages) if device in stage.devices]
    last = places[-1] if places else -1
    for distance in range(1, len(plan.stages) + 1):
        stage = plan.stages[(last + distance) % len(plan.stages)]
        for other in stage.devices:
            if other != device:
                return other
    return None


def is_due(before: int, after: int, every: int) -> bool:
    """Return whether a copy is taken after a round: one of its steps completed another `every` steps; 0: never."""
    return bool(every) and before // every != after // every


def rounds_between(state_bytes: float, link_bytes_per_second: float, round_seconds: float) -> int:
    """Return how many rounds lie between two backups, so that copying and sending them costs next to nothing."""
    seconds = state_bytes / COPY_BYTES_PER_SECOND / COPY_PART
    if link_bytes_per_second < math.inf:
        seconds = max(seconds, state_bytes / link_bytes_per_second / LINK_PART)
    return max(1, math.ceil(min(seconds, MOST_REPLAYED_SECONDS) / max(round_seconds, 1e-6)))
