"""Boxes from YOLOv2's map, and the mean average precision of known boxes, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.facts.errors import BadValue
from manyhands.models.detections import Detections, MeanAveragePrecision, detections
from manyhands.models.yolov2 import VOC_ANCHORS

A, B, C = (0.25, 0.25, 0.2, 0.2), (0.75, 0.25, 0.2, 0.2), (0.5, 0.75, 0.3, 0.2)
NEAR_A = (0.27, 0.25, 0.2, 0.2)
"""It overlaps A by 0.18/0.22."""
FAR = (0.1, 0.9, 0.1, 0.1)


def detected(*rows: tuple[int, float, tuple[float, ...]]) -> Detections:
    classes, scores, boxes = zip(*rows)
    return Detections(torch.tensor(classes), torch.tensor(scores).double(), torch.tensor(boxes).double())


def target(*rows: tuple[int, tuple[float, ...]]) -> Tensor:
    """With a row of zeros, as data sets fill up."""
    return torch.tensor([*((float(name), *box) for name, box in rows), (0.0,) * 5])


def test_of_known_boxes() -> None:
    """Class 0 has three boxes. By score: right, a second one at the same box, right, wrong; the third box is missed.

    Precision is 1, 1/2, 2/3 and 1/2 at recalls of 1/3, 1/3, 2/3 and 2/3: the area is 1/3 * 1 + 1/3 * 2/3. Class 1 has
    one box, of which nothing is detected.
    """
    metric = MeanAveragePrecision()
    metric.add(
        detected((0, 0.9, A), (0, 0.8, NEAR_A), (0, 0.7, B), (0, 0.6, FAR)), target((0, A), (0, B), (0, C), (1, C))
    )
    assert metric.compute() == pytest.approx((1 / 3 + 2 / 9) / 2, rel=1e-12)


def test_over_several_pictures_by_score() -> None:
    """The wrong one of the second picture comes between the two right ones: precision 1, 1/2, 2/3 at 1/2, 1/2, 1."""
    metric = MeanAveragePrecision()
    metric.add(detected((0, 0.9, A), (0, 0.3, B)), target((0, A), (0, B)))
    metric.add(detected((0, 0.5, FAR)), target())
    assert metric.compute() == pytest.approx(1 / 2 + 1 / 2 * 2 / 3, rel=1e-12)
    metric.reset()
    assert math.isnan(metric.compute())


@pytest.mark.parametrize(("least", "expected"), [(0.8, 1.0), (0.82, 0.0)])
def test_the_least_overlap_decides(least: float, expected: float) -> None:
    metric = MeanAveragePrecision(least_overlap=least)
    metric.add(detected((2, 0.9, NEAR_A)), target((2, A)))
    assert metric.compute() == expected


def test_a_class_is_right_only_for_its_own_boxes() -> None:
    metric = MeanAveragePrecision()
    metric.add(detected((1, 0.9, A)), target((0, A)))
    assert metric.compute() == 0.0
    with pytest.raises(BadValue, match="least_overlap is 0"):
        MeanAveragePrecision(least_overlap=0)


def drawn_map(boxes: list[tuple[int, int, int, int]], classes: int = 3, side: int = 4) -> Tensor:
    """A map that is sure of one box for each (row, column, anchor, class), and of nothing else."""
    output = torch.full((1, len(VOC_ANCHORS), 5 + classes, side, side), 0.0, dtype=torch.float64)
    output[:, :, 4] = -20.0
    for row, column, anchor, name in boxes:
        output[0, anchor, 4, row, column] = 20.0
        output[0, anchor, 5 + name, row, column] = 30.0
    return output.flatten(1, 2)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 2)), max_size=4,
        unique_by=lambda box: box[:3],
    )
)  # fmt: skip
def test_the_boxes_of_a_map_are_where_it_is_sure(boxes: list[tuple[int, int, int, int]]) -> None:
    """Centres are those of cells, sizes those of anchors; what covers another of its class leaves one of them."""
    (found,) = detections(drawn_map(boxes), least_score=0.5)
    expected = {
        (name, (column + 0.5) / 4, (row + 0.5) / 4, VOC_ANCHORS[anchor][0] / 4, VOC_ANCHORS[anchor][1] / 4)
        for row, column, anchor, name in boxes
    }
    rows = {(name, *box) for name, box in zip(found.classes.tolist(), map(tuple, found.boxes.tolist()))}
    assert all(any(row == pytest.approx(other, rel=1e-6) for other in expected) for row in rows)
    if len({name for *_, name in boxes}) == len(boxes):
        assert len(rows) == len(boxes)
    metric = MeanAveragePrecision()
    metric.update(drawn_map(boxes), torch.tensor([[*map(list, sorted(rows)), [0.0] * 5]]))
    assert metric.compute() == pytest.approx(1.0) if rows else math.isnan(metric.compute())
