"""`mh.Trainer(devices=4, max_epochs=2).fit(module, loader)`: trains Lightning-style modules on a cluster.

A LightningModule is trained in Lightning's own loop (lightning_loop.py). Of any other module three methods are used:
`forward`, `training_step(batch, batch_idx)`, which calls it once and returns the loss, and `configure_optimizers()`;
Lightning itself is then not needed, and not imported.

    training_step((x, y), i):             the network is forward(x): captured, planned and shared as any other
        out = self(x)                     out is the network's output
        return cross_entropy(out, y)      the rest is the loss of (out, y)
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.facts.keywords import check_keywords
from manyhands.job.config import keywords_of
from manyhands.job.result import TrainResult
from manyhands.training.config import TrainConfig
from manyhands.training.lightning_loop import LightningLoop, LoopOptions, package_of
from manyhands.training.lightning_names import (
    OF_THE_LOOP,
    clipping_options,
    read_precision,
    refuse_unfit,
    validation_options,
)
from manyhands.training.train import train

QUIET = ("log", "log_dict", "print")
"""Methods that a LightningModule calls while it computes, silenced here; the run's folder has the loss."""
NOT_CALLED = (
    "backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping",
    "configure_callbacks", "configure_model", "transfer_batch_to_device", "teardown",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "on_before_batch_transfer", "on_after_batch_transfer", "on_fit_start", "on_fit_end", "on_train_start",
    "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end",
    "on_load_checkpoint", "on_save_checkpoint",
)  # fmt: skip
"""Lightning's hooks that may change what is trained and are never called here: a module that has one is refused."""
NOT_USED = ("validation_step", "on_validation_start", "on_validation_end", "on_validation_epoch_start",
            "on_validation_epoch_end")  # fmt: skip
"""Hooks that only measure and are not called: held-out data is evaluated with training_step's loss, and with accuracy
if there are classes."""


MAPPED = ("val_check_interval", "gradient_clip_algorithm")
"""Lightning's options that have another name or form in `mh.train`, beside the Trainer's own parameters."""


