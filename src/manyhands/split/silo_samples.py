"""Samples of which a part is in silos, as the process that feeds them sees them: numbers, or made-up examples."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.loader import length
from manyhands.data.silo import TARGET
from manyhands.facts.errors import BadValue
from manyhands.runtime.control_parts import TensorEntry

_EXAMPLES = 8


def named_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return one sample's inputs by the names of the model's arguments."""
    parameters = list(inspect.signature(model.forward).parameters)
    if isinstance(inputs, dict):
        strange = [name for name in inputs if name not in parameters]
        if strange:
            raise BadValue(f"{type(model).__name__} takes no {', '.join(strange)}; it takes {', '.join(parameters)}.")
        return inputs
    values = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    if len(values) > len(parameters):
        raise BadValue(f"A sample has {len(values)} inputs; {type(model).__name__} takes {', '.join(parameters)}.")
    return dict(zip(parameters, values))


@dataclass(frozen=True)
class Parts:
    """The parts of a sample, here and elsewhere."""

    model: nn.Module
    inputs: tuple[str, ...]
    """The inputs that are in silos."""
    has_target: bool
    """Whether a silo has the target."""
    own: Dataset[Any] | None
    """The data set at hand, with the rest."""
    places: torch.Tensor | None
    """Sample -> its number in the data set at hand."""
    count: int


class Samples(Dataset[Any]):
    """A data set with a number for whatever is in a silo, and the rest as the data set at hand has it."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.own = parts, parts.own

    def __len__(self) -> int:
        return self.parts.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._made(range(len(self))[index])

    def _made(self, index: int) -> tuple[Any, Any]:
        parts = self.parts
        inputs: Any = {}
        target: Any = None
        if parts.own is not None:
            assert parts.places is not None
            inputs, target = parts.own[int(parts.places[index])]
        if parts.inputs:
            named = named_inputs(parts.model, inputs)
            inputs = {name: named[name] for name in named if name not in parts.inputs}
            inputs |= {name: self._stands_in(name, index) for name in parts.inputs}
        return inputs, self._stands_in(TARGET, index) if parts.has_target else target

    def _stands_in(self, name: str, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Examples(Samples):
    """A data set of examples: like `Samples`, with made-up values for whatever is not here."""

    def __init__(self, parts: Parts, entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(parts)
        self.entries = entries

    def _stands_in(self, name: str, index: int) -> torch.Tensor:
        entry = self.entries[name]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not dtype.is_floating_point:  # a class, or an index into a table: one that surely exists
            return torch.full(entry.shape, index % 2).to(dtype)
        drawn = numpy.random.default_rng(index % _EXAMPLES).standard_normal(math.prod(entry.shape))
        return torch.from_numpy(drawn.reshape(entry.shape)).to(dtype)


class Named(Dataset[Any]):
    """A data set of the same samples, with their inputs by name."""

    def __init__(self, model: nn.Module, data: Dataset[Any]) -> None:
        self.model, self.data = model, data

    def __len__(self) -> int:
        return length(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, target = self.data[index]
        return named_inputs(self.model, inputs), target
