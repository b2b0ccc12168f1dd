"""The samples of each batch: a pure function of seed and step, so that a run resumes where it was."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadData, BadValue

if TYPE_CHECKING:
    import numpy

_SEEDS = 2**64


@dataclass(frozen=True)
class BatchOrder:
    """An order in which each epoch takes every sample at most once, and leaves out those that do not fill a last
    batch."""

    samples: int
    batch_size: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise BadValue(f"The batch size is {self.batch_size}; it must be 1 or more.")
        if not 0 <= self.seed < _SEEDS:
            raise BadValue(f"The seed of the batch order is {self.seed}; it must be between 0 and 2^64 - 1.")
        if self.samples < self.batch_size:
            raise BadData(
                f"The data set has {self.samples} samples; a batch has {self.batch_size}.",
                hint=f"Use a batch size of at most {self.samples}." if self.samples > 0 else "Give it some data.",
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch_size

    def indices(self, step: int) -> list[int]:
        """Return the samples of a step, counted from 0 over all epochs."""
        if step < 0:
            raise BadValue(f"The step is {step}; steps count from 0.")
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        if not self.shuffle:
            return list(range(first, first + self.batch_size))
        chosen: list[int] = permutation(self.samples, self.seed, epoch)[first : first + self.batch_size].tolist()
        return chosen

    def padded(self, dataset: Any, step: int) -> Any:
        """Return a data set as the samples of a step are taken from it."""
        return dataset


@dataclass(frozen=True)
class GivenOrder:
    """The order of batches that come as they are given."""

    steps_per_epoch: int
    """Batches of an epoch; where an epoch's end is not known, those of the run."""


@functools.lru_cache(maxsize=4)
def permutation(count: int, seed: int, stream: int) -> numpy.ndarray:
    """Return the numbers below `count` in an order that depends on seed and stream alone.

    numpy promises to keep the raw numbers of Philox for ever, but not its shuffles: every machine must get the same
    order, whatever its version.
    """
    import numpy

    drawn = numpy.random.Philox(key=numpy.array([seed, stream], dtype=numpy.uint64)).random_raw(count)
    order = numpy.argsort(drawn, kind="stable")
    order.setflags(write=False)  # it is shared by all callers
    return order
