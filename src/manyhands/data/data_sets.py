"""A loaded data set: its training part, its test part, and the form of one sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import Dataset


@dataclass(frozen=True)
class DataSets:
    """The samples to train on and, where there are enough, those to test on. `num_classes` is 0 where targets are
    numbers."""

    name: str
    train: Dataset[Any]
    test: Dataset[Any] | None
    num_classes: int
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    has_boxes: bool = False
    """Whether targets are boxes, as the region loss takes them, in place of one class for each sample."""
    kind: str = ""
    """The name in `facts.hyper` of the paper's data set that this is, or stands in for."""
    model_options: Mapping[str, int] = field(default_factory=dict)
    """Sizes that follow from the data, by the names under which a model's factory takes them."""
