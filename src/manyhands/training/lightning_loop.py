"""Trains a LightningModule in the loop of the package that it comes from, with its steps on a cluster.

    mh.Trainer(...).fit(module, loader)     lightning.pytorch.Trainer(accelerator="cpu", devices=1, callbacks=..., ...)
                                              its callbacks, loggers, schedulers, validations, checkpoints: as they are
                                              training_step: a step on the cluster (cluster_steps.py)

Lightning is imported from here only, and only for a module that it has made.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manyhands.facts.errors import BadValue
from manyhands.facts.precision import FP16
from manyhands.training.cluster_steps import ClusterSteps
from manyhands.training.lightning_names import NamedPrecision
from manyhands.training.prepare_config import PrepareConfig

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
WITH_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks that Lightning calls while gradients are there, and before the update: here both are on the workers."""
REPLACED = ("backward", "optimizer_zero_grad", "configure_gradient_clipping")
"""What a module may do in Lightning's place, and workers do themselves."""
CHANGING = {
    "StochasticWeightAveraging": "it sets weights while they are trained",
    "ModelPruning": "it changes the network while it is trained",
    "BaseFinetuning": "it trains other parameters later than at first",
    "BatchSizeFinder": "it trains with batches of many sizes",
    "LearningRateFinder": "it trains and takes the steps back",
}
"""Callbacks of Lightning that change what is captured -> how."""
_READS_WEIGHTS = ("WeightAveraging", "LambdaCallback")
_EACH_BATCH = ("on_train_batch_start", "on_train_batch_end")


def package_of(module: Any) -> str | None:
    """Return the package whose LightningModule a module is; None: it is none."""
    for kind in type(module).__mro__:
        for package in PACKAGES:
            if kind.__name__ == "LightningModule" and kind.__module__.startswith(f"{package}."):
                return package
    return None


@dataclass(frozen=True)
class LoopOptions:
    """The options of a Trainer, by who carries them out."""

    loops: Mapping[str, Any]
    """Lightning's loop, by its names."""
    cluster: Mapping[str, Any]
    """manyhands, by its names."""
    precision: NamedPrecision
    callbacks: tuple[Any, ...] = ()
    accumulate_grad_batches: Any = 1
    given: Mapping[str, Any] = field(default_factory=dict)
    """Of these what both know: the loop shows it to callbacks."""


