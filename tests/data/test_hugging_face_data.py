"""Hugging Face's data sets: by number and as a stream, with labels found as models with their own loss have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manyhands.data.batch_stream import as_stream
from manyhands.data.given import Pairs, given, with_labels
from manyhands.data.loader import example
from manyhands.graph.own_loss import LABELS

datasets = pytest.importorskip("datasets")


def rows() -> Iterator[dict[str, Any]]:
    for number in range(12):
        yield {"input_ids": [number, number + 1, 7], "labels": number % 3}


def test_a_data_set_by_number_is_taken_as_any_other() -> None:
    data = datasets.Dataset.from_list(list(rows())).with_format("torch")
    assert as_stream(data, 4, LABELS) is None
    inputs, labels = example(with_labels(given(data).data, LABELS), 4)
    assert inputs["input_ids"].tolist() == [[number, number + 1, 7] for number in range(4)]
    assert labels.tolist() == [0, 1, 2, 0]
    inputs, labels = example(Pairs(data, "input_ids", "labels"), 2)
    assert inputs.shape == (2, 3)


def test_a_stream_is_read_as_it_comes_and_shuffled_anew_in_each_epoch() -> None:
    data = datasets.IterableDataset.from_generator(rows).with_format("torch")
    stream = as_stream(data, 4, LABELS)
    assert stream is not None
    assert stream.batches_per_epoch is None
    taken = [stream.take() for _ in range(6)]
    assert [labels.tolist() for _, _, labels in taken[:2]] == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert isinstance(taken[0][1]["input_ids"], torch.Tensor)
    assert stream.epoch_of(5) == 1
    shuffled = as_stream(data.shuffle(seed=3, buffer_size=12), 4, LABELS)
    assert shuffled is not None
    epochs = [[tuple(shuffled.take()[1]["input_ids"][:, 0].tolist()) for _ in range(3)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(sum(epochs[0], ())) == sorted(sum(epochs[1], ())) == list(range(12))


def test_pairs_of_a_stream() -> None:
    data = datasets.IterableDataset.from_generator(rows).with_format("torch")
    stream = as_stream(Pairs(data, "input_ids", "labels"), 4)
    assert stream is not None
    _, inputs, labels = stream.take()
    assert inputs.shape == (4, 3)
    assert labels.tolist() == [0, 1, 2, 0]
