"""The tolerance of a network: how few bits its features may have, and how stale a gradient may be (SPLIT §4).

Determined by short trainings (split/calibration.py), kept by network, data and batch size.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.facts.errors import BadValue
from manyhands.facts.plan import ReplayMode

VERSION = 1
WIDTHS = (2, 4, 8, 16)
UNPACKED = 32
Measure = Literal["accuracy", "loss"]


class Tried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that was tried, and the results of its trainings: accuracy, or loss where targets are not classes."""

    cut: int
    k: int
    bits: int
    scores: tuple[float, ...]
    """One for each training; empty where training broke off because its numbers were not finite."""
    is_enough: bool
    later: bool = False
    """Whether training starts from the weights that the reference ended with."""


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tolerance of a network. It is plain data, which is stored and read again."""

    network: str
    fingerprint: str
    data: str
    batch_size: int
    optimizer: str
    allowed_drop: float
    measure: Measure
    reference: float
    spread: float
    """Half of the difference between seeds of the reference: that much more is tolerated."""
    steps: int
    """The steps of each training."""
    repeats: int
    bits: dict[str, int]
    """Cut, as text -> fewest bits."""
    k: int
    later_k: int
    mode: ReplayMode = "grouped"
    tried: tuple[Tried, ...] = ()
    norms: tuple[float, ...] = ()
    """‖w‖₁ after each step of the reference, for Eq. 6: `weight_change_rates`."""
    is_complete: bool = True
    """Whether there was time for everything."""
    seconds: float = 0.0
    version: int = VERSION

    def __post_init__(self) -> None:
        if any(not cut.isdecimal() or width not in (*WIDTHS, UNPACKED) for cut, width in self.bits.items()):
            raise BadValue(f"A calibration gives bits as {self.bits}.")
        if min(self.k, self.later_k) < 0:
            raise BadValue(f"A calibration gives K as {self.k} and {self.later_k}; they must be >= 0.")

    @property
    def least_bits(self) -> dict[int, int]:
        """The calibration as `split_profile` takes it."""
        return {int(cut): width for cut, width in self.bits.items()}

    def phases(self, later_epoch: int) -> tuple[tuple[int, int], ...]:
        """Return K by epoch: a larger one later, where the weights tolerate it by then."""
        if later_epoch < 1 or self.later_k <= self.k:
            return ((0, self.k),)
        return ((0, self.k), (later_epoch, self.later_k))
