"""Preload: every sample is sent to the devices before the first step, and from then on only sample numbers travel.

It suits data sets of which every pass gives the same samples: what is drawn anew each time (a random crop) would be
drawn only once.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from manyhands.data.loader import example, length
from manyhands.facts.errors import BadData
from manyhands.facts.units import format_bytes

_MOST_OF_MEMORY = 0.5
HINT = "Leave feed='start' out (--feed start): then each step's samples travel when they are needed."


@dataclass(frozen=True)
class Preload:
    """Every sample of a data set in one batch, for the devices to hold."""

    inputs: Any
    targets: Any
    count: int
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """A device that holds a resident dataset of this key has the same samples."""

    @classmethod
    def of(cls, data: Dataset[Any]) -> Preload:
        """Read a data set to its end."""
        count = length(data)
        sample_bytes = sum(leaf.nbytes for leaf in tree_leaves(example(data, 1)) if isinstance(leaf, torch.Tensor))
        room = _MOST_OF_MEMORY * psutil.virtual_memory().available
        if count * sample_bytes > room:
            raise BadData(
                f"All {count:,} samples take {format_bytes(count * sample_bytes)}; "
                f"{format_bytes(int(room))} may be used here.",
                hint=HINT,
            )
        return cls(*example(data, count), count)

    def numbers(self) -> tuple[Any, Any]:
        """Return the numbers of all samples, in the structure of a batch."""
        rows = torch.arange(self.count)
        inputs, targets = tree_map(lambda _: rows, (self.inputs, self.targets))
        return inputs, targets


class Numbered(Dataset[Any]):
    """A data set that gives the number of a sample in place of each of its tensors."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.count, self._like = length(data), data[0]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        number = torch.tensor(range(self.count)[index])
        return tree_map(lambda _: number, self._like)
