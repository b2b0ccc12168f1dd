"""Samples of different lengths: what is padded, with what, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import manyhands as mh
from manyhands.data.loader import example
from manyhands.data.padding import MOST_LENGTHS, Padded, measured, wanted_lengths
from manyhands.facts.errors import BadData, BadValue


def padded(data: Sequence[Any], lengths: Any = (4, 8), pad: Any = None, to: int = 8) -> tuple[Any, Any]:
    padding, _ = measured(data, wanted_lengths(lengths, pad))
    return example(Padded(data, padding, to), len(data))


def text(count: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": list(range(1, count + 1)), "attention_mask": [1] * count, **more}


@pytest.mark.slow
@given(st.lists(st.integers(1, 8), min_size=2, max_size=12), st.integers(8, 11))
def test_samples_as_they_were_and_then_padding(lengths: list[int], to: int) -> None:
    data = [(torch.arange(1, length + 1), torch.full((length,), 7)) for length in lengths]
    padding, found = measured(data, wanted_lengths((to,), None))
    assert found.tolist() == lengths
    words, labels = example(Padded(data, padding, to), len(data))
    assert words.shape == labels.shape == (len(lengths), to)
    for row, length in enumerate(lengths):
        assert words[row].tolist() == [*range(1, length + 1), *[0] * (to - length)]
        assert labels[row].tolist() == [7] * length + [-100] * (to - length)


def test_lists_of_numbers_by_name_as_a_tokenizer_returns_them() -> None:
    data = mh.Pairs([text(3, labels=[5, 6, 7]), text(5, labels=[1] * 5)], ["input_ids", "attention_mask"], "labels")
    inputs, labels = padded(data, pad={"input_ids": 99})  # type: ignore[arg-type]
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 99, 99, 99, 99, 99], [1, 2, 3, 4, 5, 99, 99, 99]]
    assert inputs["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] * 5 + [0] * 3]
    assert labels.tolist() == [[5, 6, 7] + [-100] * 5, [1] * 5 + [-100] * 3]


def test_what_does_not_grow_with_the_sample_stays() -> None:
    """A class, features of each position, and a matrix over the positions."""
    data = [(torch.ones(n, 3), torch.ones(n, n), torch.ones(4)) for n in (4, 6)]
    (features, pairs, fixed), classes = padded([(sample, place) for place, sample in enumerate(data)])
    assert features.shape == (2, 8, 3)
    assert pairs.shape == (2, 8, 8)
    assert pairs[0].sum() == 16
    assert fixed.shape == (2, 4)
    assert classes.tolist() == [0, 1]


def test_a_width_that_all_samples_share_is_no_length() -> None:
    features, _ = padded([(numpy.ones((4, 4), "float32"), 0)] * 3)
    assert features.shape == (3, 8, 4)


@pytest.mark.parametrize(
    ("lengths", "pad", "message"),
    [
        ((), None, "lengths is"),
        ((0, 4), None, "whole numbers of at least 1"),
        ("32", None, "whole numbers of at least 1"),
        (32, None, ""),
        ((True,), None, "whole numbers of at least 1"),
        (range(1, 100), None, f"at most {MOST_LENGTHS}"),
        ((4,), {"input_ids": "x"}, "names and numbers"),
    ],
)
def test_what_lengths_may_be(lengths: Any, pad: Any, message: str) -> None:
    if not message:
        assert wanted_lengths(lengths, pad).lengths == (lengths,)
        return
    with pytest.raises(BadValue, match=message) as caught:
        wanted_lengths(lengths, pad)
    assert caught.value.hint


def test_a_sample_that_is_too_long_is_named() -> None:
    data = [(torch.ones(n), 0) for n in (3, 9, 4, 12)]
    with pytest.raises(BadData, match=r"Sample 1 has a length of 9; the longest of lengths is 8 \(1 more is too long; "
                                      r"the longest has 12\)") as caught:  # fmt: skip
        padded(data)
    assert caught.value.hint == "Write lengths=(4, 8, 12), or cut samples to 8 in __getitem__."


def test_what_cannot_be_padded_is_refused() -> None:
    with pytest.raises(BadValue, match="pad names 'ids'; a sample has attention_mask, input_ids, target"):
        padded([(text(3), [1, 2, 3])], pad={"ids": 0})
    with pytest.raises(BadData, match="'target' is uint8, which cannot hold the -100"):
        padded([(torch.ones(n), torch.ones(n, dtype=torch.uint8)) for n in (3, 4)])
    with pytest.raises(BadData, match="Sample 1 is empty"):
        padded([(torch.ones(3), 0), (torch.ones(0), 0)])
    with pytest.raises(BadData, match="has no length"):
        padded([(1.0, 0)])
    with pytest.raises(BadData, match=r"cannot hold the 0\.5"):
        padded([(text(3), 0), (text(4), 0)], pad={"input_ids": 0.5})