class LightningLoop:
    """The real Trainer of a module's package, and the steps that it does on a cluster."""

    def __init__(self, module: nn.Module, options: LoopOptions) -> None:
        package = package_of(module)
        assert package is not None
        self.module, self._options = module, options
        self._package: Any = importlib.import_module(package)
        _refuse_manual(module)
        _refuse_overrides(module, self._package.LightningModule, (*WITH_GRADIENTS, *REPLACED))
        for callback in options.callbacks:
            self._check_callback(callback)
        self.is_accumulated = options.accumulate_grad_batches != 1 or any(
            _is_a(callback, "GradientAccumulationScheduler") for callback in options.callbacks
        )
        if self.is_accumulated and options.precision.ours == FP16:
            raise BadValue(
                "accumulate_grad_batches with precision '16-mixed': the steps of one update would be skipped one by "
                "one, and not together as by Lightning's scaler.",
                hint='Use precision="bf16-mixed", or batches of more samples.',
            )
        self._config = PrepareConfig.from_keywords(
            "Trainer, for a LightningModule,", {**options.cluster, "precision": options.precision.ours}
        )
        self.steps = ClusterSteps(module, self._config, is_accumulated=self.is_accumulated)
        self.trainer = self._made()

    def fit(self, **given: Any) -> None:
        """Train, as the real Trainer's fit does."""
        with self.steps.in_place_of_training_step():
            self.trainer.fit(self.module, **given)

    def _made(self) -> Any:
        """Return the real Trainer, on this process' CPU."""
        options = self._options
        keywords = {**options.loops, **options.given}
        if options.precision.ours == FP16:
            keywords["plugins"] = [_half_precision(self._package)]
        else:
            keywords["precision"] = options.precision.lightnings
        return self._package.Trainer(
            accelerator="cpu", devices=1, callbacks=[self._current_weights(), *options.callbacks], **keywords
        )

    def _check_callback(self, callback: Any) -> None:
        """Refuse a callback that is not of the module's package, needs gradients or changes what is trained."""
        base = self._package.Callback
        if not isinstance(callback, base):
            kind = type(callback).__name__
            raise BadValue(
                f"{kind} of {type(callback).__module__.partition('.')[0]} is no callback of {self._package.__name__}, "
                f"which the module is of.",
                hint=f"Give callbacks of {self._package.__name__}.callbacks.",
            )
        for name, how in CHANGING.items():
            if _is_a(callback, name):
                raise BadValue(
                    f"The callback {type(callback).__name__} is not honoured: {how}, and workers train what they "
                    "were given.",
                    hint="Take it out of callbacks.",
                )
        _refuse_overrides(callback, base, WITH_GRADIENTS)

    def _current_weights(self) -> Any:
        """Return a callback, the first of all, after which the others and the module's hooks see current weights."""
        steps, base = self.steps, self._package.Callback

        def refresh(*_: Any) -> None:
            steps.refresh()

        def reads_each_batch(*_: Any) -> None:
            if self._reads_each_batch:
                steps.refresh()

        def end(*_: Any) -> None:
            steps.close()  # what others then do with the weights stays

        hooks = {
            **dict.fromkeys(_EACH_BATCH, reads_each_batch),
            **dict.fromkeys(("on_validation_start", "on_train_epoch_start", "on_train_epoch_end"), refresh),
            "on_train_end": end,
        }
        return type("CurrentWeights", (base,), hooks)()

    @property
    def _reads_each_batch(self) -> bool:
        """Whether somebody looks at the module after every batch, and may read its weights."""
        if any(_overrides(self.module, self._package.LightningModule, name) for name in _EACH_BATCH):
            return True
        base, prefix = self._package.Callback, f"{self._package.__name__}.callbacks."
        others = [
            callback
            for callback in self._options.callbacks
            if not type(callback).__module__.startswith(prefix) or any(_is_a(callback, name) for name in _READS_WEIGHTS)
        ]
        return any(_overrides(callback, base, name) for callback in others for name in _EACH_BATCH)


def _is_a(callback: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(callback).__mro__)


def _overrides(thing: Any, base: type, name: str) -> bool:
    """Return whether a class derived from `base` has a method of its own."""
    return getattr(type(thing), name, None) is not getattr(base, name, None)


def _refuse_overrides(thing: Any, base: type, names: tuple[str, ...]) -> None:
    for name in names:
        if _overrides(thing, base, name):
            code = getattr(inspect.unwrap(getattr(type(thing), name)), "__code__", None)
            where = f"\n  at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
            raise BadValue(
                f"{type(thing).__name__} overrides {name}, which is for gradients: they are summed, clipped and used "
                f"on the workers.{where}",
                hint=f"Take {name} out; gradient_clip_val= and accumulate_grad_batches= are honoured.",
            )


def _refuse_manual(module: Any) -> None:
    if not module.automatic_optimization:
        raise BadValue(
            f"{type(module).__name__} sets automatic_optimization = False: its training_step steps the optimiser "
            "itself, which no worker could do.",
            hint="Leave it out, and return the loss from training_step.",
        )


def _half_precision(package: Any) -> Any:
    """Return a plugin for Lightning's precision "16-mixed" without its scaler: that of the workers scales the loss."""
    base = importlib.import_module(f"{package.__name__}.plugins.precision").Precision

    @contextmanager
    def forward_context(_: Any) -> Iterator[None]:
        with torch.autocast("cpu", torch.float16):
            yield

    return type("Half", (base,), {"precision": "16-mixed", "forward_context": forward_context})()
