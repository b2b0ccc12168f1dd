"""All samples of a data set in one batch, and the same data set by numbers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from manyhands.data import preload
from manyhands.data.loader import Prefetcher
from manyhands.data.order import BatchOrder
from manyhands.data.preload import Numbered, Preload
from manyhands.facts.errors import BadData


class Drawn(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"left": torch.full((2, 3), float(index)), "right": (torch.tensor(index), index)}, index % 3


def test_every_sample_is_there_in_order() -> None:
    found = Preload.of(Drawn())
    assert found.count == 10
    assert found.inputs["left"].shape == (10, 2, 3)
    assert found.inputs["left"][:, 0, 0].tolist() == found.inputs["right"][1].tolist() == list(range(10))
    assert found.targets.tolist() == [index % 3 for index in range(10)]
    assert found.key != Preload.of(Drawn()).key, "another reading may give other samples"


def test_numbers_come_in_the_structure_of_samples() -> None:
    order = BatchOrder(10, 4, True, 7)
    with Prefetcher(Drawn(), order, 0, 5) as real, Prefetcher(Numbered(Drawn()), order, 0, 5) as numbered:
        for (step, inputs, targets), (same, rows, numbers) in zip(real, numbered, strict=True):
            assert step == same
            wanted = inputs["right"][0].tolist()
            assert rows["left"].tolist() == rows["right"][0].tolist() == numbers.tolist() == wanted
            assert targets.tolist() == [one % 3 for one in wanted]
    inputs, targets = Preload.of(Drawn()).numbers()
    assert inputs["left"].tolist() == targets.tolist() == list(range(10))


def test_numbered_samples_end() -> None:
    assert len(Numbered(Drawn())) == 10
    with pytest.raises(IndexError):
        Numbered(Drawn())[10]


def test_what_does_not_fit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload.psutil, "virtual_memory", lambda: SimpleNamespace(available=300))
    with pytest.raises(BadData, match=r"All 10 samples take .*150 B may be used") as raised:
        Preload.of(Drawn())
    assert "--feed start" in raised.value.hint
