"""The shares that ASTEROID Algorithm 1 finds, to compare them with the exact ones of `manyhands.planner.shares`."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def offloaded(
    seconds: Sequence[Callable[[int], float]], caps: Sequence[int], batch: int, block: int = 1
) -> list[int] | None:
    """Algorithm 1: shares by capacity within memory, then blocks move off the slowest device. None: no room."""
    if sum(caps) < batch or len(caps) > batch or min(caps) < 1:
        return None
    shares = _balanced([1.0 / second(batch) if second(batch) else 1.0 for second in seconds], list(caps), batch)
    while True:
        taken = [device_seconds(share) for device_seconds, share in zip(seconds, shares)]
        slowest = max(range(len(shares)), key=taken.__getitem__)
        moved = min(block, shares[slowest] - 1)
        room = [d for d in range(len(shares)) if d != slowest and shares[d] + moved <= caps[d]]
        if not room or moved < 1:
            return shares
        fastest = min(room, key=taken.__getitem__)
        tried = list(shares)
        tried[slowest] -= moved
        tried[fastest] += moved
        if max(device_seconds(share) for device_seconds, share in zip(seconds, tried)) >= taken[slowest]:
            return shares
        shares = tried


def _balanced(speeds: list[float], caps: list[int], batch: int) -> list[int]:
    """Phase 1: in proportion to capacity, at least one each; what does not fit goes to those with room."""
    shares = [1] * len(caps)
    left = batch - len(caps)
    while left:
        room = [d for d in range(len(caps)) if shares[d] < caps[d]]
        total = sum(speeds[d] for d in room)
        given = 0
        for d in room:
            part = min(int(left * speeds[d] / total), caps[d] - shares[d])
            shares[d] += part
            given += part
        if not given:  # rounding: one at a time, to the fastest with room
            shares[max(room, key=speeds.__getitem__)] += 1
            given = 1
        left -= given
    return shares