class Trainer:
    """Trains modules on several devices, with the names of Lightning's Trainer.

    A LightningModule is trained in the real package's own loop, with its callbacks, loggers and checkpoints; the steps
    are done on the cluster. Any other module with the same methods is trained by `mh.train`. Options that Lightning
    has no name for are those of `mh.train`.

    devices                  how many local workers; or a cluster as `mh.train` takes it, with cluster=
    max_epochs               passes over the data (None: 1); max_steps: steps instead
    precision                by Lightning's name ("bf16-mixed", "16-mixed", "32-true", "64-true") or by `mh.train`'s
    gradient_clip_val        the most that the norm of all gradients may be; with gradient_clip_algorithm="value" each
                             of their numbers
    accumulate_grad_batches  batches whose gradients are averaged for one update (a LightningModule's)
    callbacks, logger        the real package's, for a LightningModule; else those of `mh.train`
    val_check_interval       as in Lightning; of other modules a number of steps, or 1.0
    """

    def __init__(
        self,
        *,
        devices: int | None = None,
        max_epochs: int | None = None,
        max_steps: int = -1,
        precision: Any = None,
        gradient_clip_val: float | None = None,
        accumulate_grad_batches: int = 1,
        callbacks: Any = None,
        logger: Any = None,
        **options: Any,
    ) -> None:
        if devices is not None and "cluster" in options:
            raise BadValue(f"devices is {devices}, and a cluster is given.", hint="Leave one of them out.")
        refuse_unfit(options)
        ours = set(keywords_of(TrainConfig)) - {"epochs", "steps"}
        check_keywords("Trainer", options, {*ours, *OF_THE_LOOP, *MAPPED})
        interval, algorithm = (options.pop(name, None) for name in MAPPED)
        self._loops = {name: options.pop(name) for name in OF_THE_LOOP if name in options}
        self._options = options
        if devices is not None:
            self._options = {**options, "cluster": Cluster.local(devices)}
        if max_epochs is None:
            max_epochs = 1 if max_steps == -1 else None
        self._epochs, self._steps = max_epochs, max_steps if max_steps != -1 else None
        self._precision = read_precision(precision)
        self._clipping = clipping_options(gradient_clip_val, algorithm)
        self._shared: dict[str, Any] = {
            "accumulate_grad_batches": accumulate_grad_batches, "logger": logger,
            "gradient_clip_val": gradient_clip_val, "gradient_clip_algorithm": algorithm,
            "val_check_interval": interval,
        }  # fmt: skip
        self._callbacks: tuple[Any, ...] = tuple(callbacks) if isinstance(callbacks, (list, tuple)) else ()
        if callbacks is not None and not self._callbacks:
            self._callbacks = (callbacks,) if not isinstance(callbacks, (list, tuple)) else ()
        self.lightning: Any = None
        """The real package's Trainer of the last LightningModule that was trained, for its metrics and `test`."""

    def fit(
        self, module: nn.Module, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: Any = None,
    ) -> TrainResult | None:  # fmt: skip
        """Train; the module then holds the trained weights. Data may also be data sets if batch_size is given; if left
        out, the module's own `train_dataloader()` is called.

        Return the result of `mh.train`; None for a LightningModule, of which `trainer.lightning` has the metrics.
        """
        if package_of(module) is not None:
            loop = LightningLoop(module, self._loop_options())
            self.lightning = loop.trainer
            given = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders}
            loop.fit(**given, datamodule=datamodule, ckpt_path=ckpt_path)
            return None
        for name, value in (("datamodule", datamodule), ("ckpt_path", ckpt_path)):
            if value is not None:
                raise BadValue(
                    f"{name} is for a LightningModule; {type(module).__name__} is none.",
                    hint="Give data loaders; folder= and resume=True go on with a run.",
                )
        return self._fit_plain(module, train_dataloaders, val_dataloaders)

    def _loop_options(self) -> LoopOptions:
        loops = {**self._loops, "max_epochs": self._epochs, "max_steps": self._steps or -1}
        return LoopOptions(
            loops, {**self._options, **self._clipping}, self._precision, self._callbacks,
            self._shared["accumulate_grad_batches"], self._shared,
        )  # fmt: skip

    def _plain_options(self, module: nn.Module) -> dict[str, Any]:
        """Return the options of `mh.train`, for a module that Lightning's loop does not train."""
        kind = type(module).__name__
        if self._loops:
            name = next(iter(self._loops))
            raise BadValue(
                f"{name} is an option of Lightning's loop, which trains LightningModules; {kind} is none.",
                hint="Derive it from lightning.LightningModule, or leave the option out.",
            )
        count = self._shared["accumulate_grad_batches"]
        if count != 1:
            raise BadValue(
                f"accumulate_grad_batches is {count!r:.40}, which is for a LightningModule; {kind} is none.",
                hint="Give batches of as many samples in all; micro_batches= divides them.",
            )
        if self._shared["logger"] not in (None, True, False):
            raise BadValue(
                f"logger is a {type(self._shared['logger']).__name__}, which needs a LightningModule; {kind} is none.",
                hint='Give a callback: callbacks=[mh.CSV("steps.csv")], mh.TensorBoard() or mh.WandB().',
            )
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if self._precision.is_double and dtypes != {torch.float64}:
            raise BadValue("precision is '64-true'; the module's weights are not.", hint="Call module.double() first.")
        named = {**self._options, **self._clipping, **validation_options(self._shared["val_check_interval"])}
        return {**named, "precision": self._precision.ours, "callbacks": self._callbacks}

    def _fit_plain(self, module: nn.Module, train_dataloaders: Any, val_dataloaders: Any) -> TrainResult:
        for name in ("training_step", "configure_optimizers"):
            if not callable(getattr(module, name, None)):
                raise BadValue(
                    f"{type(module).__name__} has no {name}.",
                    hint="Write one as for Lightning, or call mh.train(model, data, loss=..., optimizer=...).",
                )
        _refuse_hooks(module)
        options = self._plain_options(module)
        if _overrides(module, "prepare_data"):
            module.prepare_data()  # type: ignore[operator]
        if _overrides(module, "setup"):
            module.setup("fit")  # type: ignore[operator]
        data = train_dataloaders if train_dataloaders is not None else _called(module, "train_dataloader")
        if data is None:
            raise BadValue("There is no data.", hint="Write trainer.fit(module, DataLoader(data, batch_size=64)).")
        held_out = val_dataloaders if val_dataloaders is not None else _called(module, "val_dataloader")
        unused = [name for name in NOT_USED if _overrides(module, name)]
        if held_out is not None and unused:
            warnings.warn(
                f"{' and '.join(unused)} of {type(module).__name__} will not be called: held-out data is evaluated "
                "after training, with training_step's loss.",
                stacklevel=3,
            )
        if held_out is not None:
            options["test"] = held_out
        optimizers, schedulers = configured_by(module)
        return train(
            module, data, loss=StepLoss(module), optimizer=optimizers, scheduler=schedulers or None,
            epochs=self._epochs or 1, steps=self._steps, **options,
        )  # fmt: skip


