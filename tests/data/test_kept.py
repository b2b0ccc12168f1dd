"""Batches that come only once: each is the same whenever it is taken again, from memory or from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.kept import KeptBatches
from manyhands.facts.errors import BadFile


def batch_of(step: int) -> Any:
    """Return a batch with whatever nests: views of one storage, several types, and what is no tensor."""
    base = torch.arange(12.0, dtype=torch.float64).reshape(3, 4) + step
    return {"x": base.t(), "y": [base[0], (torch.tensor(step), None)], "mask": base > 4}, ("name", step)


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.safetensors"))


@pytest.mark.slow
@given(st.integers(0, 2000), st.lists(st.integers(0, 3), max_size=12))
def test_every_batch_is_what_it_was_whatever_was_spilled_and_forgotten(most_bytes: int, forgets: list[int]) -> None:
    with KeptBatches(most_bytes=most_bytes) as kept:
        forgotten = 0
        for step, more in enumerate(forgets):
            kept.add(step, batch_of(step))
            forgotten = min(step, forgotten + more)
            kept.forget_before(forgotten)
            assert kept.steps == tuple(range(forgotten, step + 1))
            newest_bytes = 12 * 8 + 4 * 8 + 8 + 12
            assert kept.bytes_in_memory <= max(most_bytes, newest_bytes)
            for again, batch in kept.from_step(forgotten):
                assert is_equal(batch, batch_of(again))


def test_files_are_in_the_folder_and_go_when_the_batches_are_safe(tmp_path: Path) -> None:
    kept = KeptBatches(tmp_path / "run", most_bytes=0)
    assert not (tmp_path / "run").exists(), "no folder before it is needed"
    for step in range(4):
        kept.add(step, batch_of(step))
    assert files(tmp_path) == ["step-000000.safetensors", "step-000001.safetensors", "step-000002.safetensors"]
    assert kept.spilled == 3
    kept.forget_before(2)
    assert files(tmp_path) == ["step-000002.safetensors"]
    kept.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_what_no_file_can_hold_stays_in_memory(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    with KeptBatches(tmp_path, most_bytes=0) as kept:
        kept.add(0, (sparse, torch.ones(2)))
        kept.add(1, torch.ones(2))
        again = kept.at(0)
        assert kept.spilled == 1
        assert again[0] is sparse
        assert torch.equal(again[1], torch.ones(2))


def test_a_file_that_is_damaged_is_an_error_not_another_batch(tmp_path: Path) -> None:
    with KeptBatches(tmp_path, most_bytes=0) as kept:
        for step in range(2):
            kept.add(step, batch_of(step))
        next(tmp_path.rglob("*.safetensors")).write_bytes(b"short")
        with pytest.raises(BadFile, match=r"(?s)cannot be read.*last checkpoint"):
            kept.at(0)
