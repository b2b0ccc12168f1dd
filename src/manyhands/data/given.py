"""Turns whatever torch.utils.data has into a map-style data set of pairs: samples by number, so that a run can resume
anywhere.

    map-style        as it is: any Dataset, Subset, TensorDataset, ConcatDataset, a list
    DataLoader       its data set, batch size and order; manyhands makes the batches itself
    IterableDataset  read once, into memory, within limits: every epoch has the samples of its first pass

A run resumes exactly as long as the same samples come in the same order when it is started again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from manyhands.facts.errors import BadData, BadValue
from manyhands.facts.units import format_bytes

MOST_BYTES = 2 * 10**9
MOST_SAMPLES = 1_000_000
"""The most samples of a stream without a limit: an endless one is noticed before memory runs out."""


@dataclass(frozen=True)
class Given:
    """A map-style data set, and what else the caller specified with it; None: nothing."""

    data: Any
    batch_size: int | None = None
    shuffle: bool | None = None

    def shuffles(self, shuffle: bool | None) -> bool:
        """Return what the caller says, else what the DataLoader does, else True."""
        return next((choice for choice in (shuffle, self.shuffle) if choice is not None), True)


def given(data: Any) -> Given:
    """Return what a caller gave as data."""
    if isinstance(data, DataLoader):
        return _of_loader(data)
    if isinstance(data, IterableDataset):
        return Given(collect(data))
    if isinstance(data, Pairs):
        inner = given(data.data)
        return Given(Pairs(inner.data, data.input, data.target), inner.batch_size, inner.shuffle)
    return Given(data)


def batch_size_of(data: Given, batch_size: int | None) -> int:
    """Return the caller's batch size or the DataLoader's; two different ones are refused."""
    if batch_size is None and data.batch_size is None:
        raise BadValue("batch_size is not given.", hint="Write batch_size=64, or give a DataLoader, which has one.")
    if batch_size is not None and data.batch_size is not None and batch_size != data.batch_size:
        raise BadValue(
            f"batch_size is {batch_size!r}; the DataLoader's is {data.batch_size}.",
            hint="Leave out batch_size=, or give the DataLoader's data set: data=loader.dataset.",
        )
    return batch_size if batch_size is not None else data.batch_size or 1


def reason_against(loader: DataLoader[Any]) -> str:
    """Return why a DataLoader's samples cannot be taken by number from its data set; empty: they can."""
    reason = ""
    if loader.batch_size is None or loader.batch_sampler is None:
        reason = "it has a batch_sampler of its own, or none"
    elif loader.collate_fn is not default_collate:
        reason = "it has a collate_fn of its own"
    elif not isinstance(loader.dataset, IterableDataset) and type(loader.sampler) not in (
        SequentialSampler,
        RandomSampler,
    ):
        reason = f"it takes samples by a {type(loader.sampler).__name__}"
    elif isinstance(loader.sampler, RandomSampler) and loader.sampler.replacement:
        reason = "it draws samples with replacement"
    elif not isinstance(loader.dataset, IterableDataset) and len(loader.sampler) != len(loader.dataset):  # type: ignore[arg-type]
        reason = f"its sampler takes {len(loader.sampler)} of {len(loader.dataset)} samples"  # type: ignore[arg-type]
    return reason


def _of_loader(loader: DataLoader[Any]) -> Given:
    """Return a DataLoader's data set, and how it takes samples, where that can be kept exactly."""
    if reason := reason_against(loader):
        raise BadData(
            f"This DataLoader cannot be followed: {reason}. manyhands makes batches itself, so that they can be "
            "shared, prefetched and made again.",
            hint="Give the data set: mh.train(model, loader.dataset, batch_size=...), with what collate_fn did in "
            "__getitem__. If it padded samples to one length: lengths=(32, 64, 128), say, does so.",
        )
    inner = given(loader.dataset)
    return Given(inner.data, loader.batch_size, isinstance(loader.sampler, RandomSampler))


