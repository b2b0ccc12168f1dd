"""Prompts as lists of tokens: from a tensor with or without a mask of its padding, or from lists of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from manyhands.facts.errors import BadData

Prompts = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]


def prompts_of(input_ids: Prompts, attention_mask: Any = None) -> list[list[int]]:
    """Return each prompt's tokens, without padding. One prompt may be given without an axis for several."""
    rows = _rows(input_ids)
    if attention_mask is not None:
        masks = _rows(attention_mask)
        if [len(row) for row in rows] != [len(mask) for mask in masks]:
            raise BadData("attention_mask must have the shape of input_ids.")
        rows = [[token for token, is_token in zip(row, mask) if is_token] for row, mask in zip(rows, masks)]
    if not rows or not all(rows):
        raise BadData(
            "There are no prompts."
            if not rows
            else f"Prompt {[bool(row) for row in rows].index(False)} has no tokens.",
            hint="Give one token at least, like that which begins a text.",
        )
    return rows


def _rows(values: Any) -> list[list[int]]:
    if hasattr(values, "__array__"):
        tensor = torch.as_tensor(values)
        if tensor.dim() not in (1, 2) or tensor.is_floating_point() or tensor.is_complex():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise BadData(f"The prompts are {kind} {list(tensor.shape)}; they must be whole numbers, one row a prompt.")
        rows: list[list[int]] = tensor.reshape(-1, tensor.shape[-1]).tolist()
        return rows
    try:
        several = list(values)
        is_one = bool(several) and not hasattr(several[0], "__len__")
        return [[int(token) for token in row] for row in ([several] if is_one else several)]
    except (TypeError, ValueError) as error:
        raise BadData(
            f"The prompts are a {type(values).__name__} that holds no rows of tokens: {error}.",
            hint="Give a tensor of token numbers, or lists of them.",
        ) from None