def _called(module: nn.Module, name: str) -> Any:
    method = getattr(module, name, None)
    return method() if callable(method) and name in dir(type(module)) and _is_own(module, name) else None


def _is_own(module: nn.Module, name: str) -> bool:
    """Return whether a method is not Lightning's own, which only reports that there is none."""
    return not getattr(type(module), name).__module__.startswith(("lightning", "pytorch_lightning"))


def _overrides(module: nn.Module, name: str) -> bool:
    """Return whether a module has a method that is neither Lightning's nor torch's own."""
    method = getattr(type(module), name, None)
    return callable(method) and _is_own(module, name) and not method.__module__.startswith("torch.")


def _refuse_hooks(module: nn.Module) -> None:
    """Refuse by name every hook that Lightning would call and this trainer does not, with the line that defines it."""
    if getattr(module, "automatic_optimization", True) is False:
        raise BadValue(
            f"{type(module).__name__} sets automatic_optimization = False: its training_step steps the optimiser "
            "itself, which no worker could do.",
            hint="Leave it out, and return the loss from training_step.",
        )
    for name in NOT_CALLED:
        if _overrides(module, name):
            code = inspect.unwrap(getattr(type(module), name)).__code__
            raise BadValue(
                f"{type(module).__name__} overrides {name}, which would not be called.\n"
                f"  at {code.co_filename}:{code.co_firstlineno}",
                hint=f"Take {name} out; mh.train(..., on_step=...) is called after every step.",
            )


class _Input:
    """A stand-in for the input while the loss is computed: only forward may use the input."""

    def __getattr__(self, name: str) -> Any:
        raise BadValue(
            "training_step uses its input beside forward.",
            hint="It may hand the input to self(...) only: the loss is one of the output and the target.",
        )


class StepLoss:
    """The loss of training_step, as a function of the network's output and the target."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        calls: list[int] = []

        def given(*inputs: Any, **named: Any) -> Any:
            calls.append(1)
            return output

        with _in_place_of(self._module, forward=given, **dict.fromkeys(QUIET, lambda *values, **named: None)):
            loss = self._module.training_step((_Input(), target), 0)  # type: ignore[operator]
        if isinstance(loss, dict):
            loss = loss.get("loss")
        if len(calls) != 1:
            raise BadValue(
                f"training_step calls forward {len(calls)} times; it must once.",
                hint="Write output = self(x), then return a loss of output and y.",
            )
        if not isinstance(loss, torch.Tensor):
            raise BadValue(f"training_step returned a {type(loss).__name__}; it must be the loss, a tensor.")
        return loss


@contextlib.contextmanager
def _in_place_of(module: nn.Module, **others: Any) -> Iterator[None]:
    """Replace methods of the module within this context."""
    originals = {name: module.__dict__[name] for name in others if name in module.__dict__}
    for name, other in others.items():
        object.__setattr__(module, name, other)
    try:
        yield
    finally:
        for name in others:
            object.__delattr__(module, name)
        for name, other in originals.items():
            object.__setattr__(module, name, other)


# Optimisers


def configured_by(module: nn.Module) -> tuple[Any, list[Any]]:
    """Return the optimizers and schedulers of configure_optimizers(), in any of the ways that Lightning accepts."""
    configured = module.configure_optimizers()  # type: ignore[operator]
    schedulers: list[Any] = []
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        configured, schedulers = configured[0], list(configured[1])
    each = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    optimizers = [settings.get("optimizer") if isinstance(settings, dict) else settings for settings in each]
    schedulers += [
        settings["lr_scheduler"] for settings in each if isinstance(settings, dict) and settings.get("lr_scheduler")
    ]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise BadValue(f"configure_optimizers gives a {kind}; it must be a torch.optim optimiser.")
    return optimizers, [_by_epoch(scheduler) for scheduler in schedulers]


def _by_epoch(scheduler: Any) -> Any:
    """Return a scheduler with Lightning's default: it is stepped once in an epoch."""
    settings = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
    return {"interval": "epoch", **settings}
