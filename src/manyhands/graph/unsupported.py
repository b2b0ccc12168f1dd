"""Refuses by name, before anything starts, whatever changes training on one device but is in no captured graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph.sizes import at


def refuse_unsupported(module: nn.Module) -> None:
    """Refuse to train a module whose gradients would not be those of plain autograd: backward hooks, torch.autocast
    around the call, nothing to train."""
    if torch.is_autocast_enabled("cpu") or (torch.cuda.is_available() and torch.is_autocast_enabled("cuda")):
        raise BadValue(
            "Training was called under torch.autocast, which does not reach the workers.",
            hint="Call it outside of `with torch.autocast(...)`, with precision='bf16' (or 'fp16').",
        )
    for owner, kind, hook in _backward_hooks(module):
        raise CaptureFailed(
            f"{owner} has a {kind} ({_name(hook)}), which no worker could run.{at(_place(hook))}",
            hint="Remove it (handle.remove()). A torch.autograd.Function in forward can change gradients instead, and "
            "a penalty on parameters can be part of the loss.",
        )
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        frozen = (
            f"none of its {len(parameters)} parameters requires a gradient" if parameters else "it has no parameters"
        )
        raise BadValue(
            f"There is nothing to train in {type(module).__name__}: {frozen}.",
            hint="Call model.requires_grad_(True), or mh.evaluate(model, data) if only its outputs are wanted.",
        )


def _backward_hooks(module: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield the owner of hooks, their name in torch, and the hooks themselves."""
    for kind in ("_global_backward_hooks", "_global_backward_pre_hooks"):
        for hook in getattr(torch_module, kind, {}).values():
            yield "Every module", "global backward hook", hook
    for path, child in module.named_modules():
        owner = f"The module '{path}'" if path else f"The module {type(child).__name__}"
        for kind, name in (("_backward_hooks", "backward hook"), ("_backward_pre_hooks", "backward pre-hook")):
            for hook in getattr(child, kind, {}).values():
                yield owner, name, hook
    for path, parameter in module.named_parameters():
        for kind, name in (
            ("_backward_hooks", "gradient hook"), ("_post_accumulate_grad_hooks", "post-accumulate hook")
        ):  # fmt: skip
            for hook in (getattr(parameter, kind, None) or {}).values():
                yield f"The parameter '{path}'", name, hook


def refuse_tensor_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
    """Stand in for `Tensor.register_hook` while a module is captured."""
    raise CaptureFailed(
        f"forward registers a gradient hook ({_name(hook)}) on a tensor, which no worker could run.{at(_place(hook))}",
        hint="Write a torch.autograd.Function with the same backward, and apply it to the tensor.",
    )


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]


def _place(hook: Callable[..., Any]) -> str:
    """Return the file and line where a hook begins."""
    try:
        plain = inspect.unwrap(getattr(hook, "__func__", hook))
        return f"{inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]}"
    except (OSError, TypeError):  # written in a terminal, or in C
        return ""
