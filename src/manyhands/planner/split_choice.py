"""The choice of the best deployment at the present rates: Algorithm 2 (SPLIT §4.5), and the baselines' choices.

    choose              the least seconds for the next τ iterations, including the change of deployment
    BASELINES           edge-only and JointDNN choose once; k0, uncompressed and unbounded lack one part each

Every chooser takes the same arguments, so an engine (rates.py) works with any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy

from manyhands.facts.errors import BadValue, OutOfMemory
from manyhands.planner.split import (
    UNPACKED,
    WIDTHS,
    Bound,
    Deployment,
    LinkRates,
    SplitProfile,
    edge_only_price,
    fits,
    listed,
    memory_of,
    prices,
)

ALIKE = 1e-9
"""Deployments whose costs differ by less, relatively, are equal: then the least disruptive is taken."""
LINK_RISK = 0.15
"""The least relative gain over no link at all at which a deployment begins to use the link."""
SLACK = 0.03
"""The relative extra cost that more batches under way may have."""


def choose(
    profile: SplitProfile,
    rates: LinkRates,
    tau: float,
    current: Deployment | None,
    k: Bound,
    widths: Sequence[int] = WIDTHS,
    *,
    lower_k: bool = True,
    drains: bool = False,
    link_risk: float = LINK_RISK,
) -> Deployment:
    """Return the deployment with the least seconds for τ iterations, including what must move first (Algorithm 2).

    `current` is None at the beginning: nothing has to move. K is a limit: where nothing is gained by running ahead, a
    smaller one saves replaying (`lower_k`; without it, K as it is). Among equal ones the least disruptive is taken: the
    current one, the least to move, the most bits, the largest K. A larger K that costs next to nothing (`SLACK`) is
    taken, because real rates are never as even as these. For the same reason, what runs at the edge alone stays there
    unless a split is better by `link_risk`.
    """
    ks = _bounds_up_to(k) if lower_k else [k]
    grid = prices(profile, rates, tau, current, ks, widths, drains=drains)
    alone = edge_only_price(profile, rates, tau, current)
    least = min(float(grid.min(initial=math.inf)), alone)
    if not least < math.inf:
        return _nothing_better(profile, rates, current, k, widths)
    good = [
        Deployment(profile.cuts[place].layer, ks[level], int(widths[width]))
        for level, place, width in numpy.argwhere(grid <= least * (1 + ALIKE))
    ]
    is_alone = current is None or current.cut == profile.edge_only
    if alone <= least * (1 + (link_risk if is_alone else ALIKE)):
        return Deployment(profile.edge_only)
    if current in good:
        return current
    weights, start = profile.running_bytes, profile.edge_only if current is None else current.cut

    def unrest(deployment: Deployment) -> tuple[float, int, float]:
        return (
            abs(weights[deployment.cut] - weights[start]),
            -deployment.bits,
            -math.inf if deployment.k is None else -deployment.k,
        )

    best = min(good, key=unrest)
    column = grid[:, profile.index(best.cut), list(widths).index(best.bits)]
    level = int(numpy.flatnonzero(column <= least * (1 + SLACK))[-1])
    return Deployment(best.cut, ks[level], best.bits)


def _bounds_up_to(k: Bound) -> list[Bound]:
    return [0, None] if k is None else list(range(k + 1))


def _nothing_better(
    profile: SplitProfile, rates: LinkRates, current: Deployment | None, k: Bound, widths: Sequence[int]
) -> Deployment:
    """Return the current deployment, because nothing passes the link and nothing can move. If nothing is allowed at
    all, raise an error."""
    if current is not None:
        return current
    if not fits(profile, Deployment(profile.edge_only)) and profile.memory_bytes is not None:
        least = min(profile.cuts, key=lambda cut: cut.edge_bytes)
        if least.edge_bytes > profile.memory_bytes:
            raise OutOfMemory(
                f"{profile.network} needs {least.edge_bytes:.3g} bytes at the edge, cut before layer {least.layer}; "
                f"there are {profile.memory_bytes:.3g}.",
                hint="Take a smaller batch.",
            )
    if max(widths) < min(cut.least_bits for cut in profile.cuts):
        least_bits = min(cut.least_bits for cut in profile.cuts)
        raise BadValue(f"Features packed in {listed(widths)} bits; {profile.network} needs {least_bits} or more.")
    raise BadValue(
        f"No split of {profile.network} is possible at {rates.up_bytes_per_second:.3g} B/s up, "
        f"{rates.down_bytes_per_second:.3g} B/s down, K up to {'any' if k is None else k}.",
        hint="Nothing passes the link, and the edge's memory is too small for all of it.",
    )


def edge_only(
    profile: SplitProfile, rates: LinkRates, tau: float, current: Deployment | None, k: Bound,
    widths: Sequence[int] = WIDTHS, *, drains: bool = False,
) -> Deployment:  # fmt: skip
    """Return the deployment without a server."""
    alone = Deployment(profile.edge_only)
    if not fits(profile, alone):
        raise OutOfMemory(
            f"{profile.network} needs {memory_of(profile, alone):.3g} bytes at the edge; there are "
            f"{profile.memory_bytes:.3g}.",
            hint="Take a smaller batch, or a server.",
        )
    return alone


def joint_dnn(
    profile: SplitProfile, rates: LinkRates, tau: float, current: Deployment | None, k: Bound,
    widths: Sequence[int] = WIDTHS, *, drains: bool = False,
) -> Deployment:  # fmt: skip
    """Return JointDNN's deployment (Eshratifar et al. 2019): chosen once, at the mean rate; no batch ahead, nothing
    packed.

    The shortest path from layer to layer on one side or the other, where features cross once, is the cheapest cut.
    """
    return current if current is not None else choose(profile, rates, 1, None, 0, (UNPACKED,), link_risk=0.0)


def plain(
    profile: SplitProfile, rates: LinkRates, tau: float, current: Deployment | None, k: Bound,
    widths: Sequence[int] = WIDTHS, *, drains: bool = False,
) -> Deployment:  # fmt: skip
    """Choose with the same engine and codec, but no batch ahead: K = 0."""
    return choose(profile, rates, tau, current, 0, widths, drains=drains)


def uncompressed(
    profile: SplitProfile, rates: LinkRates, tau: float, current: Deployment | None, k: Bound,
    widths: Sequence[int] = WIDTHS, *, drains: bool = False,
) -> Deployment:  # fmt: skip
    """Choose with the same engine, but unpacked features."""
    return choose(profile, rates, tau, current, k, (UNPACKED,), drains=drains)


def unbounded(
    profile: SplitProfile, rates: LinkRates, tau: float, current: Deployment | None, k: Bound,
    widths: Sequence[int] = WIDTHS, *, drains: bool = False,
) -> Deployment:  # fmt: skip
    """Choose with the same engine and codec, but any number of batches ahead: fast, and it may not converge (Fig.
    14)."""
    return choose(profile, rates, tau, current, None, widths, lower_k=False, drains=drains)


class Chooser(Protocol):
    """A function that returns the best deployment at some rates: Algorithm 2, or a baseline."""

    def __call__(
        self, profile: SplitProfile, rates: LinkRates, tau: float, current: Deployment | None, k: Bound,
        widths: Sequence[int] = ..., *, drains: bool = ...,
    ) -> Deployment: ...  # fmt: skip


BASELINES: dict[str, Chooser] = {
    "edge-only": edge_only,
    "jointdnn": joint_dnn,
    "k0": plain,
    "uncompressed": uncompressed,
    "unbounded": unbounded,
}
STATIC = ("edge-only", "jointdnn")
"""Baselines that choose once."""
