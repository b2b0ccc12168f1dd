"""Optional dependencies, which are not installed with manyhands by default, and how to install them:
pip install 'manyhands[NAME]'."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from manyhands.facts.errors import NotInstalled


@dataclass(frozen=True)
class Extra:
    """An extra of pyproject.toml that a user may want."""

    name: str
    modules: tuple[str, ...]
    """The modules imported from it: it is installed when all of these are."""
    purpose: str

    @property
    def command(self) -> str:
        return f"pip install 'manyhands[{self.name}]'"


EXTRAS = (
    Extra("plots", ("matplotlib",), "pictures of runs, plans and benchmarks (PNG files)"),
    Extra("pictures", ("PIL",), "data sets and samples that are pictures"),
    Extra("tensorboard", ("tensorboard",), "logs for TensorBoard: `manyhands train --tensorboard`"),
    Extra("wandb", ("wandb",), "logs for Weights & Biases: `callbacks=[mh.WandB()]`"),
    Extra("mlflow", ("mlflow",), "logs for MLflow: `callbacks=[mh.MLflow()]`"),
    Extra("onnx", ("onnx", "onnxscript"), "trained networks as ONNX files: `manyhands export`"),
)


def is_here(name: str) -> bool:
    """Return whether an extra is installed; nothing of it is imported."""
    try:
        return all(importlib.util.find_spec(module) is not None for module in _extra(name).modules)
    except (ImportError, ValueError):  # something else has that name, and is empty
        return False


def load(module: str, feature: str) -> Any:
    """Return a module of an extra, or raise an error that says what to type to install it. `feature` needs it, and
    begins the error's sentence."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        extra = next((candidate for candidate in EXTRAS if root in candidate.modules), None)
        if (
            extra is None or (error.name or "").partition(".")[0] != root
        ):  # it is installed, and something that it needs is not
            raise
        raise NotInstalled(f"{feature} needs {root}, which is not installed.", hint=f"Type: {extra.command}") from error


def _extra(name: str) -> Extra:
    return next(extra for extra in EXTRAS if extra.name == name)
