"""Calibration: searches against what is known, real short trainings, the time limit, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from manyhands.facts.calibration import UNPACKED, WIDTHS, Calibration
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.split import calibration as calibrating
from manyhands.split import stored_calibration
from manyhands.split.calibration import KS, CalibrationSet, CalibrationSettings, calibrate
from manyhands.split.stored_calibration import calibrated, calibration_path, find_calibration

SGD = Optimizer("SGD", lr=0.1, momentum=0.9)


class Layers(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.b = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.c = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.d = nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.d(self.c(self.b(self.a(x))))
        return found


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 0.5).long())


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    target = torch.zeros(4, dtype=torch.int64)
    return capture(Layers(), torch.randn(4, 6), loss=F.cross_entropy, target=target, name="layers")


@pytest.fixture(scope="module")
def sets(graph: Graph) -> tuple[CalibrationSet, CalibrationSet]:
    return CalibrationSet.of(graph, samples(256, 0), 256), CalibrationSet.of(graph, samples(200, 1), 128)


@pytest.mark.slow
def test_samples_are_drawn(graph: Graph, sets: tuple[CalibrationSet, CalibrationSet]) -> None:
    test = sets[1]
    assert test.count == 128
    data = samples(200, 1)
    known = {tuple(row.tolist()): int(label) for row, label in zip(*data.tensors)}
    for inputs, targets in test.batches(50):
        (x,), (y,) = inputs.values(), targets.values()
        assert all(known[tuple(row.tolist())] == int(label) for row, label in zip(x, y))
    assert sum(len(next(iter(inputs.values()))) for inputs, _ in test.batches(50)) == 128
    first = [next(iter(CalibrationSet.of(graph, data, 10, seed).inputs.values())) for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


@pytest.mark.slow
def test_a_real_calibration(graph: Graph, sets: tuple[CalibrationSet, CalibrationSet]) -> None:
    said: list[str] = []
    found = calibrate(
        graph, *sets, SGD, batch_size=32, steps=80, repeats=1, allowed_drop=0.05, ks=(1, 4), say=said.append
    )
    assert found.is_complete
    assert found.measure == "accuracy"
    assert found.reference > 0.7
    assert list(found.least_bits) == [1, 2, 3]
    assert max(found.least_bits.values()) <= 8, "eight bits are enough for this"
    assert found.later_k >= found.k >= 1
    assert len(found.norms) == 81
    assert 0 < max(abs(after - before) / before for before, after in pairwise(found.norms)) < 0.5
    assert found.phases(3) in (((0, found.k),), ((0, found.k), (3, found.later_k)))
    assert any("accuracy" in text for text in said)
    for one in found.tried:
        mean = sum(one.scores) / len(one.scores) if one.scores else 0.0
        if not one.later:
            assert one.is_enough == (mean >= found.reference - 0.05 - found.spread)


@pytest.mark.slow
def test_losses_where_there_are_no_classes() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    data = TensorDataset(x, x[:, :2].abs())
    graph = capture(Layers(2), x[:4], loss=F.mse_loss, target=torch.zeros(4, 2), name="numbers")
    own = CalibrationSet.of(graph, data, 64)
    found = calibrate(
        graph, own, own, Optimizer("Adam", lr=0.01), batch_size=16, steps=30, repeats=1, allowed_drop=0.2, cuts=[2],
        ks=(1,),
    )  # fmt: skip
    assert found.measure == "loss"
    assert list(found.least_bits) == [2]
    assert all(one.is_enough == (one.scores[0] <= 1.2 * found.reference) for one in found.tried if not one.later)


@pytest.mark.quick(every=15)
@pytest.mark.parametrize("need", [*WIDTHS, UNPACKED])
@pytest.mark.parametrize("most", [0, *KS, 100])
def test_searches_find_what_is_so(
    graph: Graph, sets: tuple[CalibrationSet, CalibrationSet], monkeypatch: pytest.MonkeyPatch, need: int, most: int
) -> None:
    def is_enough(self: Any, cut: int, k: int, bits: int, *, later: bool = False) -> bool:
        return (bits >= need or bits == UNPACKED) and k <= most

    monkeypatch.setattr(calibrating._Trials, "is_enough", is_enough)
    monkeypatch.setattr(calibrating._Trials, "reference", lambda self, later=False: (0.9, 0.0))
    monkeypatch.setattr(calibrating._Trials, "limits", {False: 0.0}, raising=False)
    monkeypatch.setattr(calibrating, "_TIMED_STEPS", 1)
    trials = calibrating._Trials(graph, *sets, None, SGD, CalibrationSettings(), 1.0)  # type: ignore[arg-type]
    assert trials.fewest_bits(1, 0) == need
    assert trials.largest_k(1, KS, later=False) == max((k for k in KS if k <= most), default=0)


def ticking(seconds: float) -> Iterator[float]:
    return (number * seconds for number in count())


def test_time_is_limited(graph: Graph, sets: tuple[CalibrationSet, CalibrationSet]) -> None:
    """A clock that goes on by a second at every look: there is time for the first settings only."""
    clock = ticking(1.0)
    found = calibrate(
        graph, *sets, SGD, batch_size=32, steps=4, repeats=1, seconds=22.0, ks=(1,), clock=lambda: next(clock)
    )
    assert not found.is_complete
    assert list(found.least_bits) == [1, 2, 3]
    tried = {one.cut for one in found.tried if one.bits < UNPACKED}
    assert tried < {1, 2, 3}
    assert found.steps == 4


def test_a_cut_that_was_not_reached_needs_what_its_neighbours_need() -> None:
    assert calibrating._far_apart([1, 2, 5, 6, 9]) == [1, 9, 5, 2, 6]
    assert calibrating._far_apart([4]) == [4]
    assert sorted(calibrating._far_apart(range(1, 20))) == list(range(1, 20))
    found = {1: 4, 9: 16, 5: 2}
    assert [calibrating._by_neighbours(cut, found) for cut in (2, 6, 12)] == [4, 16, 16]
    assert calibrating._by_neighbours(3, {}) == UNPACKED


def test_it_is_done_once(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, Any] = {"batch_size": 32, "data": "drawn/../samples", "folder": tmp_path}
    few: dict[str, Any] = {"steps": 5, "repeats": 1, "cuts": [2], "ks": (1,)}
    assert find_calibration(graph.network, "drawn/../samples", 32, folder=tmp_path) is None
    first = calibrated(graph, samples(64, 0), None, SGD, **words, **few)
    path = calibration_path(graph.network, "drawn/../samples", 32, tmp_path)
    assert [one.resolve() for one in tmp_path.iterdir()] == [path.resolve()]
    monkeypatch.setattr(stored_calibration, "calibrate", None)
    assert calibrated(graph, samples(64, 0), None, SGD, **words) == first
    assert find_calibration(graph.network, "other", 32, folder=tmp_path) is None
    assert find_calibration(graph.network, "drawn/../samples", 16, folder=tmp_path) is None
    for text, told in (("{}", "is not a calibration"), ('{"version": 9}', "has version 9"), ("[", "line 1")):
        path.write_text(text)
        with pytest.raises(BadFile, match=told):
            calibrated(graph, samples(64, 0), None, SGD, **words)


def test_wrong_words(graph: Graph, sets: tuple[CalibrationSet, CalibrationSet]) -> None:
    for wrong in ({"allowed_drop": 1.0}, {"seconds": 0.0}, {"repeats": 0}, {"steps": 0}, {"ks": (2, 1)}):
        with pytest.raises(BadValue, match="A calibration with"):
            calibrate(graph, *sets, SGD, batch_size=8, **wrong)  # type: ignore[arg-type]
    for cuts in ([], [0], [4]):
        with pytest.raises(BadValue, match="cannot be cut"):
            calibrate(graph, *sets, SGD, batch_size=8, cuts=cuts)
    with pytest.raises(BadValue, match="does not train"):
        calibrate(graph, *sets, Optimizer("SGD", lr=1e30), batch_size=8, steps=5, repeats=1)


def test_wrong_calibrations() -> None:
    facts: dict[str, Any] = {
        "network": "n", "fingerprint": "", "data": "d", "batch_size": 1, "optimizer": "", "allowed_drop": 0.1,
        "measure": "loss", "reference": 1.0, "spread": 0.0, "steps": 1, "repeats": 1, "bits": {"1": 8}, "k": 1,
        "later_k": 1,
    }  # fmt: skip
    assert Calibration(**facts).least_bits == {1: 8}
    for wrong in ({"bits": {"x": 8}}, {"bits": {"1": 3}}, {"k": -1}):
        with pytest.raises(BadValue):
            Calibration(**{**facts, **wrong})
