"""Samples of different lengths, padded: which axes of a sample grow with its length, and what fills them.

A sample's length is the first axis of the first tensor of its input. Every axis of its input and target that has that
size in all samples is padded at its end: with 0 in inputs, with -100 in whole-numbered targets (losses ignore it), or
with what the user gives by name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from manyhands.data.loader import length, sample_of
from manyhands.facts.errors import BadData, BadValue

if TYPE_CHECKING:
    import numpy

MOST_LENGTHS = 32
"""The most lengths of a job: the network is captured, and travels, once for each that is used."""
IGNORED = -100
"""The target that losses of PyTorch ignore unless they are told otherwise."""
INPUT, TARGET = "input", "target"
_Leaf = tuple[str, str]
"""Part of the sample, and the name of a tensor in it: the key of a dict, "input", "target", or "input[1]"."""


@dataclass(frozen=True)
class SamplePadding:
    """The lengths that the samples of a data set are padded to, and what with."""

    lengths: tuple[int, ...]
    """The lengths that batches are padded to, ascending."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Name of an input or target -> what fills it, as the user gave it."""
    axes: Mapping[_Leaf, tuple[int, ...]] = field(default_factory=dict)
    """The axes that grow with the sample's length."""

    def fitting(self, sample_length: int) -> int:
        """Return the shortest of the lengths that a sample fits."""
        return self.lengths[bisect_left(self.lengths, sample_length)]

    def of_sample(self, index: int, sample: tuple[Any, Any], to: int) -> tuple[Any, Any]:
        """Return a sample padded to a length."""
        long = _length_of(sample, index)
        if long > to:
            raise too_long([(index, long)], self.lengths if long > self.lengths[-1] else (to,))
        parts = []
        for part, value in zip((INPUT, TARGET), sample):
            parts.append(_mapped(value, part, lambda leaf, name, part=part: self._filled(leaf, (part, name), to)))  # type: ignore[misc]
        return parts[0], parts[1]

    def _filled(self, leaf: Any, key: _Leaf, to: int) -> Any:
        axes = self.axes.get(key, ())
        tensor = _tensor(leaf)
        if tensor is None or not axes:
            return leaf if tensor is None else tensor
        shape = [to if axis in axes else size for axis, size in enumerate(tensor.shape)]
        filled = tensor.new_full(shape, self.value_for(key, tensor.dtype))
        filled[tuple(slice(size) for size in tensor.shape)] = tensor
        return filled

    def value_for(self, key: _Leaf, dtype: torch.dtype) -> float:
        """Return what fills a tensor; refuse a number that its type does not have."""
        part, name = key
        is_whole = not dtype.is_floating_point and dtype != torch.bool
        value = self.values.get(name, IGNORED if part == TARGET and is_whole else 0)
        as_stored = torch.tensor(value).to(dtype)
        if float(as_stored) != float(value):
            text = str(dtype).removeprefix("torch.")
            raise BadData(
                f"'{name}' is {text}, which cannot hold the {value} that is to pad it.",
                hint=f"Say what pads it: pad={{'{name}': ...}}; or give it as int64.",
            )
        return value

    def used_by(self, sample_lengths: Iterable[int]) -> SamplePadding:
        """Return the same with those of the lengths alone that some sample is padded to."""
        used = sorted({self.fitting(int(length)) for length in set(sample_lengths)})
        return SamplePadding(tuple(used), self.values, self.axes)


class Padded(Dataset[Any]):
    """A data set whose samples are padded to one length."""

    def __init__(self, data: Any, padding: SamplePadding, to: int) -> None:
        self.data, self.padding, self.to = data, padding, to

    def __len__(self) -> int:
        return length(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.padding.of_sample(index, sample_of(self.data, index), self.to)


class Chosen(Dataset[Any]):
    """Some samples of a data set, by number."""

    def __init__(self, data: Any, numbers: Sequence[int]) -> None:
        self.data, self.numbers = data, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.numbers[index]]


def wanted_lengths(lengths: Any, pad: Any) -> SamplePadding:
    """Return the padding that a user asked for, before any sample was looked at."""
    numbers: list[Any] = [*lengths] if isinstance(lengths, Iterable) else [lengths]
    chosen: list[int] = sorted({number for number in numbers if type(number) is int and number >= 1})
    if not chosen or not all(number in chosen and type(number) is int for number in numbers):
        raise BadValue(
            f"lengths is {lengths!r:.200}; it must be whole numbers of at least 1.",
            hint="Write lengths=(32, 64, 128), or lengths=range(16, 129, 16).",
        )
    if len(chosen) > MOST_LENGTHS:
        raise BadValue(
            f"lengths has {len(chosen)} numbers; at most {MOST_LENGTHS} are taken: the network is captured for each.",
            hint=f"Write fewer: lengths=range({chosen[0]}, {chosen[-1] + 1}, {-(-(chosen[-1] - chosen[0]) // 8)}).",
        )
    values = dict(pad or {})
    for name, value in values.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadValue(f"pad has {name!r}: {value!r}; it must be names and numbers.", hint="pad={'input_ids': 0}")
    return SamplePadding(tuple(chosen), values)


