"""Data sets to train on: by name, from a folder of pictures, or a .npz file. Listing names does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadFile, UnknownName, unknown

if TYPE_CHECKING:
    from torch.utils.data import Dataset

NAMES: tuple[str, ...] = ("digits",)
_OR_ELSE = "A folder of pictures or a .npz file may be given too."


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


def load(name_or_path: str | Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """A data set by its name, a folder with one sub-folder of pictures per class or laid out as Pascal VOC, or a .npz.

    `input_shape` is what the model takes for one sample, without the batch: pictures are resized to it. A name goes
    before a folder of that name; ./digits is the folder.
    """
    name = str(name_or_path)
    if name in NAMES:
        from manyhands.data.digits import load_digits

        return load_digits(input_shape=input_shape)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        from manyhands.data.detection import detection_root, load_detection
        from manyhands.data.pictures import load_folder

        root = detection_root(path)
        if root is not None:
            return load_detection(root, input_shape=input_shape)
        return load_folder(path, input_shape=input_shape)
    if path.suffix.lower() == ".npz":
        from manyhands.data.arrays import load_arrays

        return load_arrays(path, input_shape=input_shape)
    if path.exists():
        raise BadFile(
            f"{path}: '{path.suffix}' is not the suffix of a data file.", hint=f"Write a .npz file. {_OR_ELSE}"
        )
    if len(path.parts) > 1:
        raise BadFile(f"{path}: there is no such file or folder.", hint=f"Data sets with a name: {', '.join(NAMES)}.")
    error = unknown("data set", name, NAMES)
    raise UnknownName(error.message, hint=f"{error.hint} {_OR_ELSE}".strip())
