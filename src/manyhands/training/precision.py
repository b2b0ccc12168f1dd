"""The option of `mh.train` that says in which precision the network computes."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.facts.precision import FLOAT32, FP16, PRECISIONS
from manyhands.job.config import Config, option


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Config):
    """The precision of operators; weights, their gradients and the optimizer's state keep the module's own type."""

    precision: str = option(
        FLOAT32, "The precision that operators compute in, and in which activations and gradients travel.",
        "--precision", choices=PRECISIONS, noun="precision", on_resume="same",
    )  # fmt: skip

    exact: bool = option(
        False, "On GPUs: deterministic kernels without TF32, and every loss looked at before the next step. False: "
        "PyTorch's settings of this process.", "--exact", kind=bool,
    )  # fmt: skip

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, and steps whose gradients are not finite are skipped."""
        return self.precision == FP16
