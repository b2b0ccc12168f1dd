"""Prompts as lists of tokens, whatever they are given as."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.facts.errors import BadData
from manyhands.inference.prompts import prompts_of


@pytest.mark.parametrize(
    "given", [[3, 4], [[3, 4]], torch.tensor([3, 4]), torch.tensor([[3, 4]]), ([3, 4],), torch.tensor([[3, 4]]).numpy()]
)
def test_one_prompt(given: Any) -> None:
    assert prompts_of(given) == [[3, 4]]


def test_several_of_unequal_lengths() -> None:
    assert prompts_of([[1], [2, 3], torch.tensor([4, 5, 6])]) == [[1], [2, 3], [4, 5, 6]]


def test_padding_on_either_side_is_left_out() -> None:
    tokens, mask = torch.tensor([[0, 0, 7], [8, 9, 0]]), torch.tensor([[0, 0, 1], [1, 1, 0]])
    assert prompts_of(tokens, mask) == [[7], [8, 9]]


@pytest.mark.parametrize(
    ("given", "mask", "words"),
    [
        ([], None, "There are no prompts"),
        ([[1], []], None, "Prompt 1 has no tokens"),
        (torch.ones(2, 2, dtype=torch.int64), torch.tensor([[1, 1], [0, 0]]), "Prompt 1 has no tokens"),
        (torch.zeros(2, 2), None, r"float32 \[2, 2\]"),
        (torch.zeros(1, 2, 2, dtype=torch.int64), None, r"int64 \[1, 2, 2\]"),
        ([[1, 2]], [[1]], "shape of input_ids"),
        ("text", None, "is a str|holds no rows"),
        (5, None, "holds no rows"),
    ],
)
def test_what_is_no_prompt_is_refused(given: Any, mask: Any, words: str) -> None:
    with pytest.raises(BadData, match=words):
        prompts_of(given, mask)
