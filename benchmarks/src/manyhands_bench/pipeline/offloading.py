"""The shares that ASTEROID Algorithm 1 finds, to compare them with the exact ones of `manyhands.planner.shares`."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def offloaded(
    seconds: Sequence[Callable[[int], float]], caps: Sequence[int], batch: int, block: int = 1
) -> list[int] | None:
    """Return the shares of Algorithm 1: by capacity within memory, then blocks move off the slowest device. None: no
    room."""
    if sum(caps) < batch or len(caps) > batch or min(caps) < 1:
        return None
    shares = _balanced([1.0 / second(batch) if second(batch) else 1.0 for second in seconds], list(caps), batch)
    while True:
        device_times = [device_seconds(share) for device_seconds, share in zip(seconds, shares)]
        slowest = max(range(len(shares)), key=device_times.__getitem__)
        moved = min(block, shares[slowest] - 1)
        room = [d for d in range(len(shares)) if d != slowest and shares[d] + moved <= caps[d]]
        if not room or moved < 1:
            return shares
        fastest = min(room, key=device_times.__getitem__)
        tried = list(shares)
        tried[slowest] -= moved
        tried[fastest] += moved
        if max(device_seconds(share) for device_seconds, share in zip(seconds, tried)) >= device_times[slowest]:
            return shares
        shares = tried


def _balanced(speeds: list[float], caps: list[int], batch: int) -> list[int]:
    """Return the shares of phase 1: in proportion to capacity, at least one each; what does not fit goes to devices
    that have room."""
    shares = [1] * len(caps)
    remaining = batch - len(caps)
    while remaining:
        room = [d for d in range(len(caps)) if shares[d] < caps[d]]
        total = sum(speeds[d] for d in room)
        assigned = 0
        for d in room:
            part = min(int(remaining * speeds[d] / total), caps[d] - shares[d])
            shares[d] += part
            assigned += part
        if not assigned:  # rounding: one sample at a time, to the fastest with room
            shares[max(room, key=speeds.__getitem__)] += 1
            assigned = 1
        remaining -= assigned
    return shares
