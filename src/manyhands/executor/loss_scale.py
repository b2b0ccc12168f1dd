"""Dynamic loss scaling, by the rules of torch.amp.GradScaler: the same number on every device at every step.

    loss · scale ─backward─▶ gradients · scale ─sums, then ÷ scale─▶ gradients ─all devices agree─▶ step, or skip it

Small gradients would be zeros in float16; with a factor they are not. Where it is too large, some are not finite
on some device: what the devices exchange before each update (schedule/gradient_norm.py) tells all of them, and all
skip the step and halve the factor. After many steps without that it is doubled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from manyhands.facts.errors import BadFile, BadPlan, NotFinite
from manyhands.facts.plan import Plan
from manyhands.facts.precision import BACKOFF, FIRST_SCALE, GROWTH, GROWTH_STEPS, LEAST_SCALE
from manyhands.schedule.policy import Schedule

_SCALE, _STEPS = "loss scale/scale", "loss scale/steps"
"""The entries among the optimizer's plain values."""


class LossScale:
    """The factor of the loss, and how many steps it has been good for."""

    def __init__(self) -> None:
        self.scale, self.steps = FIRST_SCALE, 0

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the factor, in place."""
        inverse = 1.0 / self.scale
        for gradient in gradients:
            gradient.mul_(inverse)

    def update(self, *, is_skipped: bool) -> None:
        """Follow a step that was done or skipped."""
        if is_skipped:
            self.scale, self.steps = self.scale * BACKOFF, 0
            if self.scale < LEAST_SCALE:
                raise NotFinite(
                    f"Gradients are not finite whatever the loss is scaled by: {self.scale:g} would be next.",
                    hint="float16 holds numbers up to 65504: use precision='bf16', or lower the learning rate.",
                )
            return
        self.steps += 1
        if self.steps == GROWTH_STEPS:
            larger = self.scale * GROWTH
            self.scale, self.steps = larger if larger <= torch.finfo(torch.float32).max else self.scale, 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, beside the optimizer's plain values."""
        return {_SCALE: self.scale, _STEPS: self.steps}

    def load(self, scalars: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's values."""
        scale, steps = scalars.get(_SCALE), scalars.get(_STEPS)
        is_scale = type(scale) in (int, float) and math.isfinite(scale or 0.0) and (scale or 0.0) >= LEAST_SCALE
        if not is_scale or type(steps) is not int or not 0 <= steps < GROWTH_STEPS:
            raise BadFile(
                f"The state has the loss scale {scale!r:.40} after {steps!r:.40} steps; precision='fp16' needs a "
                f"factor of at least {LEAST_SCALE:g}, and a whole number below {GROWTH_STEPS}."
            )
        self.scale, self.steps = float(scale or 0.0), steps


def loss_scale_of(schedule: Schedule, device: str) -> LossScale | None:
    """Return the factor as it begins, on a device that takes part in the exchange of the gradients' norm; None: the
    device neither computes the loss nor makes a step."""
    check_scaled(schedule.plan)
    norm = schedule.lowering.norm
    return LossScale() if norm is not None and device in norm.parts else None


def check_scaled(plan: Plan) -> None:
    """Refuse a plan by which devices could not agree which steps are skipped."""
    if not plan.gradient_norm:
        raise BadPlan(
            "precision='fp16' skips a step where any device's gradients overflow; the plan's devices do not "
            "exchange that.",
            hint="Write gradient_norm: true in the plan.",
        )
    if plan.order in ("replay", "interleave"):
        raise BadPlan(
            f"precision='fp16' needs the scale of the loss from the step before; with {plan.order} steps overlap.",
            hint="Use order: 1f1b, or precision='bf16'.",
        )
    if any(stage.codec.gradients for stage in plan.stages):
        raise BadPlan(
            "precision='fp16' looks for gradients that overflow; packed in a few bits they have no infinity.",
            hint="Leave out codec: {gradients: true}, or use precision='bf16'.",
        )
