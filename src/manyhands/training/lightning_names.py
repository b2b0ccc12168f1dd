"""Lightning's names of a Trainer's options, in manyhands' words: what is mapped, what is left to its loop, what is
refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from manyhands.facts.errors import BadValue
from manyhands.facts.precision import BF16, FLOAT32, FP16, PRECISIONS

OF_THE_LOOP = (
    "fast_dev_run", "min_epochs", "min_steps", "max_time", "limit_train_batches", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "overfit_batches", "check_val_every_n_epoch",
    "num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar",
    "enable_model_summary", "inference_mode", "profiler", "barebones", "reload_dataloaders_every_n_epochs",
    "default_root_dir", "enable_autolog_hparams", "model_registry",
)  # fmt: skip
"""Options that Lightning's own loop carries out, and which need a LightningModule."""
REFUSED = {
    "accelerator": ("workers compute on what they have", "Leave it out: each worker says what it computes on (--on)."),
    "strategy": ("manyhands plans how devices share the work", 'Write plan="samples", or leave it out.'),
    "num_nodes": ("a cluster says which machines take part", "Write cluster=, such as a file or a coordinator."),
    "sync_batchnorm": ("batch norm is taken over all devices already", 'Leave it out, or write batch_norm="local".'),
    "use_distributed_sampler": (
        "this process loads every batch, and sends each device its part",
        "Leave it out; the sampler of the DataLoader is used as it is.",
    ),
    "plugins": ("they act on tensors that are on the workers", "Leave it out; precision= is an option of its own."),
    "deterministic": ("it would hold for this process alone", "Leave it out; seed= makes runs repeatable."),
    "benchmark": ("it would hold for this process alone", "Leave it out; workers measure their kernels themselves."),
    "detect_anomaly": (
        "it would watch this process alone",
        "Leave it out: numbers that are not finite end a run, and their layer is named.",
    ),
}
"""Options of Lightning that would contradict a cluster -> why, and what to do."""
_PRECISIONS = {
    "32-true": FLOAT32, "32": FLOAT32, "64-true": FLOAT32, "64": FLOAT32, "bf16-mixed": BF16, "16-mixed": FP16,
    BF16: BF16, "16": FP16,
}  # fmt: skip
"""Lightning's precisions -> ours, in which the module's own type is "float32"."""
_LIGHTNINGS = {FLOAT32: "32-true", BF16: "bf16-mixed", FP16: "16-mixed"}


class NamedPrecision(NamedTuple):
    """A precision by both names."""

    ours: str
    lightnings: str

    @property
    def is_double(self) -> bool:
        """Whether Lightning makes the module float64."""
        return self.lightnings == "64-true"


def read_precision(value: Any) -> NamedPrecision:
    """Return a precision that was given by Lightning's name or by ours; None: the module's own."""
    if value is None:
        return NamedPrecision(FLOAT32, "32-true")
    text = str(value)
    ours = text if text in PRECISIONS else _PRECISIONS.get(text)
    if isinstance(value, bool) or ours is None:
        choices = ", ".join(dict.fromkeys(name for name in _PRECISIONS if not name.isdigit()))
        raise BadValue(
            f"precision is {value!r:.40}; weights stay as the module has them, and only what is computed of them may "
            "be lower.",
            hint=f"Use one of {choices}.",
        )
    return NamedPrecision(ours, "64-true" if text in ("64-true", "64") else _LIGHTNINGS[ours])


def clipping_options(value: Any, algorithm: Any) -> dict[str, float]:
    """Return the option of `mh.train` for gradient_clip_val and gradient_clip_algorithm."""
    if algorithm not in (None, "norm", "value"):
        raise BadValue(
            f"gradient_clip_algorithm is {algorithm!r:.40}; it must be 'norm' or 'value'.",
            hint='Write gradient_clip_algorithm="norm", or leave it out.',
        )
    if value is None or value == 0:  # Lightning's 0 is no clipping, too
        return {}
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise BadValue(
            f"gradient_clip_val is {value!r:.40}; it must be a number above 0.", hint="Leave it out for no clipping."
        )
    return {"clip_value" if algorithm == "value" else "clip_norm": float(value)}


def validation_options(interval: Any) -> dict[str, Any]:
    """Return the option of `mh.train` for val_check_interval."""
    if interval is None:
        return {}
    if isinstance(interval, int) and not isinstance(interval, bool) and interval > 0:
        return {"validate_every": interval}
    if interval == 1.0 and isinstance(interval, float):
        return {"validate_every": "epoch"}
    raise BadValue(
        f"val_check_interval is {interval!r:.40}; of a module that is not a LightningModule it is a number of steps, "
        "or 1.0: once an epoch.",
        hint="Write val_check_interval=100, say.",
    )


def refuse_unfit(options: Mapping[str, Any]) -> None:
    """Refuse what would contradict a cluster, by name."""
    for name in options:
        if name in REFUSED:
            why, hint = REFUSED[name]
            raise BadValue(f"Trainer has no option {name}: {why}.", hint=hint)
