"""The distance that weights move in K steps (SPLIT Eq. 6)."""

from __future__ import annotations


def weight_change_rates(norms: list[float] | tuple[float, ...], k: int) -> list[float]:
    """Return by how many per cent ‖w‖₁ changed over K steps, for every step that has one K before it (Eq. 6)."""
    return [100 * abs(after - before) / before if before else 0.0 for before, after in zip(norms, norms[k:]) if k > 0]
