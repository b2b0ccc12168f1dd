"""Jobs whose samples have different lengths: what they are padded to, and what is reported of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, TypedDict

from torch.utils.data import Dataset

from manyhands.data.length_order import LengthOrder, LengthUse, padded_share
from manyhands.data.order import BatchOrder, GivenOrder
from manyhands.data.padding import Chosen, Padded, SamplePadding, measured, wanted_lengths
from manyhands.facts.errors import BadValue
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs

if TYPE_CHECKING:
    import numpy

_EXAMPLES = 4
"""Samples that the network is captured with."""


@dataclass(frozen=True)
class PaddingSettings:
    """The keywords of functions that take samples of different lengths, beside jobs, which have them in their
    configuration."""

    lengths: Sequence[int] | None = None
    """Lengths that samples are padded to; None: they all have one shape."""
    pad: Mapping[str, float] | None = None
    """What fills them up, by the name of the input or target; else 0, and -100 in targets of whole numbers."""


class PaddingOptions(TypedDict, total=False):
    """The keywords of `PaddingSettings`."""

    lengths: Sequence[int] | None
    pad: Mapping[str, float] | None


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of a job's samples, and how they are padded."""

    padding: SamplePadding
    """Its lengths are those that the job has a graph for: those that batches have, and the longest of held-out data."""
    of_batches: SamplePadding
    """Its lengths are those that batches have."""
    of_samples: numpy.ndarray
    """The length of each sample."""

    @property
    def longest(self) -> int:
        return self.padding.lengths[-1]

    def examples(self, data: Any, length: int) -> Dataset[Any]:
        """Return a few samples padded to a length: the shortest, and the longest that fit it; repeated where there are
        too few."""
        import numpy

        order = numpy.argsort(-self.of_samples, kind="stable")
        fitting = order[self.of_samples[order] <= length].tolist()
        chosen = [fitting[-1], *fitting[: _EXAMPLES - 1]]
        return Padded(Chosen(data, [*islice(cycle(chosen), _EXAMPLES)]), self.padding, length)


def sample_lengths(data: Any, test: Any, lengths: Any, pad: Any) -> SampleLengths | None:
    """Read the samples of a job once, and return their lengths; None: they all have one shape."""
    if lengths is None:
        if pad is not None:
            raise BadValue("pad says what fills samples up; lengths says how far.", hint="Add lengths=(32, 64, 128).")
        return None
    wanted = wanted_lengths(lengths, pad)
    padding, of_samples = measured(data, wanted)
    of_batches = padding.used_by(of_samples)
    held_out = measured(test, wanted)[1] if test is not None else of_samples
    longest = max(of_batches.lengths[-1], padding.fitting(int(held_out.max())))
    used = tuple(sorted({*of_batches.lengths, longest}))
    return SampleLengths(SamplePadding(used, padding.values, padding.axes), of_batches, of_samples)


def padded_to_longest(data: Any, settings: PaddingSettings) -> Any:
    """Return a data set in which every sample is padded to the longest length that any of them needs."""
    lengths = sample_lengths(data, None, settings.lengths, settings.pad)
    return data if lengths is None else Padded(data, lengths.padding, lengths.longest)


@dataclass(frozen=True)
class RunLengths:
    """The lengths of a run's batches."""

    uses: list[LengthUse] = field(default_factory=list)
    """How many batches have each length; none: all samples have one shape."""
    graphs: LengthGraphs | None = None
    """The graph of each step; None: all have one."""

    @property
    def text(self) -> str:
        """The lengths as a person is told of them; empty: there is nothing to tell."""
        batches = ", ".join(f"{use.batches:,} of {use.length}" for use in self.uses)
        share = padded_share(self.uses)
        return f"Batches by length: {batches}; {share:.0%} of all positions are padding." if batches else ""


def lengths_of(order: BatchOrder | GivenOrder, graphs: Mapping[int, Graph], first: int, last: int) -> RunLengths:
    """Return the lengths of the batches from step `first` up to `last`."""
    if not isinstance(order, LengthOrder):
        return RunLengths()
    steps = range(first, last)
    several = LengthGraphs(graphs, first, [order.length(step) for step in steps]) if len(graphs) > 1 else None
    return RunLengths(order.uses(steps), several)
