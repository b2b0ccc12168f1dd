"""Optimizers and schedulers as a caller has them -> data, and PyTorch's schedulers to step in the coordinator.

    mh.Optimizer("AdamW", lr=1e-3)              data already
    torch.optim.AdamW(model.parameters())       its class, the options of its groups, the names of their weights
    [Muon(matrices), AdamW(others)]             the same of each, over different parameters
    lambda named: AdamW(parameter for _, parameter in named)     a function that makes one of these

What is a function stays in this process: schedulers and the functions within them are called here.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manyhands.executor.by_name import error_text
from manyhands.executor.group_stepper import IN_GROUP, KEPT
from manyhands.executor.optimizers import SEPARATOR, build
from manyhands.executor.scheduling import Scheduled, Scheduling, is_scheduler
from manyhands.executor.torch_optimizers import resolve_optimizer, stand_ins
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError
from manyhands.facts.optimizer import Optimizer

OptimizerLike = (
    Optimizer
    | torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[list[tuple[str, nn.Parameter]]], "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]"]
)
NOT_OURS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Options of torch's optimisers that affect how the result is computed, not what it is; workers choose them."""
_HINT = 'Give mh.Optimizer("SGD", lr=0.1), an optimizer of torch.optim, a list of them, or a function that makes them.'
_SCHEDULER_HINT = (
    'Give a scheduler of torch.optim, a function of the optimizer, or {"scheduler": ..., "interval": "epoch"}.'
)
_SETTINGS = {"scheduler", "interval", "frequency", "monitor", "name", "strict", "reduce_on_plateau"}
"""The keys of Lightning's dictionary."""


