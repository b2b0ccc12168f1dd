"""The deployments of a network between an edge and a server: where it is cut, how its features are packed, and the cost
of that (SPLIT §4).

    upstream                          downstream            edge_side="upstream": its data is the network's input
    layers [0, cut)  ── feature ──▶  layers [cut, L)        edge_side="downstream": a generator, its output stays
                     ◀── gradient ──

An iteration is four modules, each busy with one batch at a time (Eq. 9): P1 upstream computes, P2 the feature travels,
P3 downstream computes, P4 the gradient travels back. With T_M the longest and T_Σ their sum, τ iterations take

    no batch ahead (K = 0)     τ·T_Σ                                                               Eq. 10
    no bound                   (τ-1)·T_M + T_Σ                                                     Eq. 11
    at most K+1 under way      (τ-1)·T_M + T_Σ + (⌈τ/(K+1)⌉-1)·max(0, T_Σ - (K+1)·T_M)             Eq. 12
    groups of K+1, drained     g·T_Σ + (τ-g)·T_M,   g = ⌈τ/(K+1)⌉

Eq. 12 lets a group begin when the first batch of the previous one is back; where a group waits for all of it, the last
line holds (`drains`): a plan's replay mode "grouped" drains, "window" does not. Both equal Eq. 10 at K = 0 and Eq. 11
without a bound. Everything else is the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from manyhands.facts.errors import BadValue

Numbers = NDArray[numpy.float64]
Bound = int | None
"""K: the most updates by which a gradient may be behind. 0: plain back-propagation. None: no bound."""
Side = Literal["upstream", "downstream"]

WIDTHS = (2, 4, 8, 16, 32)
"""Bits of a packed number; 32: unpacked."""
UNPACKED = 32
MOST_AHEAD = 32
"""The number of batches assumed to be under way where there is no bound, as far as memory allows."""


class LinkRates(msgspec.Struct, frozen=True):
    """The rates of the link between edge and server at a time; 0: nothing passes. The delay is one way."""

    up_bytes_per_second: float
    down_bytes_per_second: float
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0 or (name == "delay_seconds" and not self.delay_seconds < math.inf):
                raise BadValue(f"{name} is {getattr(self, name)}; it must be >= 0.")


class Deployment(msgspec.Struct, frozen=True, order=True):
    """Upstream has layers [0, cut), at most `k` updates behind, features packed in `bits`. Edge only: k=0, bits=32."""

    cut: int
    k: Bound = 0
    bits: int = UNPACKED


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one mini-batch if the network is cut before `layer`."""

    layer: int
    upstream_forward_seconds: float
    upstream_backward_seconds: float
    """Includes the optimiser's step. 0 where everything upstream is frozen."""
    downstream_forward_seconds: float
    downstream_backward_seconds: float
    feature_bytes: float = 0
    """Bytes that a codec packs, at 32 bits."""
    plain_bytes: float = 0
    """Bytes that travel unpacked: integers, headers, inputs that may be shared."""
    returned_bytes: float = 0
    """The gradient, at 32 bits; 0 where everything upstream is frozen."""
    edge_bytes: float = 0
    """The edge's memory with one batch under way."""
    history_bytes: float = 0
    """Memory of the edge for every further batch under way."""
    least_bits: int = WIDTHS[0]
    """The fewest bits: fewer cost more accuracy than was allowed (calibration)."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise BadValue(f"cut {self.layer}: {name} is {value}; it must be finite and >= 0.")
        if self.least_bits not in WIDTHS:
            raise BadValue(f"cut {self.layer}: least_bits is {self.least_bits}; it must be one of {listed(WIDTHS)}.")


class SplitProfile(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True, kw_only=True):
    """One network between one edge and one server, at one batch size. Plain data: it is stored and read again."""

    network: str
    fingerprint: str
    batch_size: int
    cuts: tuple[Cut, ...]
    """Sorted by layer. A cut at 0 or at the last layer leaves everything on one side: allowed if that is the edge."""
    layer_bytes: tuple[float, ...]
    """Bytes of each layer that travel if it changes sides: weights, buffers, the optimiser's state."""
    edge_side: Side = "upstream"
    memory_bytes: float | None = None
    """The edge's memory; None: no limit."""
    packing_seconds: float = 0.0
    packing_seconds_per_byte: float = 0.0
    """Packing a feature at 32 bits, upstream, is linear in its bytes (paper, Fig. 11). With 32 bits nothing is
    packed."""
    unpacking_seconds_per_byte: float = 0.0
    """Unpacking, downstream. The paper leaves it out; a server that is not much faster than the edge takes as long."""
    feedback_seconds_per_byte: float = 0.0
    """Applying error feedback to a returned gradient, per byte of it at 32 bits."""
    packs_gradients: bool = False
    """Whether returned gradients are packed like the features."""
    redeploy_seconds: float = 0.0
    """The seconds of any change, with or without layers to move: draining, and starting again."""
    phases: tuple[tuple[int, Bound], ...] = ((0, 5),)
    """Pairs: from this epoch on, this K."""
    version: int = 1

    def __post_init__(self) -> None:
        layers = [cut.layer for cut in self.cuts]
        if not layers or any(not a < b for a, b in zip(layers, layers[1:])):
            raise BadValue(f"A split needs cuts at increasing layers, not {listed(layers)}.")
        count = len(self.layer_bytes)
        lonely = count if self.edge_side == "downstream" else 0
        if layers[-1] > count or lonely in layers:
            wrong = lonely if lonely in layers else layers[-1]
            raise BadValue(f"A cut before layer {wrong} of {count} leaves the edge nothing.")
        starts = [epoch for epoch, _ in self.phases]
        if not starts or starts[0] != 0 or any(not a < b for a, b in zip(starts, starts[1:])):
            raise BadValue(f"Phases begin at epochs {listed(starts)}; the first must be 0, and they must increase.")
        if any(k is not None and k < 0 for _, k in self.phases):
            raise BadValue("K is below 0 in a phase.")

    @property
    def edge_only(self) -> int:
        """The cut that leaves everything to the edge."""
        return len(self.layer_bytes) if self.edge_side == "upstream" else 0

    def k_at(self, epoch: int) -> Bound:
        return next(k for start, k in reversed(self.phases) if start <= epoch)

    def column(self, name: str) -> Numbers:
        """Return one field of every cut."""
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, Numbers]:
        return {name: numpy.array([getattr(cut, name) for cut in self.cuts], float) for name in Cut.__struct_fields__}

    @cached_property
    def running_bytes(self) -> Numbers:
        """[n] -> bytes of the first n layers."""
        return numpy.concatenate([[0.0], numpy.cumsum(self.layer_bytes)])

    def index(self, layer: int) -> int:
        """Return the place of a cut in `cuts`."""
        for place, cut in enumerate(self.cuts):
            if cut.layer == layer:
                return place
        possible = listed([cut.layer for cut in self.cuts])
        raise BadValue(f"{self.network} cannot be cut before layer {layer}.", hint=f"Possible cuts: {possible}")


