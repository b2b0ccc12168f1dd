"""How far the weights move in K steps (SPLIT Eq. 6)."""

from __future__ import annotations


def weight_change_rates(norms: list[float] | tuple[float, ...], k: int) -> list[float]:
    """Eq. 6: how many per cent ‖w‖₁ moved over K steps, for every step that has one K before it."""
    return [100 * abs(after - before) / before if before else 0.0 for before, after in zip(norms, norms[k:]) if k > 0]
