"""Groups of an optimiser fact -> PyTorch's optimisers over weights, one for each group."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from manyhands.executor.by_name import check_options, classes, resolve, wrapped
from manyhands.facts.allowed_optimizers import check_allowed
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.optimizer_groups import OptimizerGroup
from manyhands.facts.optimizer_options import Option

REFUSED_OPTIMIZERS = {
    "LBFGS": "it evaluates the loss again and again within a step, and looks at all weights at once: an optimizer that "
    "cannot be split",
    "SparseAdam": "it needs sparse gradients, and those of workers are dense",
}
SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""The options that may change from step to step."""
_ABOUT_FUSING = {"fused", "foreach", "differentiable", "capturable"}


def _looked_up(*names: str) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in names]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


FUSED_STEPS = _looked_up("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
"""Operators of fused steps, looked up here and kept. Under a mode (`PeakBytes`) PyTorch looks up an operator at its
first use, and where two threads do that at once it goes on with the one that it has freed (2.13). This module is read
by one thread."""


def optimizer_names() -> list[str]:
    """Return the names of this PyTorch's optimisers that workers can run."""
    return sorted(set(classes(torch.optim, torch.optim.Optimizer)) - set(REFUSED_OPTIMIZERS))


def resolve_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of an optimiser's name."""
    kind: type[torch.optim.Optimizer] = (
        _imported(name)
        if "." in name
        else resolve("optimizer", name, classes(torch.optim, torch.optim.Optimizer), REFUSED_OPTIMIZERS)
    )
    return kind


def _imported(name: str) -> Any:
    """Return a class of another package. The name is compared with those that are allowed before anything is
    imported."""
    check_allowed(name)
    module, _, class_name = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError) as error:
        raise BadValue(
            f"The optimizer {name:.120} cannot be imported: {error}.", hint=f"Install {module.partition('.')[0]} here."
        ) from error
    if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer):
        raise BadValue(f"{name:.120} is no optimizer of PyTorch: it does not derive from torch.optim.Optimizer.")
    return kind


def construct(group: OptimizerGroup, weights: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer of a group over some weights, one at least."""
    kind, given = resolve_optimizer(group.name), dict(group.options)
    check_options(kind, given)
    options = given | ({"fused": True} if _may_fuse(kind, given, weights) else {})
    made: torch.optim.Optimizer = wrapped(kind.__name__, given, lambda: kind(list(weights), **options))  # type: ignore[arg-type]
    return made


def stand_ins(optimizer: Optimizer) -> tuple[list[torch.optim.Optimizer], list[dict[str, Any]]]:
    """Return what schedulers need of an optimizer, over tensors of one number: PyTorch's optimizer of each class, with
    all of its groups; and the groups in the order of `all_groups`."""
    made: dict[str, torch.optim.Optimizer] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.all_groups:
        alone = construct(group, [torch.zeros(1, 1, requires_grad=True)])
        name = type(alone).__name__
        if name in made:
            made[name].add_param_group(dict(alone.param_groups[0]))
        else:
            made[name] = alone
        groups.append(made[name].param_groups[-1])
    for torch_optimizer in made.values():
        torch_optimizer.__dict__["_opt_called"] = True  # else schedules warn that no step came before theirs
    return list(made.values()), groups


def _may_fuse(kind: Any, options: Mapping[str, Option], weights: Sequence[torch.Tensor]) -> bool:
    """Return whether a step may pass over weights, gradients and state once, in place of once for every operation: on a
    CPU that takes a third of the time. Options about fusing that are given have the last word."""
    if "fused" not in inspect.signature(kind).parameters or not _ABOUT_FUSING.isdisjoint(options):
        return False
    is_known = kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    return all(
        (weight.is_cpu or (weight.is_cuda and is_known)) and weight.dtype in (torch.float32, torch.float64)
        for weight in weights
    )
