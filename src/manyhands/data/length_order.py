"""Batches of samples of similar length: which samples make which batch, and the length that it is padded to.

    one epoch     samples in drawn order ─▶ by the length each fits ─▶ batches of each length ─▶ batches in drawn order
                  9 3 7 2 8 6               | 3 2 | 9 7 8 6 |          | 3 2 | 9 7 | 8 6 |       | 8 6 | 3 2 | 9 7 |

Samples that do not fill a batch of their length go to the next longer one, so that an epoch leaves out no more samples
than it does without lengths. Without shuffling, batches are consecutive samples, each padded for its longest.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manyhands.data.order import BatchOrder, permutation
from manyhands.data.padding import Padded, SamplePadding

if TYPE_CHECKING:
    import numpy

_OF_BATCHES = 2**63
"""Added to the epoch: the numbers drawn for the order of batches are not those of samples."""
_EPOCHS_KEPT = 4
Epoch = tuple[list[list[int]], list[int]]
"""The samples of each batch of an epoch, and the length of each."""


@dataclass(frozen=True)
class LengthUse:
    """The batches of a run that are padded to one length."""

    length: int
    batches: int = 0
    positions: int = 0
    """Positions of these batches, padded ones among them."""
    padded: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "length": self.length, "batches": self.batches, "positions": self.positions, "padded": self.padded,
        }  # fmt: skip


def padded_share(uses: Sequence[LengthUse]) -> float:
    """Return the part of all positions that is padding."""
    return sum(use.padded for use in uses) / max(1, sum(use.positions for use in uses))


@dataclass(frozen=True, eq=False)
class LengthOrder(BatchOrder):
    """The order of batches in which each has one of a few lengths."""

    padding: SamplePadding = field(kw_only=True)
    """Its lengths are those that samples are padded to, all of them in use."""
    sample_lengths: numpy.ndarray = field(kw_only=True)
    _epoch: Callable[[int], Epoch] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_epoch", functools.lru_cache(maxsize=_EPOCHS_KEPT)(self._drawn))

    @property
    def digest(self) -> int:
        """A checksum of the samples' lengths: a run is resumed with the same."""
        return zlib.crc32(self.sample_lengths.tobytes())

    def indices(self, step: int) -> list[int]:
        super().indices(step)  # refuses a step below 0
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[0][place]

    def length(self, step: int) -> int:
        """Return the length that the batch of a step is padded to."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[1][place]

    def padded(self, dataset: Any, step: int) -> Any:
        return Padded(dataset, self.padding, self.length(step))

    def uses(self, steps: range) -> list[LengthUse]:
        """Return how often each length is used in these steps, and how much of it is padding."""
        batches: Counter[int] = Counter()
        real: Counter[int] = Counter()
        for step in steps:
            length = self.length(step)
            batches[length] += 1
            real[length] += int(self.sample_lengths[self.indices(step)].sum())
        return [
            LengthUse(length, count, count * self.batch_size * length, count * self.batch_size * length - real[length])
            for length, count in sorted(batches.items())
        ]

    def _drawn(self, epoch: int) -> Epoch:
        import numpy

        size = self.batch_size
        fitting = numpy.searchsorted(numpy.array(self.padding.lengths), self.sample_lengths)
        if not self.shuffle:
            batches = [numpy.arange(first, first + size) for first in range(0, self.samples - size + 1, size)]
            places = [int(fitting[batch].max()) for batch in batches]
        else:
            order = permutation(self.samples, self.seed, epoch)
            batches, places, left = [], [], order[:0]
            for place in range(len(self.padding.lengths)):
                here = numpy.concatenate([left, order[fitting[order] == place]])
                full = len(here) // size * size
                batches += [here[first : first + size] for first in range(0, full, size)]
                places += [place] * (full // size)
                left = here[full:]
            drawn = permutation(len(batches), self.seed, _OF_BATCHES + epoch)
            batches, places = [batches[number] for number in drawn], [places[number] for number in drawn]
        return [batch.tolist() for batch in batches], [self.padding.lengths[place] for place in places]
