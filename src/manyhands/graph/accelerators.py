"""GPUs of any kind that PyTorch computes on: whether there is one, its memory, and waiting for it."""

from __future__ import annotations

from typing import Any

import torch

from manyhands.facts.errors import Refused


def check_gpu(compute: str) -> None:
    """Refuse a GPU that PyTorch does not find here; `compute`: as in `--compute`."""
    kind, _, number = compute.partition(":")
    count = _count(kind)
    if int(number or 0) >= count:
        raise Refused(
            f"--compute {compute} was asked for; torch sees {count} GPU(s) of this kind here.",
            hint="Compute on the processor (--compute cpu).",
        )


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        _module(device.type).synchronize()


def release_memory(device: torch.device) -> None:
    """Give back what PyTorch keeps of a GPU's memory for tensors of the same sizes."""
    if device.type != "cpu":
        _module(device.type).empty_cache()


def memory_bytes(device: torch.device) -> int | None:
    """Return a GPU's memory; None where it is the machine's."""
    if device.type in ("cuda", "xpu"):
        return int(_module(device.type).get_device_properties(device).total_memory)
    return None


def free_bytes(device: torch.device) -> int | None:
    """Return what is free of a GPU's memory; None where it is the machine's, or is not known."""
    look = getattr(_module(device.type), "mem_get_info", None) if device.type in ("cuda", "xpu") else None
    return int(look(device)[0]) if look is not None else None


def _count(kind: str) -> int:
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = _module(kind)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def _module(kind: str) -> Any:
    """Return PyTorch's module for a kind of GPU: torch.cuda, torch.mps, torch.xpu."""
    return getattr(torch, kind, None)
