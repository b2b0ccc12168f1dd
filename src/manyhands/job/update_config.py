"""The options of an update of the weights beside the optimizer: limits of gradients, and the weights' average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.job.config import Config, option

if TYPE_CHECKING:
    from manyhands.facts.clipping import Clipping


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(Config):
    """The options of each update of the weights: clipping before the optimizer's step, averaging after it."""

    clip_norm: float | None = option(
        None,
        "The most that the norm of all gradients together may be, as in PyTorch's clip_grad_norm_; over all devices.",
        "--clip-norm", kind=float, more_than=0, on_resume="same",
    )  # fmt: skip
    clip_value: float | None = option(
        None, "The most that each number of a gradient may be, up and down, as in clip_grad_value_.",
        "--clip-value", kind=float, more_than=0, on_resume="same",
    )  # fmt: skip

    ema: float | None = option(
        None,
        "Keep an exponential moving average of the weights with this decay, like 0.999, as PyTorch's AveragedModel; "
        "checkpoints have it as ema.safetensors.",
        "--ema", kind=float, more_than=0, at_most=1, on_resume="same",
        in_python="result.ema is its state_dict.",
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.clipping is not None:
            self.clipping.check()

    @property
    def clipping(self) -> Clipping | None:
        """The limits of gradients; None: there are none."""
        from manyhands.facts.clipping import Clipping

        limits = Clipping(self.clip_norm, self.clip_value)
        return limits if limits.is_on else None
