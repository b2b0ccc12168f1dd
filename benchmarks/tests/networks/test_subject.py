"""Subjects: what of an output the loss reads, and which batch a module takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.facts.errors import BadValue
from manyhands_bench.networks.subject import (
    NotBuilt,
    call,
    first_that_runs,
    images,
    in_float64,
    main_output,
    squared_error,
)


def test_the_main_output() -> None:
    a, b, count = torch.ones(2), torch.zeros(2), torch.ones(2, dtype=torch.int64)
    assert main_output(a) is a
    assert main_output((count, a, b)) is a
    assert main_output({"aux": b, "out": a}) is a
    assert main_output({"state": a, "count": count}) is a
    with pytest.raises(BadValue, match="dict"):
        main_output({"count": count})
    assert squared_error({"logits": a}, b) == 1


def test_the_first_batch_that_runs() -> None:
    module = nn.Sequential(nn.Conv2d(3, 2, 5), nn.Flatten(), nn.Linear(2 * 4 * 4, 1))
    batch = first_that_runs(module, [images(3, 4, 4), images(3, 8, 8), images(3, 9, 9)])
    assert batch(5).shape == (5, 3, 8, 8)
    with pytest.raises(NotBuilt, match="2 input sizes"):
        first_that_runs(module, [images(3, 4, 4), images(3, 9, 9)])


def test_calls() -> None:
    module = nn.Bilinear(2, 3, 1)
    pair = (torch.ones(4, 2), torch.ones(4, 3))
    assert torch.equal(call(module, pair), call(module, {"input1": pair[0], "input2": pair[1]}))
    assert torch.equal(call(nn.Flatten(), pair[0]), pair[0])
    changed = in_float64({"x": pair[0], "n": torch.ones(1, dtype=torch.int64)})
    assert [tensor.dtype for tensor in changed.values()] == [torch.float64, torch.int64]
