"""The form in which a network takes one sample, and samples that are made to have it.

An array is one sample of exactly the network's shape, or several with one more axis in front. Nothing else is guessed:
it is unknown whether an array of another shape is one sample or many, and a network answers to a resized picture as
surely as to the right one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.data.pictures import PIXEL_MEAN, PIXEL_STANDARD_DEVIATION
from manyhands.facts.errors import BadData

Sample = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class SampleForm:
    """The form in which the network takes one sample, and how a pixel becomes a number."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    mean: float = PIXEL_MEAN
    deviation: float = PIXEL_STANDARD_DEVIATION
    resize: bool = False
    """Whether pictures, and arrays of them, of another height and width are resized; else they are refused."""
    resize_words: str = "add --resize"
    """The way for the user to request resizing, in error messages."""
    shape_option: str = "--shape"
    """The option that makes the network take another shape; empty where the user has none."""

    @property
    def can_resize(self) -> bool:
        """Whether samples have a height and a width."""
        return self.dtype.is_floating_point and len(self.shape) == 3

    @property
    def takes_pictures(self) -> bool:
        return self.can_resize and self.shape[0] in (1, 3)

    @property
    def text(self) -> str:
        return shape_text(self.shape)

    @property
    def kind(self) -> str:
        """The name of the type: float32, int64, ..."""
        return str(self.dtype).removeprefix("torch.")

    def resizing(self) -> SampleForm:
        """Return the same form, with pictures of another height and width resized. Refused where samples have none."""
        if not self.can_resize:
            raise BadData(
                "Nothing can be resized: only pictures, which are channels x height x width, have a size, and the "
                f"network takes {self.text} ({self.kind}).",
                hint="Give samples of exactly this shape.",
            )
        return dataclasses.replace(self, resize=True)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "one number"


class SampleSource:
    """Samples by number, each made when it is read."""

    def __init__(
        self,
        count: int,
        make: Callable[[int], Sample],
        name: Callable[[int], str],
        *,
        targets: Sequence[int] = (),
        note: str = "",
    ) -> None:
        self._count, self._make, self._name = count, make, name
        self.targets = targets
        """The right classes, if known."""
        self.note = note
        """A remark for the user on which samples were taken."""

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        return self._make(range(self._count)[index])

    def __iter__(self) -> Iterator[Sample]:
        return (self._make(index) for index in range(self._count))

    def name(self, index: int) -> str:
        return self._name(index)


def misfit(name: str, shape: tuple[int, ...], form: SampleForm) -> BadData:
    """Return the error for an array or a picture of another shape than the network takes."""
    batch_text = f"Nx{form.text}" if form.shape else "N numbers"
    return BadData(
        f"{name} is {shape_text(shape)}; the network takes {form.text} (one sample) or {batch_text} (several).",
        hint=misfit_hint(shape, form),
    )


def misfit_hint(shape: tuple[int, ...], form: SampleForm) -> str:
    """Return what to type for samples of another shape."""
    sample_shape = shape if len(shape) == len(form.shape) or len(shape) < 2 else shape[1:]
    other_shape = f"{form.shape_option} {shape_text(sample_shape)}" if form.shape_option else ""
    if form.can_resize and len(sample_shape) == 3 and sample_shape[0] == form.shape[0]:
        alternative = f"\nOr have the network take them as they are: {other_shape}" if other_shape else ""
        return f"To have them resized to {form.text}: {form.resize_words}{alternative}"
    if len(sample_shape) == len(form.shape) == 3 and sample_shape[2] == form.shape[0]:
        order = "0, 3, 1, 2" if len(shape) == 4 else "2, 0, 1"
        return f"Channels come first: x.transpose({order})"
    if math.prod(form.shape) in (math.prod(shape), math.prod(shape[1:])):
        return f"If the numbers are in the network's order: x.reshape({str((-1, *form.shape))[1:-1].rstrip(',')})"
    alternative = f", or say what the network is to take: {other_shape}" if other_shape else ""
    return f"Give samples of {form.text}{alternative}"
