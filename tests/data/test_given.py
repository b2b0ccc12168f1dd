"""Data as torch.utils.data has it: what is taken, how, and what is refused with what to type instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from manyhands.data import given as module
from manyhands.data.given import Pairs, batch_size_of, collect, given
from manyhands.data.loader import example, length
from manyhands.facts.errors import BadData, BadValue


def tensors(samples: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(3.0 * samples).reshape(samples, 3), torch.arange(samples))


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int | None = 6, broken_at: int | None = None) -> None:
        self.samples, self.broken_at = samples, broken_at

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count() if self.samples is None else range(self.samples):
            if number == self.broken_at:
                raise OSError("the line is dead")
            yield torch.full((4,), float(number)), number


class Listed(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


# Map-style


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (tensors(), 10),
        (Subset(tensors(), [7, 8, 9]), 3),
        (ConcatDataset([tensors(4), tensors(3)]), 7),
        (StackDataset(torch.zeros(5, 3), torch.arange(5)), 5),
        ([(torch.zeros(3), 1), (torch.ones(3), 0)], 2),
    ],
    ids=["TensorDataset", "Subset", "ConcatDataset", "StackDataset", "list"],
)
def test_map_style_data_is_taken_as_it_is(data: Any, count: int) -> None:
    found = given(data)
    assert found.data is data
    assert (found.batch_size, found.shuffle) == (None, None)
    assert length(found.data) == count
    inputs, targets = example(found.data, 2)
    assert inputs.shape == (2, 3)
    assert targets.shape == (2,)


# DataLoader


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_gives_its_data_batch_size_and_order(shuffle: bool) -> None:
    data = tensors()
    found = given(DataLoader(data, batch_size=5, shuffle=shuffle))
    assert found.data is data
    assert batch_size_of(found, None) == batch_size_of(found, 5) == 5
    assert found.shuffles(None) is shuffle
    assert found.shuffles(True) is True, "what is said goes before"


def test_a_loader_of_a_stream() -> None:
    found = given(DataLoader(Stream(6), batch_size=3))
    assert length(found.data) == 6
    assert (found.batch_size, found.shuffle) == (3, False)


def test_batch_sizes_must_be_said_once() -> None:
    with pytest.raises(BadValue, match=r"(?s)batch_size is 4; the DataLoader's is 5.*loader\.dataset"):
        batch_size_of(given(DataLoader(tensors(), batch_size=5)), 4)
    with pytest.raises(BadValue, match=r"batch_size=64"):
        batch_size_of(given(tensors()), None)
    assert given(tensors()).shuffles(None) is True


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 2, "collate_fn": list}, "collate_fn"),
        ({"batch_size": None}, "batch_sampler"),
        ({"batch_sampler": [[0, 1], [2, 3]]}, "batch_sampler"),
        ({"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 10, 10)}, "WeightedRandomSampler"),
        ({"batch_size": 2, "sampler": torch.utils.data.RandomSampler([0] * 10, replacement=True)}, "replacement"),
        ({"batch_size": 2, "sampler": torch.utils.data.SequentialSampler(range(3))}, "takes 3 of 10 samples"),
        ({"batch_size": 2, "sampler": torch.utils.data.RandomSampler([0] * 10, num_samples=4)}, "takes 4 of 10"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadData, match=text) as found:
        given(DataLoader(tensors(), **options))
    assert "loader.dataset" in found.value.hint


# Streams


def test_one_pass_of_a_stream_is_kept() -> None:
    found = given(Stream(6)).data
    assert length(found) == 6
    assert example(found, 6)[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert length(given(ChainDataset([Stream(2), Stream(3)])).data) == 5


def test_a_part_of_an_endless_stream_is_asked_for() -> None:
    assert length(collect(Stream(None), 7)) == 7
    assert length(collect(iter([(torch.zeros(1), 0)] * 3))) == 3, "any iterable"


def test_streams_that_are_too_much_end_before_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SAMPLES", 100)
    with pytest.raises(BadData, match=r"(?s)more than 100 samples.*mh\.collect\(stream, 100\)"):
        given(Stream(None))
    assert length(given(Stream(100)).data) == 100, "as many as may be"
    with pytest.raises(BadData, match=r"(?s)more than 200 B.*mh\.collect\(stream, 8\)"):
        collect(Stream(None), most_bytes=200)


@pytest.mark.parametrize(
    ("stream", "samples", "text"),
    [
        (Stream(0), None, "gave no samples"),
        (Stream(3), 5, "ended after 3 samples; 5 were asked for"),
        (Stream(9, broken_at=4), None, "Sample 4 of the Stream cannot be read: OSError: the line is dead"),
    ],
)
def test_bad_streams(stream: Any, samples: int | None, text: str) -> None:
    with pytest.raises(BadData, match=text):
        collect(stream, samples)


@pytest.mark.parametrize("samples", [0, True, 2.5])
def test_bad_numbers_of_samples(samples: Any) -> None:
    with pytest.raises(BadValue, match="at least 1"):
        collect(Stream(3), samples)


# What samples are


def test_dicts_are_refused_with_what_to_type_and_pairs_mend_them() -> None:
    data = Listed([{"image": torch.zeros(3), "label": 1}] * 4)
    with pytest.raises(BadData, match=r"(?s)a dict of 'image', 'label'.*mh\.Pairs\(data, 'image', 'label'\)"):
        example(data, 2)
    inputs, targets = example(Pairs(data, "image", "label"), 2)
    assert inputs.shape == (2, 3)
    assert targets.tolist() == [1, 1]


def test_pairs_of_several_inputs_and_of_tuples() -> None:
    data = Listed([{"ids": torch.zeros(3), "mask": torch.ones(3), "label": 1}] * 4)
    inputs, _ = example(Pairs(data, ["ids", "mask"], "label"), 2)
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {"ids": (2, 3), "mask": (2, 3)}
    triples = Listed([(torch.zeros(3), "a.png", 2)] * 4)
    with pytest.raises(BadData, match=r"(?s)3 parts.*mh\.Pairs\(data, 0, 2\)"):
        example(triples, 2)
    assert example(Pairs(triples, 0, 2), 2)[1].tolist() == [2, 2]
    with pytest.raises(BadData, match=r"Sample 0: there is no 'labels' in it: it has 'ids', 'mask', 'label'"):
        example(Pairs(data, "ids", "labels"), 2)


def test_pictures_that_are_no_tensors_name_the_transform() -> None:
    image = pytest.importorskip("PIL.Image")
    data = Listed([(image.fromarray(numpy.zeros((4, 4, 3), numpy.uint8)), 1)] * 4)
    with pytest.raises(BadData, match=r"(?s)is a picture \(Image\), not a tensor.*ToTensor\(\)"):
        example(data, 2)
