"""What a network takes for one sample, and samples made to be that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.data.pictures import PIXEL_MEAN, PIXEL_STANDARD_DEVIATION
from manyhands.facts.errors import BadData

Sample = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Wanted:
    """One sample as the network takes it, and how a pixel becomes a number."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    mean: float = PIXEL_MEAN
    deviation: float = PIXEL_STANDARD_DEVIATION

    @property
    def takes_pictures(self) -> bool:
        return self.dtype.is_floating_point and len(self.shape) == 3 and self.shape[0] in (1, 3)

    @property
    def text(self) -> str:
        return "x".join(map(str, self.shape)) or "one number"


class Samples:
    """Samples by number, each made when it is asked for."""

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
        """The right classes, where they are known."""
        self.note = note
        """What a person should know of what was taken."""

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        return self._make(range(self._count)[index])

    def __iter__(self) -> Iterator[Sample]:
        return (self._make(index) for index in range(self._count))

    def name(self, index: int) -> str:
        return self._name(index)


def misfit(name: str, shape: tuple[int, ...], wanted: Wanted) -> BadData:
    text = "x".join(map(str, shape)) or "one number"
    if len(shape) == 3 == len(wanted.shape) and shape[2] == wanted.shape[0]:
        hint = "Channels come first: numpy.save('samples.npy', x.transpose(0, 3, 1, 2))"
    elif math.prod(shape) == math.prod(wanted.shape):
        hint = (
            f"If it is the same in another order: numpy.save('samples.npy', x.reshape(-1, {str(wanted.shape)[1:-1]}))"
        )
    else:
        hint = f"Give samples of {wanted.text}, or say what the network is to take: --shape {text}"
    return BadData(f"{name} has samples of {text}; the network takes {wanted.text}.", hint=hint)