@dataclass
class GivenOptimizer:
    """An optimizer as data, with the objects it was read from."""

    optimizer: Optimizer
    scheduling: Scheduling | None = None
    objects: tuple[torch.optim.Optimizer, ...] = ()
    """PyTorch's, if it was given as such."""
    left_out: tuple[nn.Parameter, ...] = ()
    """Parameters that are in none of them, and stay as they are."""
    names: dict[int, list[str]] = field(default_factory=dict)
    """id of a parameter -> its names in the module."""

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the parameters that the optimizer leaves out, within this context."""
        for parameter in self.left_out:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self.left_out:
                parameter.requires_grad_(True)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what the objects have kept for weights in earlier steps, as checkpoints hold it; empty: nothing."""
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        if not any(torch_optimizer.state for torch_optimizer in self.objects):
            return tensors, scalars
        weights: dict[str, torch.Tensor] = {}
        for torch_optimizer in self.objects:
            for group in torch_optimizer.param_groups:
                for parameter in filter(lambda parameter: parameter.requires_grad, group["params"]):
                    name = self.names[id(parameter)][0]
                    weights[name] = torch.empty_like(parameter, device="cpu").requires_grad_()
                    for key, value in torch_optimizer.state.get(parameter, {}).items():
                        into = tensors if isinstance(value, torch.Tensor) else scalars
                        into[f"{name}{SEPARATOR}{key}"] = (
                            value.detach().cpu() if isinstance(value, torch.Tensor) else value
                        )
        stepper = build(self.optimizer, weights)
        in_group = self._in_groups()
        for entry in dict.fromkeys([*stepper.state()[0], *stepper.state()[1]]):
            if entry not in tensors:
                scalars.setdefault(entry, in_group.get(entry))
        try:
            stepper.load(tensors, scalars, 1)
        except BadFile as error:
            raise BadValue(
                f"The optimizer has made steps, and its state cannot be taken along: {error.message}",
                hint="Make the optimizer anew.",
            ) from error
        return tensors, scalars

    def _in_groups(self) -> dict[str, Any]:
        """Return the numbers in the objects' groups as entries of each of their weights."""
        return {
            f"{self.names[id(parameter)][0]}{SEPARATOR}{IN_GROUP}{key}": value
            for torch_optimizer in self.objects
            for group in torch_optimizer.param_groups
            for parameter in group["params"]
            for key, value in group.items()
            if isinstance(value, (int, float))
        }

    def take_back(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        """Give the objects the state after the last step, so that a loop of one's own can go on with them."""
        entries: dict[str, dict[str, Any]] = {}
        for entry, value in {**scalars, **tensors}.items():
            name, _, key = entry.rpartition(SEPARATOR)
            if value is not None:
                entries.setdefault(name, {})[key] = value
        for torch_optimizer in self.objects:
            for group in torch_optimizer.param_groups:
                for parameter in group["params"]:
                    kept = next((entries[name] for name in self.names[id(parameter)] if name in entries), None)
                    if kept is not None:
                        torch_optimizer.state[parameter] = {
                            key: _beside(parameter, value)
                            for key, value in kept.items()
                            if not key.startswith(IN_GROUP) and key != KEPT
                        }
                        group.update({k.removeprefix(IN_GROUP): v for k, v in kept.items() if k.startswith(IN_GROUP)})


def _beside(parameter: torch.Tensor, value: Any) -> Any:
    """Return a copy of a state's entry where the parameter is; counts of steps stay in main memory, as in PyTorch."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(parameter.device if value.dim() else "cpu", copy=True)


def names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter by its id; one that is tied has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def read_optimizer(model: nn.Module, given: Any, scheduler: Any = None) -> GivenOptimizer:
    """Return as data what a caller gave as `optimizer` and `scheduler`."""
    if not isinstance(model, nn.Module):
        raise BadValue(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if not isinstance(given, (Optimizer, torch.optim.Optimizer, list, tuple)) and callable(given):
        named = list(model.named_parameters())
        given = _called("optimizer", given, named)
    if isinstance(given, Optimizer):
        made = GivenOptimizer(given)
        if scheduler is not None and given.schedule:
            raise BadValue("The optimizer has a schedule, and a scheduler is given.", hint="Leave one of them out.")
        if scheduler is not None:
            objects, groups = stand_ins(given)
            made.scheduling = _scheduling(groups, objects, objects[0] if len(objects) == 1 else objects, scheduler)
            layout = made.scheduling.layout
            made.optimizer = given.with_options(layout.options(layout.read(groups)))
        return made
    objects = list(given) if isinstance(given, (list, tuple)) else [given]
    for torch_optimizer in objects:
        if not isinstance(torch_optimizer, torch.optim.Optimizer):
            raise BadValue(f"optimizer is a {type(torch_optimizer).__name__}.", hint=_HINT)
    if not objects:
        raise BadValue("optimizer is an empty list.", hint=_HINT)
    groups = [group for torch_optimizer in objects for group in torch_optimizer.param_groups]
    scheduling = _scheduling(groups, objects, given, scheduler) if scheduler is not None else None
    made = _of_objects(model, objects)  # after the schedulers, which change groups when they are made
    made.scheduling = scheduling
    return made


def _of_objects(model: nn.Module, objects: Sequence[torch.optim.Optimizer]) -> GivenOptimizer:
    """Read PyTorch's optimizers: each group with its class, its options, and the names of its weights."""
    names, seen = names_of_parameters(model), set[int]()
    groups: list[dict[str, Any]] = []
    for torch_optimizer in objects:
        kind = type(torch_optimizer)
        for group in torch_optimizer.param_groups:
            weights: list[str] = []
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise BadValue(
                        f"{kind.__name__} has a parameter of shape {tuple(parameter.shape)} that is none of the "
                        "model's.",
                        hint="Give it parameters of the very model that is trained: model.parameters().",
                    )
                if id(parameter) in seen:
                    raise BadValue(f"Two optimizers have the parameter '{names[id(parameter)][0]}'; one can train it.")
                seen.add(id(parameter))
                weights += names[id(parameter)]
            groups.append({"weights": weights, "optimizer": _name_of(kind), **_options_of(kind, group)})
    left_out = tuple(
        parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in seen
    )
    first = {option: value for option, value in groups[0].items() if option not in ("weights", "optimizer")}
    optimizer = Optimizer(groups[0]["optimizer"], groups=groups[1:], **first)
    return GivenOptimizer(optimizer, None, tuple(objects), left_out, names)


def _name_of(kind: type[torch.optim.Optimizer]) -> str:
    """Return the name by which workers look up a class; one of another package must be allowed."""
    short: str = kind.__name__
    if getattr(torch.optim, short, None) is kind:
        resolve_optimizer(short)
        return short
    name = f"{kind.__module__}.{kind.__qualname__}"
    if resolve_optimizer(name) is not kind:
        raise BadValue(f"The optimizer {name:.120} is not what workers would import under this name.")
    return name


def _options_of(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for name in inspect.signature(kind).parameters:
        if name in NOT_OURS or name not in group:
            continue
        value = group[name].item() if isinstance(group[name], torch.Tensor) else group[name]
        options[name] = list(value) if isinstance(value, tuple) else value
    return options


# Schedulers


def _scheduling(
    groups: Sequence[Mapping[str, Any]], objects: Sequence[torch.optim.Optimizer], given: Any, scheduler: Any
) -> Scheduling:
    """Return the schedulers of PyTorch's optimizers; `given`: the optimizer as a caller's function takes it."""
    if not is_scheduler(scheduler) and callable(scheduler):
        scheduler = _called("scheduler", scheduler, given)
    each_given = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    scheduled = [_scheduled(each, given) for each in each_given]
    for each in scheduled:
        for other in _optimizers_of(each.scheduler):
            if all(other is not torch_optimizer for torch_optimizer in objects):
                raise BadValue(
                    f"The {each.name} is of another optimizer than the one that trains.",
                    hint="Give a function of the optimizer: scheduler=lambda optimizer: "
                    f"torch.optim.lr_scheduler.{each.name}(optimizer, ...).",
                )
    for torch_optimizer in objects:
        torch_optimizer.__dict__["_opt_called"] = True  # else schedules warn that no step came before theirs
    return Scheduling(groups, scheduled)


def _scheduled(settings: Any, given: Any) -> Scheduled:
    if not isinstance(settings, Mapping):
        settings = {"scheduler": settings}
    strange = sorted(set(settings) - _SETTINGS)
    if strange or "scheduler" not in settings:
        what = f"has '{strange[0]}'" if strange else "has no 'scheduler'"
        raise BadValue(f"The scheduler {what}.", hint=_SCHEDULER_HINT)
    scheduler = settings["scheduler"]
    if not is_scheduler(scheduler) and callable(scheduler):
        scheduler = _called("scheduler", scheduler, given)
    if not is_scheduler(scheduler):
        raise BadValue(f"scheduler is a {type(scheduler).__name__}.", hint=_SCHEDULER_HINT)
    interval, frequency = settings.get("interval", "step"), settings.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise BadValue(f"interval is {interval!r:.40}; it must be 'step' or 'epoch'.")
    if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
        raise BadValue(f"frequency is {frequency!r:.40}; it must be a whole number of at least 1.")
    return Scheduled(scheduler, interval, frequency, str(settings.get("monitor") or "loss"))


def _optimizers_of(scheduler: Any) -> list[Any]:
    optimizer = getattr(scheduler, "optimizer", None)
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else []


def _called(what: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Return what a caller's function returns; an error names the line in which it was raised."""
    try:
        return function(argument)
    except ManyhandsError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        name = getattr(function, "__qualname__", type(function).__name__)
        raise BadValue(
            f"{what}={name} raised {type(error).__name__}: {error_text(error)}\n  at {frame.filename}:{frame.lineno}"
        ) from error
