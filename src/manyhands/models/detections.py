"""Boxes from a detector's map, and how good they are: the mean average precision of Pascal VOC.

A box is (centre x, centre y, width, height), as fractions of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyhands.facts.errors import BadValue
from manyhands.models.yolov2 import VOC_ANCHORS, intersection_over_union

LEAST_SCORE = 0.005
"""Fainter detections are left out: they come after all others, and hardly count."""
MOST_OVERLAP = 0.45
"""Of two boxes of one class that overlap more than this, the fainter is left out."""


class Detections(NamedTuple):
    """The boxes found in one picture."""

    classes: Tensor
    scores: Tensor
    boxes: Tensor


def detections(
    output: Tensor, anchors: Sequence[tuple[float, float]] = VOC_ANCHORS, *, least_score: float = LEAST_SCORE
) -> list[Detections]:
    """Return the boxes of every picture in a batch, for the map that `yolov2.region_loss` takes."""
    height, width = output.shape[2], output.shape[3]
    predicted = torch.unflatten(output.double(), 1, (len(anchors), output.shape[1] // len(anchors)))
    predicted = predicted.permute(0, 1, 3, 4, 2).flatten(1, 3)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    corners = torch.stack((columns, rows), dim=-1).reshape(-1, 2).repeat(len(anchors), 1)
    sizes = torch.tensor(anchors, dtype=torch.float64).repeat_interleave(height * width, dim=0)
    grid = torch.tensor([width, height], dtype=torch.float64)
    centres = (predicted[..., :2].sigmoid() + corners) / grid
    shapes = predicted[..., 2:4].clamp(max=8).exp() * sizes / grid
    boxes = torch.cat((centres, shapes), dim=-1)
    scores = predicted[..., 4:5].sigmoid() * predicted[..., 5:].softmax(dim=-1)
    return [_strongest(boxes[place], scores[place], least_score) for place in range(len(output))]


def _strongest(boxes: Tensor, scores: Tensor, least_score: float) -> Detections:
    """Return the boxes of one picture, the strongest first, without those that a stronger one of its class covers."""
    places, classes = (scores > least_score).nonzero(as_tuple=True)
    order = scores[places, classes].argsort(descending=True, stable=True)
    places, classes = places[order], classes[order]
    overlaps = intersection_over_union(boxes[places].unsqueeze(1), boxes[places].unsqueeze(0))
    is_covering = (overlaps > MOST_OVERLAP) & (classes.unsqueeze(1) == classes.unsqueeze(0))
    kept: list[int] = []
    for place in range(len(places)):
        if not bool(is_covering[place, kept].any()):
            kept.append(place)
    return Detections(classes[kept], scores[places[kept], classes[kept]], boxes[places[kept]])


class MeanAveragePrecision:
    """A metric for `mh.train(metrics=...)`: the area under precision over recall, a mean over all classes.

    A detection is right if it overlaps a box of its class by at least `least_overlap`, and no stronger one has taken
    that box. As Pascal VOC since 2010: at every recall counts the best precision at this or a higher one. Predictions
    are YOLOv2's maps; targets are rows of class and box, in which zeros fill up.
    """

    def __init__(self, anchors: Sequence[tuple[float, float]] = VOC_ANCHORS, *, least_overlap: float = 0.5) -> None:
        if not 0 < least_overlap <= 1:
            raise BadValue(f"least_overlap is {least_overlap!r}; it must be more than 0 and at most 1.")
        self.anchors, self.least_overlap = anchors, least_overlap
        self.reset()

    def reset(self) -> None:
        """Forget all pictures."""
        self._boxes: dict[int, int] = {}
        """Class -> boxes there are."""
        self._detected: dict[int, list[tuple[float, bool]]] = {}
        """Class -> score of every detection, and whether it is right."""

    def update(self, predictions: Any, targets: Any) -> None:
        """Add a batch: a map of predictions, and the boxes there are."""
        for detected, target in zip(detections(predictions, self.anchors), targets):
            self.add(detected, target)

    def add(self, detected: Detections, target: Tensor) -> None:
        """Add a picture's detections, the strongest first, and the boxes there are."""
        real = target[target[:, 3] > 0].double()
        classes, boxes = real[:, 0].long(), real[:, 1:]
        for name in classes.tolist():
            self._boxes[name] = self._boxes.get(name, 0) + 1
        taken: set[int] = set()
        for name, score, box in zip(detected.classes.tolist(), detected.scores.tolist(), detected.boxes):
            alike = (classes == name).nonzero().flatten()
            overlaps = intersection_over_union(box.double().unsqueeze(0), boxes[alike])
            best = int(overlaps.argmax()) if len(alike) else -1
            is_right = best >= 0 and float(overlaps[best]) >= self.least_overlap and int(alike[best]) not in taken
            if is_right:
                taken.add(int(alike[best]))
            self._detected.setdefault(name, []).append((score, is_right))

    def compute(self) -> float:
        """Return the mean average precision over the classes of which there is a box; NaN without any."""
        if not self._boxes:
            return float("nan")
        return sum(self._average_precision(name) for name in self._boxes) / len(self._boxes)

    def _average_precision(self, name: int) -> float:
        ranked = sorted(self._detected.get(name, ()), key=lambda detection: -detection[0])
        right = torch.tensor([is_right for _, is_right in ranked], dtype=torch.float64).cumsum(0)
        if not len(right):
            return 0.0
        precision = right / torch.arange(1, len(right) + 1, dtype=torch.float64)
        best_from_here = precision.flip(0).cummax(0).values.flip(0)
        steps = torch.diff(right, prepend=torch.zeros(1, dtype=torch.float64)) / self._boxes[name]
        return float((best_from_here * steps).sum())
