"""Pictures with boxes around what is in them, in the layout of Pascal VOC.

JPEGImages/ holds the pictures, Annotations/ one XML file of boxes for each, ImageSets/Main/ lists of names to train and
test on. The files may come from anywhere: sizes are limited, and XML that declares a document type, in which entities
could unfold without end, is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import Tensor
from torch.utils.data import Dataset

from manyhands.data.data_sets import DataSets
from manyhands.data.pictures import PIXEL_MEAN, PIXEL_STANDARD_DEVIATION, PictureData, check_all
from manyhands.data.split import held_out
from manyhands.facts.errors import BadData, BadFile
from manyhands.facts.units import format_bytes

INPUT_SHAPE = (3, 416, 416)
LARGEST_XML_BYTES = 2_000_000
LARGEST_LIST_BYTES = 100_000_000
LARGEST_BOX_COUNT = 1000
SEARCHED_DEPTH = 2
_PICTURES, _ANNOTATIONS, _LISTS = "JPEGImages", "Annotations", "ImageSets/Main"
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_LONGEST_NAME = 200
_LAYOUT = f"Lay it out as Pascal VOC: {_PICTURES}/, {_ANNOTATIONS}/*.xml and {_LISTS}/train.txt and val.txt."

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class _Object:
    """An object in a picture: its class, and its centre, width and height as fractions of the picture."""

    name: str
    box: Box


class BoxData(Dataset[tuple[Tensor, Tensor]]):
    """A data set of pictures from 0 to 1, each with its boxes: rows of class, centre x and y, width, height; zeros fill
    up."""

    def __init__(self, paths: list[Path], boxes: Tensor, input_shape: tuple[int, ...]) -> None:
        self.boxes = boxes
        self._pictures = PictureData(paths, [0] * len(paths), input_shape)

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value, _ = self._pictures[index]
        return value * PIXEL_STANDARD_DEVIATION + PIXEL_MEAN, self.boxes[index]


def detection_root(path: Path) -> Path | None:
    """Return the folder, at most two below `path`, in which pictures lie beside annotations."""
    roots = [folder for folder in _folders(path, SEARCHED_DEPTH) if _is_root(folder)]
    if len(roots) > 1:
        raise BadData(
            f"{path}: holds {len(roots)} data sets of pictures with boxes: {', '.join(map(str, roots[:5]))}.",
            hint=f"Name one of them: --data {roots[0]}",
        )
    return roots[0] if roots else None


def load_detection(root: Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load pictures with boxes; the classes are those of all boxes, by name. A box is as wide as its corners say, cut
    off at the picture's edge.

    The pictures in train.txt, else trainval.txt, are for training; those in val.txt or test.txt are for testing, else a
    fifth is held out. Boxes marked as difficult are left out, as darknet does, and so are those without an area.
    """
    shape = input_shape or INPUT_SHAPE
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
        raise BadData(
            f"{root}: pictures have 1 or 3 channels, a height and a width; the model takes {shape}.",
            hint="Use a model for pictures.",
        )
    parts = _names(root)
    files = {file.stem: file for file in _listed(root / _PICTURES)}
    paths = [[_picture(root, files, name, origin) for name, origin in part] for part in parts]
    objects = [[_objects(root, name, origin) for name, origin in part] for part in parts]
    everything = [item for part in objects for of_picture in part for item in of_picture]
    if not everything:
        raise BadData(f"{root / _ANNOTATIONS}: there is no box in any of the annotations.", hint=_LAYOUT)
    check_all(root, sorted({path for part in paths for path in part}))
    classes = tuple(sorted({item.name for item in everything}))
    most = max(len(of_picture) for part in objects for of_picture in part)
    sets = [BoxData(files, _table(part, classes, most), shape) for files, part in zip(paths, objects)]
    return DataSets(
        name=root.resolve().name,
        train=sets[0],
        test=sets[1] if len(sets[1]) else None,
        num_classes=len(classes),
        input_shape=shape,
        classes=classes,
        has_boxes=True,
    )


def _is_root(folder: Path) -> bool:
    return (folder / _PICTURES).is_dir() and (folder / _ANNOTATIONS).is_dir()


def _folders(path: Path, depth: int) -> Iterator[Path]:
    """Yield the folder itself and those below it; what may not be read is passed over."""
    yield path
    if depth == 0 or _is_root(path):
        return
    try:
        with os.scandir(path) as entries:
            below = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return
    for name in below:
        yield from _folders(path / name, depth - 1)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise BadFile(f"{folder}: cannot be read: {error.strerror or error}.") from error


# Names of the pictures

_Names = list[tuple[str, str]]
"""Names of pictures, each with the place where it was read."""


