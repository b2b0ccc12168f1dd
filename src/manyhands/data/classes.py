"""Selects some classes of a data set: some to learn first, others to transfer to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from manyhands.data.data_sets import DataSets
from manyhands.facts.errors import BadData, BadValue

LARGEST_CLASS = 100_000


def parse_classes(text: str) -> tuple[int, ...]:
    """Return the classes in '0-4' or '0,2,5-7'."""
    numbers: list[int] = []
    for part in text.split(","):
        first, sign, last = part.partition("-")
        ends = (first, last if sign else first)
        if not all(end.isdecimal() and int(end) < LARGEST_CLASS for end in ends) or int(ends[1]) < int(ends[0]):
            raise BadValue(f"'{text:.40}' names no classes.", hint="Write 0-4, or 0,2,5-7.")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return tuple(numbers)


def only(sets: DataSets, classes: Sequence[int]) -> DataSets:
    """Return the samples of some classes, numbered anew in the given order: some to learn first, others to transfer
    to."""
    strange = [number for number in classes if not 0 <= number < sets.num_classes]
    if strange or len(set(classes)) < len(classes) or not classes:
        raise BadData(f"Classes {list(classes)} of {sets.name}: each must be from 0 to {sets.num_classes - 1}, once.")
    number = {label: place for place, label in enumerate(classes)}
    test = _Only(sets.test, number) if sets.test is not None else None
    return DataSets(
        name=sets.name,
        train=_Only(sets.train, number),
        test=test if test is not None and len(test) else None,
        num_classes=len(classes),
        input_shape=sets.input_shape,
        classes=tuple(sets.classes[label] for label in classes),
        kind=sets.kind,
        model_options=sets.model_options,
    )


class _Only(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: Dataset[Any], number: dict[int, int]) -> None:
        self._samples = samples
        self._chosen = [(place, number[label]) for place, label in enumerate(_labels(samples)) if label in number]

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place, label = self._chosen[index]
        return self._samples[place][0], torch.tensor(label)


def _labels(samples: Any) -> list[int]:
    """Return the labels, without decoding a picture where the data set holds them."""
    if isinstance(samples, Subset):
        of_all = _labels(samples.dataset)
        return [of_all[index] for index in samples.indices]
    held = samples.targets.tolist() if hasattr(samples, "targets") else getattr(samples, "labels", None)
    return [int(label) for label in held] if held is not None else [int(samples[i][1]) for i in range(len(samples))]
