"""The clipping of gradients before each update, as data: by the norm of all of them, or number by number."""

from __future__ import annotations

import math

import msgspec

from manyhands.facts.errors import BadValue

ROOM = 1e-6
"""What is added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_."""


class Clipping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of gradients; None: no limit. One of them at a time: PyTorch has no order for the two."""

    norm: float | None = None
    """The most that the norm of all gradients together may be (torch.nn.utils.clip_grad_norm_)."""
    value: float | None = None
    """The most that each number of a gradient may be, up and down (torch.nn.utils.clip_grad_value_)."""

    def check(self) -> None:
        """Refuse limits that are none, and both at once."""
        for name, limit in (("clip_norm", self.norm), ("clip_value", self.value)):
            if limit is not None and not (limit > 0 and math.isfinite(limit)):
                raise BadValue(f"{name} is {limit}; it must be a number above 0.")
        if self.norm is not None and self.value is not None:
            raise BadValue(
                f"clip_norm is {self.norm} and clip_value is {self.value}; the order in which both would be applied is "
                "not defined.",
                hint="Give one of them.",
            )

    @property
    def is_on(self) -> bool:
        return self.norm is not None or self.value is not None

    def factor(self, norm: float) -> float:
        """Return the number that gradients of this norm are multiplied by, at most 1. Not a number stays so, as in
        PyTorch: the weights show it in the next step's loss."""
        assert self.norm is not None
        factor = self.norm / (norm + ROOM)
        return 1.0 if factor > 1.0 else factor
