"""Precisions by name, and the rules of loss scaling: plain facts, which need no torch."""

from __future__ import annotations

FLOAT32, BF16, FP16 = "float32", "bf16", "fp16"
PRECISIONS = {
    FLOAT32: "the module's own type",
    BF16: "bfloat16 under torch.autocast",
    FP16: "float16 under torch.autocast, with dynamic loss scaling",
}
"""Precision -> what it means."""
SUMMED_IN = {"float16": "float32", "bfloat16": "float32"}
"""Type -> the wider one in which sums over devices are formed and travel; others are summed as they are."""
FIRST_SCALE, GROWTH, GROWTH_STEPS, BACKOFF = 2.0**16, 2.0, 2000, 0.5
"""Of loss scaling, as torch.amp.GradScaler's defaults: the first factor, what it grows by after so many steps without
an overflow, and what it shrinks by after one."""
LEAST_SCALE = 2.0**-24
"""A smaller factor helps no more: gradients themselves are not finite."""
