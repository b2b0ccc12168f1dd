"""A data set as it is loaded: what to train on, what to test on, and what one sample looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import Dataset


@dataclass(frozen=True)
class DataSets:
    """What to train on and, where there is enough, what to test on. `num_classes` is 0 where targets are numbers."""

    name: str
    train: Dataset[Any]
    test: Dataset[Any] | None
    num_classes: int
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    has_boxes: bool = False
    """Targets are boxes, as the region loss takes them, in place of one class for each sample."""
    kind: str = ""
    """Which of the papers' data sets this is, or stands in for: what `facts.hyper` knows it by."""
    model_options: Mapping[str, int] = field(default_factory=dict)
    """Sizes that follow from the data, by the names under which a model's factory takes them."""
