"""What is not installed with manyhands unless it is asked for, and how to ask for it: pip install 'manyhands[NAME]'."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from manyhands.facts.errors import NotInstalled


@dataclass(frozen=True)
class Extra:
    """One extra of pyproject.toml that a user may want."""

    name: str
    modules: tuple[str, ...]
    """What is imported from it: it is here when all of these are."""
    purpose: str

    @property
    def command(self) -> str:
        return f"pip install 'manyhands[{self.name}]'"


EXTRAS = (
    Extra("plots", ("matplotlib",), "pictures of runs, plans and benchmarks (PNG files)"),
    Extra("pictures", ("PIL",), "data sets and samples that are pictures"),
    Extra("tensorboard", ("tensorboard",), "logs for TensorBoard: `manyhands train --tensorboard`"),
    Extra("onnx", ("onnx", "onnxscript"), "trained networks as ONNX files: `manyhands export`"),
)


def is_here(name: str) -> bool:
    """Return whether an extra is installed; nothing of it is imported."""
    try:
        return all(importlib.util.find_spec(module) is not None for module in _extra(name).modules)
    except (ImportError, ValueError):  # something else answers for that name, and has nothing
        return False


def load(module: str, what: str) -> Any:
    """A module of an extra, or what to type to have it. `what` needs it: a sentence's beginning."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        extra = next((candidate for candidate in EXTRAS if root in candidate.modules), None)
        if extra is None or (error.name or "").partition(".")[0] != root:  # it is here, and something of its own is not
            raise
        raise NotInstalled(f"{what} needs {root}, which is not installed.", hint=f"Type: {extra.command}") from error


def _extra(name: str) -> Extra:
    return next(extra for extra in EXTRAS if extra.name == name)