def _names(root: Path) -> tuple[_Names, _Names]:
    """Return the names to train on and those to test on."""
    lists = {name: root / _LISTS / f"{name}.txt" for name in ("train", "trainval", "val", "test")}
    tests: tuple[str, ...] = ()
    lists_by_name = {name: _list(file) for name, file in lists.items() if file.exists()}
    if "train" in lists_by_name:
        train, tests = lists_by_name["train"], ("val", "test")
    elif "trainval" in lists_by_name:
        train, tests = lists_by_name["trainval"], ("test", "val")
    elif lists_by_name:
        raise BadData(f"{root / _LISTS}: has no train.txt and no trainval.txt; it has {', '.join(lists_by_name)}.txt.")
    else:
        annotations = [file for file in _listed(root / _ANNOTATIONS) if file.suffix.lower() == ".xml"]
        train = [(file.stem, str(file)) for file in annotations]
    test = next((lists_by_name[name] for name in tests if lists_by_name.get(name)), [])
    if "train" not in lists_by_name and test:
        tested = {name for name, _ in test}
        train = [pair for pair in train if pair[0] not in tested]
    if not test:
        chosen, test_indices = held_out([0] * len(train))
        train, test = [train[index] for index in chosen], [train[index] for index in test_indices]
    if not train:
        raise BadData(f"{root}: there is no picture to train on.", hint=_LAYOUT)
    return train, test


def _list(file: Path) -> _Names:
    lines = _text(file, LARGEST_LIST_BYTES).splitlines()
    return [(line.strip(), f"{file}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _picture(root: Path, files: dict[str, Path], name: str, place: str) -> Path:
    if name not in files:
        raise BadData(
            f"{place}: there is no picture '{name[:_LONGEST_NAME]}' in {root / _PICTURES}.",
            hint="A list holds one name a line, without a suffix.",
        )
    return files[name]


# The objects in them


def _objects(root: Path, name: str, origin: str) -> list[_Object]:
    """Return the objects in a picture. The name is that of an existing file, so it leads to no other folder."""
    file = root / _ANNOTATIONS / f"{name}.xml"
    if not file.is_file():
        raise BadData(f"{origin}: there is no annotation {file}.", hint="A picture of nothing has one without objects.")
    text = _text(file, LARGEST_XML_BYTES)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise BadFile(f"{file}: declares a document type, which annotations do not need and may do harm.")
    try:
        annotation = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise BadFile(f"{file}: is not XML: {error}.", hint="Repair it, or take its name off the lists.") from error
    if annotation.tag != "annotation":
        raise BadFile(f"{file}: the outermost tag is '{annotation.tag[:_LONGEST_NAME]}', not 'annotation'.")
    elements = annotation.findall("object")
    if len(elements) > LARGEST_BOX_COUNT:
        raise BadData(f"{file}: has {len(elements)} objects; at most {LARGEST_BOX_COUNT} are taken.")
    size = [_number(file, annotation, f"size/{side}") for side in ("width", "height")]
    if min(size) < 1:
        raise BadData(f"{file}: size is {size[0]:g} x {size[1]:g}; both must be 1 or more.")
    objects = []
    for place, thing in enumerate(elements, start=1):
        label = f"object {place}: "
        kind = _field(file, thing, "name", label)
        box = _box(file, thing, label, size[0], size[1])
        if box is not None and (thing.findtext("difficult") or "0").strip() != "1":
            objects.append(_Object(kind, box))
    return objects


def _box(file: Path, thing: ElementTree.Element, label: str, width: float, height: float) -> Box | None:
    """Return fractions of the picture; None where nothing of the box is in it."""
    left, top, right, bottom = (_number(file, thing, f"bndbox/{corner}", label) for corner in _CORNERS)
    for low, high, axis in ((left, right, "x"), (top, bottom, "y")):
        if low > high:
            raise BadData(f"{file}: {label}{axis}min is {low:g}, more than {axis}max, {high:g}.")
    left, right = (min(max(place, 0.0), width) / width for place in (left, right))
    top, bottom = (min(max(place, 0.0), height) / height for place in (top, bottom))
    if left == right or top == bottom:
        return None
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def _number(file: Path, element: ElementTree.Element, path: str, label: str = "") -> float:
    text = _field(file, element, path, label)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadData(f"{file}: {label}{path} is '{text}'; it must be a number.")
    return number


def _field(file: Path, element: ElementTree.Element, path: str, label: str = "") -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise BadData(f"{file}: {label}{path} is missing or empty.")
    if len(text) > _LONGEST_NAME:
        raise BadData(f"{file}: {label}{path} has {len(text)} letters; at most {_LONGEST_NAME} are read.")
    return text


def _text(file: Path, largest_bytes: int) -> str:
    """Return the content of a plain file in UTF-8; another encoding that it declares is not believed."""
    try:
        if not file.is_file():
            raise BadFile(f"{file}: is not a plain file.")
        with open(file, "rb") as opened:
            content = opened.read(largest_bytes + 1)
        if len(content) > largest_bytes:
            raise BadFile(f"{file}: is longer than {format_bytes(largest_bytes)}.")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise BadFile(f"{file}: cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise BadFile(f"{file}: is not text in UTF-8: byte {error.start} is wrong.") from error


def _table(part: list[list[_Object]], classes: tuple[str, ...], most: int) -> Tensor:
    """Return all boxes of a part, with as many rows for each picture as the fullest one has."""
    number = {name: float(place) for place, name in enumerate(classes)}
    table = torch.zeros(len(part), most, 5)
    for place, of_picture in enumerate(part):
        for row, item in enumerate(of_picture):
            table[place, row] = torch.tensor((number[item.name], *item.box))
    return table
