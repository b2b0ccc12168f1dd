"""Held-out data, whose order does not matter: samples by number, whichever way it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from manyhands.data.batch_parts import BatchSamples, plain
from manyhands.data.batch_stream import yields_batches
from manyhands.data.given import Pairs, collect, given, reason_against


def samples_of(data: Any) -> Any:
    """Return held-out data as a data set: of a DataLoader its data set, if all it does is take samples from it, and
    else the samples of its batches, read once into memory."""
    source = data.data if isinstance(data, Pairs) else data
    is_loader = isinstance(source, DataLoader)
    if not (is_loader and reason_against(source)) and (is_loader or not yields_batches(source)):
        return given(data).data
    samples = collect(_Unbatched(source))
    return Pairs(samples, data.input, data.target) if isinstance(data, Pairs) else samples


class _Unbatched:
    """The samples of batches, one by one."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.source() if callable(self.source) else self.source):
            samples = BatchSamples(plain(batch), (), number)
            for index in range(len(samples)):
                yield samples[index][0]