# ---- Costs


class Modules(NamedTuple):
    """T1 to T4, and the delay of a byte in both directions: arrays of one shape, or numbers."""

    t1: Numbers
    t2: Numbers
    t3: Numbers
    t4: Numbers
    delay: Numbers

    @property
    def longest(self) -> Numbers:
        """T_M, the longest module."""
        longest: Numbers = numpy.maximum(numpy.maximum(self.t1, self.t2), numpy.maximum(self.t3, self.t4))
        return longest

    @property
    def total(self) -> Numbers:
        """T_Σ, the sum. The delay keeps no module busy, but is waited for."""
        return self.t1 + self.t2 + self.t3 + self.t4 + self.delay


def modules(
    profile: SplitProfile, rates: LinkRates, ks: Sequence[Bound], widths: Sequence[int], *, drains: bool = False
) -> Modules:
    """Return Eq. 9 for every [K, cut, width]. At K = 0 nothing is replayed, nor is the first batch of a group that
    began after the one before was drained."""
    ahead, bits = bounds(ks)[:, None, None], numpy.array(widths, float)[None, None, :]
    forward, backward, feature, plain, returned = (
        profile.column(name)[None, :, None]
        for name in (
            "upstream_forward_seconds", "upstream_backward_seconds", "feature_bytes", "plain_bytes", "returned_bytes"
        )
    )  # fmt: skip
    replayed = 1.0 - 1.0 / (ahead + 1) if drains else (ahead > 0).astype(float)
    is_packed = (bits < UNPACKED) & (feature > 0)
    packing = numpy.where(is_packed, profile.packing_seconds + profile.packing_seconds_per_byte * feature, 0.0)
    feedback = numpy.where(is_packed, profile.feedback_seconds_per_byte * returned, 0.0)
    t1 = feedback + numpy.where(returned > 0, replayed * forward, 0.0) + backward + forward + packing
    back_bits = bits if profile.packs_gradients else UNPACKED
    onward, back = directions(profile, rates)
    t2 = _over(plain + feature * bits / UNPACKED, onward)
    t4 = _over(returned * back_bits / UNPACKED, back)
    unpacking = numpy.where(is_packed, profile.unpacking_seconds_per_byte * feature, 0.0)
    work = profile.column("downstream_forward_seconds") + profile.column("downstream_backward_seconds")
    t3 = work[None, :, None] + unpacking
    transfers = (plain + feature > 0).astype(float) + (returned > 0)
    shape = numpy.broadcast_shapes(ahead.shape, feature.shape, bits.shape)
    five = (t1, t2, t3, t4, transfers * rates.delay_seconds)
    return Modules(*(numpy.broadcast_to(times, shape) for times in five))