def measured(data: Any, wanted: SamplePadding) -> tuple[SamplePadding, numpy.ndarray]:
    """Read a data set once; return its padding, and the length of each sample.

    Refuses what cannot be padded: a sample longer than the longest of the lengths, or of a type that cannot hold what
    would fill it.
    """
    import numpy

    count = length(data)
    sample_lengths = numpy.empty(count, dtype=numpy.int64)
    growing: dict[_Leaf, set[int]] = {}
    types: dict[_Leaf, torch.dtype] = {}
    over: list[tuple[int, int]] = []
    for index in range(count):
        sample = sample_of(data, index)
        long = sample_lengths[index] = _length_of(sample, index)
        if long > wanted.lengths[-1]:
            over.append((index, int(long)))
        for key, tensor in _tensors(sample):
            axes = {axis for axis, size in enumerate(tensor.shape) if size == long}
            growing[key] = growing[key] & axes if key in growing else axes
            types.setdefault(key, tensor.dtype)
    if over:
        raise too_long(over, wanted.lengths)
    if count and int(sample_lengths.min()) == int(sample_lengths.max()):  # a width may be the same number by chance
        growing = {key: axes & {0} for key, axes in growing.items()}
    names = {name for _, name in growing}
    for name in wanted.values:
        if name not in names:
            raise BadValue(f"pad names '{name}'; a sample has {', '.join(sorted(names))}.")
    padded = {key: tuple(sorted(axes)) for key, axes in growing.items() if axes}
    padding = SamplePadding(wanted.lengths, wanted.values, padded)
    for key in padded:
        padding.value_for(key, types[key])
    return padding, sample_lengths


def too_long(over: Sequence[tuple[int, int]], lengths: Sequence[int]) -> BadData:
    """Return the error for samples, with their lengths, that are longer than all of the lengths."""
    index, long = over[0]
    most = max(long for _, long in over)
    others = f" ({len(over) - 1} more {'are' if len(over) > 2 else 'is'} too long; the longest has {most})"
    wider = ", ".join(map(str, (*lengths[-4:], most)))
    return BadData(
        f"Sample {index} has a length of {long}; the longest of lengths is {lengths[-1]}"
        f"{others if len(over) > 1 else ''}.",
        hint=f"Write lengths=({wider}), or cut samples to {lengths[-1]} in __getitem__.",
    )


def _length_of(sample: tuple[Any, Any], index: int) -> int:
    for (part, name), tensor in _tensors(sample):
        if part == INPUT and tensor.dim():
            if not tensor.shape[0]:
                raise BadData(f"Sample {index} is empty: '{name}' has the shape {tuple(tensor.shape)}.")
            return int(tensor.shape[0])
    raise BadData(
        f"The input of sample {index} has no length: no tensor in it has an axis.",
        hint="Leave out lengths; it is for samples of different lengths.",
    )


def _tensors(sample: tuple[Any, Any]) -> Iterator[tuple[_Leaf, torch.Tensor]]:
    """Yield every tensor of a sample, with its name."""
    leaves: list[tuple[_Leaf, torch.Tensor]] = []

    def visit(part: str) -> Callable[[Any, str], Any]:
        def note(leaf: Any, name: str) -> Any:
            tensor = _tensor(leaf)
            if tensor is not None:
                leaves.append(((part, name), tensor))
            return leaf

        return note

    for part, value in zip((INPUT, TARGET), sample):
        _mapped(value, part, visit(part))
    yield from leaves


def _mapped(value: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    """Return a value with each of its leaves changed. A list of numbers is a leaf, as tokenizers return it."""
    if isinstance(value, Mapping):
        return {key: _mapped(item, str(key), change) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not _is_row(value):
        items = [_mapped(item, f"{name}[{place}]", change) for place, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return change(value, name)


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, (int, float)) or _is_row(item) for item in value)


def _tensor(leaf: Any) -> torch.Tensor | None:
    """Return a tensor, an array or a list of numbers as a tensor; None for anything else."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, list) or (hasattr(leaf, "__array__") and hasattr(leaf, "shape")):
        return torch.as_tensor(leaf)
    return None