class Collected(Dataset[Any]):
    """The samples of a stream, held in memory."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def collect(stream: Iterable[Any], samples: int | None = None, *, most_bytes: int = MOST_BYTES) -> Collected:
    """Return the first `samples` of a stream, or all of one that ends, as a data set in memory.

    Training takes samples by number: so every epoch can shuffle them, and a run can resume at any step. A stream has no
    numbers, so one pass of it is kept. It must fit: `most_bytes` of tensors.
    """
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        raise BadValue(f"samples is {samples!r}; it must be a whole number of at least 1.")
    collected: list[Any] = []
    total, most = 0, samples if samples is not None else MOST_SAMPLES
    iterator = iter(stream)
    while len(collected) < most:
        try:
            sample = next(iterator)
        except StopIteration:
            break
        except Exception as error:
            raise BadData(
                f"Sample {len(collected)} of the {type(stream).__name__} cannot be read: "
                f"{type(error).__name__}: {error!s:.300}"
            ) from error
        total += _bytes(sample)
        if total > most_bytes:
            raise _too_much(stream, len(collected), f"more than {format_bytes(most_bytes)}", max(1, len(collected)))
        collected.append(sample)
    else:
        if samples is None and next(iterator, None) is not None:
            raise _too_much(stream, len(collected), f"more than {most:,} samples", most)
    if not collected:
        raise BadData(f"The {type(stream).__name__} gave no samples.")
    if samples is not None and len(collected) < samples:
        raise BadData(
            f"The {type(stream).__name__} ended after {len(collected)} samples; {samples} were asked for.",
            hint=f"Write mh.collect(stream, {len(collected)}), or leave out the number.",
        )
    return Collected(collected)


def _too_much(stream: Iterable[Any], count: int, amount: str, fewer: int) -> BadData:
    return BadData(
        f"The {type(stream).__name__} has {amount} ({count:,} were read), or never ends. A stream is kept in memory: "
        "training takes samples by number.",
        hint=f"Take a part of it: mh.collect(stream, {fewer}); or make it map-style, with __len__ and __getitem__.",
    )


class Pairs(Dataset[Any]):
    """A data set whose samples are dicts, or tuples of more than two, as pairs: mh.Pairs(data, "image", "label").

    Several inputs become a dict for the model's arguments: mh.Pairs(data, ["ids", "mask"], "label").
    """

    def __init__(self, data: Any, input: str | int | Sequence[str], target: str | int) -> None:
        self.data, self.input, self.target = data, input, target

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.of(self.data[index])

    def of(self, sample: Any) -> tuple[Any, Any]:
        """Return a sample's input and target, or a batch's."""
        if isinstance(self.input, (list, tuple)):
            return {name: self._part(sample, name) for name in self.input}, self._part(sample, self.target)
        return self._part(sample, self.input), self._part(sample, self.target)  # type: ignore[arg-type]

    @staticmethod
    def _part(sample: Any, name: str | int) -> Any:
        try:
            return sample[name]
        except (KeyError, IndexError, TypeError) as error:
            parts = ", ".join(map(repr, sample)) if isinstance(sample, dict) else f"a {type(sample).__name__}"
            raise BadData(f"there is no {name!r} in it: it has {parts}.") from error


def with_labels(data: Any, names: Collection[str]) -> Any:
    """Return a data set as pairs, for a network that computes its own loss: samples that are inputs alone get a target
    that is empty, and dicts are parted at the first of these names that they have."""
    try:
        sample = data[0]
    except Exception:  # whoever reads the first sample says what is wrong with it
        return data
    if isinstance(sample, dict):
        label = next((name for name in names if name in sample), None)
        rest = [name for name in sample if name != label]
        return Unlabelled(data) if label is None or not rest else Pairs(data, rest, label)
    if isinstance(sample, (tuple, list)):
        return Unlabelled(data) if len(sample) == 1 else data
    return Unlabelled(data)


class Unlabelled(Dataset[Any]):
    """A data set of inputs alone, as pairs with an empty target."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, tuple[()]]:
        sample = self.data[index]
        return (sample[0] if isinstance(sample, (tuple, list)) else sample), ()


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    size = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else len(value) if isinstance(value, (bytes, str)) else 8
