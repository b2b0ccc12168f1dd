"""A LightningModule's `training_step` as the forward of a module that can be captured: batch in, loss out.

    def training_step(self, batch, batch_idx):       captured once, with the first batch; the graph is divided into
        x, y = batch                                 the network and the loss of it as any module's own loss is
        z = self.backbone(x)
        loss = cross_entropy(self.head(z), y)
        self.log("train_loss", loss)                 noted: in every step the same is logged of that step's loss
        return loss

What is captured is what every step computes. A step that reads what changes from batch to batch apart from the batch
(the trainer's counts, `batch_idx`) would be frozen at its first value: it is refused where it reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from manyhands.facts.errors import BadValue
from manyhands.graph.own_loss import LABELS

SAME = ("detach", "clone", "cpu", "contiguous", "alias", "mean", "sum", "squeeze", "float", "double", "to")
"""Functions of a loss, one number, that return the same number: a log of it is a log of the loss."""
CONSTANT = ("training", "validating", "testing", "predicting", "sanity_checking", "max_epochs", "max_steps",
            "world_size", "num_devices", "num_nodes", "global_rank", "local_rank", "is_global_zero")  # fmt: skip
"""What a training_step may read of the trainer: it stays as it is for as long as the network is trained."""
_METRICS = "torchmetrics."
_OF_METRICS = ("forward", "update")
"""Methods by which a metric of torchmetrics is given something."""


class Logged(NamedTuple):
    """One call of `self.log` with the loss."""

    name: str
    options: dict[str, Any]


@dataclass
class StepNotes:
    """The findings of the capture of a training_step, beside its graph."""

    logged: list[Logged] = field(default_factory=list)
    """Logs of the loss, which are repeated with every step's."""
    left_out: list[str] = field(default_factory=list)
    """Names of what was logged and is not the loss: workers return nothing else."""
    returns_dict: bool = False
    """Whether the loss came as {"loss": ...}."""