def pipeline_seconds(
    longest: Numbers | float, total: Numbers | float, tau: float, k: Numbers | float, *, drains: bool = False
) -> Numbers:
    """Return the seconds of τ iterations by Eq. 12, or with `drains` its variant for groups that wait for all of the
    one before. `k` = inf means no bound."""
    iterations = max(1, math.ceil(tau))
    longest, total, k = (numpy.asarray(number, float) for number in (longest, total, k))
    groups = numpy.where(numpy.isinf(k), 1.0, numpy.ceil(iterations / (k + 1)))
    is_passable = numpy.isfinite(total)
    longest, total = numpy.where(is_passable, longest, 0.0), numpy.where(is_passable, total, 0.0)
    if drains:
        seconds = groups * total + (iterations - groups) * longest
    else:
        wait = numpy.maximum(0.0, total - (numpy.where(numpy.isinf(k), 0.0, k) + 1) * longest)
        seconds = (iterations - 1) * longest + total + (groups - 1) * wait
    total_seconds: Numbers = numpy.where(is_passable, seconds, math.inf)
    return total_seconds


def moving_seconds(profile: SplitProfile, rates: LinkRates, current: int, cuts: Numbers) -> Numbers:
    """Return the seconds to move the layers that change sides, in their direction, from a cut to each of `cuts` (Eq.
    13)."""
    moved = profile.running_bytes[cuts.astype(int)] - profile.running_bytes[current]
    onward, back = directions(profile, rates)
    return numpy.where(moved < 0, _over(-moved, onward), _over(moved, back))


def prices(
    profile: SplitProfile,
    rates: LinkRates,
    tau: float,
    current: Deployment | None,
    ks: Sequence[Bound],
    widths: Sequence[int],
    *,
    drains: bool = False,
) -> Numbers:
    """Return [K, cut, width] -> seconds of τ iterations and of redeploying (Eq. 15); inf where it is not allowed.

    Everything at the edge has no K and no width, and is not among them: `edge_only_price`.
    """
    times = modules(profile, rates, ks, widths, drains=drains)
    ahead, layers = bounds(ks)[:, None, None], profile.column("layer")[None, :, None]
    seconds = pipeline_seconds(times.longest, times.total, tau, ahead, drains=drains)
    if current is not None:
        bits, current_k = numpy.array(widths)[None, None, :], bounds([current.k])
        is_same = (layers == current.cut) & (ahead == current_k) & (bits == current.bits)
        seconds = seconds + moving_seconds(profile, rates, current.cut, layers)
        seconds = seconds + numpy.where(is_same, 0.0, profile.redeploy_seconds)
    return numpy.where(allowed_grid(profile, ks, widths), seconds, math.inf)


