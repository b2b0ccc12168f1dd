"""Projections of rows of numbers on a GPU (projections.py): formed there, and fetched as one number each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from manyhands.executor.projections import COLUMNS, column_factors, row_factors, salt

_BLOCK = 2**12
"""Rows that are worked on at once: their copies in float64 take 16 MB."""


def projected(groups: Sequence[Sequence[torch.Tensor]]) -> list[tuple[float | None, float]]:
    """Return for each group of rows laid end to end their projection and their Euclidean norm; (None, 0) where not all
    of their numbers are finite."""
    totals = []
    for parts in groups:
        device = parts[0].device if parts else torch.device("cpu")
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for place, part in enumerate(parts):
            of_row, squares = _of_row(part.detach())
            total += torch.stack((salt(place) * of_row, squares))
        totals.append(total)
    if not totals:
        return []
    fetched = torch.stack(totals).tolist()
    return [
        (total, math.sqrt(squares)) if math.isfinite(total) and math.isfinite(squares) else (None, 0.0)
        for total, squares in fetched
    ]


def _of_row(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the projection and the sum of squares of one row."""
    flat = part.reshape(-1)
    total, squares = (torch.zeros((), dtype=torch.float64, device=flat.device) for _ in range(2))
    count = flat.numel() // COLUMNS
    columns, rows = _factors(flat.device, max(10, count.bit_length()))
    for first in range(0, count, _BLOCK):
        last = min(first + _BLOCK, count)
        block = flat[first * COLUMNS : last * COLUMNS].view(last - first, COLUMNS).double()
        total += (block @ columns) @ rows[first:last]
        squares += block.square().sum()
    tail = flat[count * COLUMNS :].double()
    if tail.numel():
        total += (tail @ columns[: tail.numel()]) * rows[count]
        squares += tail.square().sum()
    return total, squares


@lru_cache(maxsize=8)
def _factors(device: torch.device, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a row's columns, and of up to 2^bits rows."""
    columns, rows = column_factors("d"), row_factors(2**bits)
    return torch.from_numpy(columns.copy()).to(device), torch.from_numpy(rows.copy()).to(device)