class BatchForm(NamedTuple):
    """The way in which a batch is handed to the network: which part of it are inputs, and which targets."""

    kind: str
    """"pair": (inputs, target); "labels": a dict with labels; "whole": all of it are inputs."""
    label: str = ""
    """The key of the labels."""

    @classmethod
    def of(cls, batch: Any) -> BatchForm:
        """Return the form that a batch seems to have. Whether its second half goes into the loss only is found out by
        capturing it."""
        if isinstance(batch, Mapping):
            label = next((name for name in LABELS if name in batch), None)
            return cls("labels", label) if label is not None and len(batch) > 1 else cls("whole")
        return cls("pair") if isinstance(batch, (tuple, list)) and len(batch) == 2 else cls("whole")

    def divided(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the targets of a batch."""
        if self.kind == "pair":
            return batch[0], batch[1]
        if self.kind == "labels":
            return {name: part for name, part in batch.items() if name != self.label}, batch[self.label]
        return dict(batch) if isinstance(batch, Mapping) else batch, ()

    def joined(self, inputs: Any, target: Any, like: type) -> Any:
        """Return the batch again; `like`: its type."""
        if self.kind == "pair":
            return (inputs, target) if like is not list else [inputs, target]
        return {**inputs, self.label: target} if self.kind == "labels" else inputs


class StepForm(nn.Module):
    """A module that computes the loss of another one's training_step, and has the other's parameters by their names."""

    def __init__(self, module: nn.Module, form: BatchForm, batch: Any) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.training = module.training
        inputs, _ = form.divided(batch)
        self._step: _Step = _Step(module, form, type(batch), isinstance(inputs, (tuple, list)))

    @classmethod
    def named(cls, module: nn.Module, form: BatchForm, batch: Any) -> StepForm:
        """Return the form of a module, under the module's own name."""
        kind: type[StepForm] = type(type(module).__name__, (cls,), {})
        return kind(module, form, batch)

    @property
    def notes(self) -> StepNotes:
        """The findings of the last call."""
        return self._step.notes

    @property
    def refusal(self) -> BadValue | None:
        """The reason why the last call was refused; None: it was not."""
        return self._step.refusal

    def forward(self, *inputs: Any, labels: Any = ()) -> torch.Tensor:
        return self._step(inputs, labels)


class _Step:
    """The call of training_step, with stand-ins for what it may not read and notes of what it logs."""

    def __init__(self, module: nn.Module, form: BatchForm, like: type, is_spread: bool) -> None:
        self._module, self._form, self._like, self._is_spread = module, form, like, is_spread
        self.notes = StepNotes()
        self.refusal: BadValue | None = None

    def __call__(self, given: tuple[Any, ...], labels: Any) -> torch.Tensor:
        self.refusal = None
        try:
            return self._called(given, labels)
        except BadValue as error:
            self.refusal = error  # torch.export wraps it in one of its own
            raise

    def _called(self, given: tuple[Any, ...], labels: Any) -> torch.Tensor:
        module, logs = self._module, _Logs()
        inputs: Any = given if self._is_spread else given[0]
        batch = self._form.joined(inputs, labels, self._like)
        with _stand_ins(module, logs), logs:
            returned = type(module).training_step(module, batch, _BatchNumber())  # type: ignore[attr-defined]
            loss = returned.get("loss") if isinstance(returned, dict) else returned
        if not isinstance(loss, torch.Tensor):
            raise BadValue(
                f"training_step of {type(module).__name__} returned a {type(loss).__name__}; it must be the loss, a "
                "tensor.",
                hint='Return the loss, or {"loss": loss}.',
            )
        self.notes = logs.notes(loss, isinstance(returned, dict))
        return loss


class _Logs(TorchFunctionMode):
    """Notes what is logged, and follows numbers that are the same as another."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, Any, dict[str, Any]]] = []
        self._same: dict[int, tuple[Any, Any]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = function(*args, **(kwargs or {}))
        given = args[0] if args else None
        are_numbers = all(isinstance(each, torch.Tensor) and not each.dim() for each in (value, given))
        if are_numbers and getattr(function, "__name__", "") in SAME:
            self._same[id(value)] = (value, given)
        return value

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Take the place of LightningModule.log."""
        named = dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args))
        self._calls.append((name, value, {**named, **options}))

    def log_dict(self, values: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Take the place of LightningModule.log_dict."""
        for name, value in values.items():
            self.log(name, value, *args, **options)

    def notes(self, loss: torch.Tensor, returns_dict: bool) -> StepNotes:
        """Return what was noted, by the loss that the step returned."""
        end = self._end(loss)
        return StepNotes(
            [Logged(name, options) for name, value, options in self._calls if self._end(value) is end],
            [name for name, value, _ in self._calls if self._end(value) is not end],
            returns_dict,
        )

    def _end(self, value: Any) -> Any:
        while id(value) in self._same:
            value = self._same[id(value)][1]
        return value


@contextlib.contextmanager
def _stand_ins(module: nn.Module, logs: _Logs) -> Iterator[None]:
    """Replace what training_step may call or read beside its batch, within this context."""
    ignored: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    others: dict[str, Any] = {
        "log": logs.log, "log_dict": logs.log_dict, "print": ignored, "_trainer": _Trainer(module),
        "_current_fx_name": "training_step",
    }  # fmt: skip
    before = {name: module.__dict__[name] for name in others if name in module.__dict__}
    metrics = [(name, part) for name, part in module.named_modules() if _is_metric(part)]
    methods = [(part, {m: part.__dict__[m] for m in _OF_METRICS if m in part.__dict__}) for _, part in metrics]
    module.__dict__.update(others)
    for name, part in metrics:
        part.__dict__.update(dict.fromkeys(_OF_METRICS, _refused_metric(name)))
    try:
        yield
    finally:
        for name in others:
            del module.__dict__[name]
        module.__dict__.update(before)
        for part, kept in methods:
            for method in _OF_METRICS:
                del part.__dict__[method]
            part.__dict__.update(kept)


def _is_metric(part: nn.Module) -> bool:
    return any(kind.__module__.startswith(_METRICS) and kind.__name__ == "Metric" for kind in type(part).__mro__)


def _refused_metric(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BadValue(
            f"training_step updates the metric '{name}' with what the network returns, which stays on the workers.",
            hint=f"Take self.{name} out of training_step, and update it in validation_step.",
        )

    return refuse


class _Trainer:
    """Stands for the trainer while a step is captured: what changes from step to step is refused."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["_real"] = module.__dict__.get("_trainer")

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["_real"]
        if name in CONSTANT:
            return getattr(real, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise BadValue(
            f"training_step reads trainer.{name}: every step computes what was captured in the first, so it would "
            "keep its first value.",
            hint=f"Use {name} in a hook, such as on_train_batch_end; a number that follows it can be part of the "
            "batch.",
        )


class _BatchNumber:
    """Stands for batch_idx while a step is captured: whoever computes with it is told that it may not."""

    def _refuse(self, *_: Any) -> Any:
        raise BadValue(
            "training_step uses batch_idx: every step computes what was captured in the first, so it would stay 0.",
            hint="Use batch_idx in a hook, such as on_train_batch_end(outputs, batch, batch_idx).",
        )

    __int__ = __index__ = __float__ = __bool__ = __hash__ = __str__ = __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _refuse
    __truediv__ = __pow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __eq__ = __ne__ = _refuse