def edge_only_price(profile: SplitProfile, rates: LinkRates, tau: float, current: Deployment | None) -> float:
    """Return the price of everything at the edge; inf where its memory is too small, or the profile does not cover
    it."""
    alone = Deployment(profile.edge_only)
    if all(cut.layer != alone.cut for cut in profile.cuts) or not fits(profile, alone):
        return math.inf
    seconds = seconds_of(profile, rates, tau, alone)
    if current is None or current.cut == alone.cut:
        return seconds
    moving = moving_seconds(profile, rates, current.cut, numpy.array([alone.cut]))
    return seconds + float(moving[0]) + profile.redeploy_seconds


def seconds_of(
    profile: SplitProfile, rates: LinkRates, tau: float, deployment: Deployment, *, drains: bool = False
) -> float:
    """Return the seconds of τ iterations of one deployment, allowed or not, with nothing to move."""
    times = modules(profile, rates, [deployment.k], [deployment.bits], drains=drains)
    seconds = pipeline_seconds(times.longest, times.total, tau, bounds([deployment.k])[:, None, None], drains=drains)
    return float(seconds[0, profile.index(deployment.cut), 0])


def memory_of(profile: SplitProfile, deployment: Deployment) -> float:
    """Return the bytes of the edge's memory that a deployment needs."""
    cut = profile.cuts[profile.index(deployment.cut)]
    return cut.edge_bytes + (MOST_AHEAD if deployment.k is None else deployment.k) * cut.history_bytes


def fits(profile: SplitProfile, deployment: Deployment) -> bool:
    """Return whether the edge's memory is large enough."""
    return profile.memory_bytes is None or memory_of(profile, deployment) <= profile.memory_bytes


def bounds(ks: Sequence[Bound]) -> Numbers:
    """Return Ks as numbers, no bound as infinity."""
    return numpy.array([math.inf if k is None else k for k in ks], float)


def directions(profile: SplitProfile, rates: LinkRates) -> tuple[float, float]:
    """Return the rates from upstream to downstream, and back."""
    up, down = rates.up_bytes_per_second, rates.down_bytes_per_second
    return (up, down) if profile.edge_side == "upstream" else (down, up)


def _over(sizes: Numbers, rate: float) -> Numbers:
    """Return the seconds to send these bytes. No bytes take no time, even where nothing passes."""
    if rate > 0:
        return sizes / rate
    seconds: Numbers = numpy.where(sizes > 0, math.inf, 0.0)
    return seconds


def allowed_grid(profile: SplitProfile, ks: Sequence[Bound], widths: Sequence[int]) -> NDArray[numpy.bool_]:
    """Return [K, cut, width] -> whether there are enough bits, enough memory, and two sides."""
    layers, bits = profile.column("layer")[None, :, None], numpy.array(widths, float)[None, None, :]
    ahead = bounds(ks)[:, None, None]
    ahead = numpy.where(numpy.isinf(ahead), MOST_AHEAD, ahead)
    allowed = bits >= profile.column("least_bits")[None, :, None]
    if profile.memory_bytes is not None:
        needed = profile.column("edge_bytes")[None, :, None] + ahead * profile.column("history_bytes")[None, :, None]
        allowed = allowed & (needed <= profile.memory_bytes)
    allowed = numpy.broadcast_to(allowed, (len(ks), len(profile.cuts), len(widths)))
    is_allowed: NDArray[numpy.bool_] = numpy.where(layers == profile.edge_only, False, allowed)
    return is_allowed


def listed(numbers: Collection[int]) -> str:
    """Return numbers as a list for a message."""
    return ", ".join(map(str, numbers)) or "none"
