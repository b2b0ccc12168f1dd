"""A folder of pictures as a data set: one sub-folder per class. Pillow decodes them when they are read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from manyhands.data.data_sets import DataSets
from manyhands.data.split import held_out
from manyhands.facts.errors import BadData, BadFile
from manyhands.facts.extras import load

if TYPE_CHECKING:
    from PIL import Image

INPUT_SHAPE = (3, 64, 64)
# Pillow's own limit, of which it only warns: a small file may unpack to all of a machine's memory.
LARGEST_PIXEL_COUNT = 89_478_485
PIXEL_MEAN = 0.5
PIXEL_STANDARD_DEVIATION = 0.5
# A picture takes about a millisecond to decode: more than these, and starting would take too long.
DECODED_IN_CHECK = 2000
# Not every format of Pillow: some of them start another program to be decoded.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_TEST_FOLDERS = ("test", "val")
_CLUTTER = ("thumbs.db", "desktop.ini", "__macosx")
_NAMED = 5
_THREADS = 8
_SIXTEEN_BITS = ("I", "I;16", "I;16L", "I;16B", "I;16N")
_END_OF_JPEG = b"\xff\xd9"
_LAYOUT = "Make one sub-folder per class, with its pictures in it; or train/ and test/ with such sub-folders each."


class PictureData(Dataset[tuple[Tensor, int]]):
    """A data set of pictures by path, decoded one at a time and squeezed into the input's height and width."""

    is_read_by_threads = True
    """Pillow decodes without holding Python's lock, and a sample depends on nothing but its number."""

    def __init__(self, paths: list[Path], labels: list[int], input_shape: tuple[int, ...]) -> None:
        self.paths = paths
        self.labels = labels
        self._channels, self._height, self._width = input_shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        mode, bilinear = "RGB" if self._channels == 3 else "L", pillow().Resampling.BILINEAR
        try:
            with _open(path) as image:
                image.draft(mode, (2 * self._width, 2 * self._height))  # a large JPEG need not be decoded in full
                pixels = eight_bits(image).convert(mode).resize((self._width, self._height), bilinear)
        except Exception as error:  # Pillow's decoders raise nearly anything, and the file may have been deleted since
            raise BadData(
                f"{path}: the picture cannot be read: {reason(error)}.", hint="Delete or repair it."
            ) from error
        array = numpy.asarray(pixels).reshape(self._height, self._width, self._channels)
        # numpy, since torch would take several threads for a large picture: cores that the workers compute on.
        values = numpy.ascontiguousarray(array.transpose(2, 0, 1), dtype=numpy.float32)
        values /= 255
        values -= PIXEL_MEAN
        values /= PIXEL_STANDARD_DEVIATION
        return torch.from_numpy(values), self.labels[index]


def pillow() -> Any:
    """Return Pillow's module of pictures; it is an extra, and is loaded where a picture is decoded."""
    return load("PIL.Image", "Reading pictures")


def load_folder(path: Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load a folder of pictures; every file is checked first, since a run of days must not end at one broken
    picture."""
    shape = input_shape or INPUT_SHAPE
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
        raise BadData(
            f"{path}: pictures have 1 or 3 channels, a height and a width; the model takes {shape}.",
            hint="Use a model for pictures.",
        )
    train_folder, test_folder = _parts(path)
    train_classes = _classes(train_folder)
    if len(train_classes) < 2:
        raise BadData(
            f"{train_folder}: has one class, '{next(iter(train_classes))}'; to tell apart there must be two or more.",
            hint=_LAYOUT,
        )
    test_classes = _classes(test_folder) if test_folder else {}
    strange = [name for name in test_classes if name not in train_classes]
    if strange:
        raise BadData(
            f"{test_folder}: {_some(strange)}: no such class in {train_folder}, which has {_some(train_classes)}.",
            hint="Tests need the classes that are trained on.",
        )
    names = tuple(train_classes)
    check_all(path, [file for classes in (train_classes, test_classes) for files in classes.values() for file in files])
    train = _pictures(train_classes, names, shape)
    train_set: Dataset[Any] = train
    test_set: Dataset[Any] | None = _pictures(test_classes, names, shape) if test_folder else None
    if test_folder is None:
        chosen, held_out_indices = held_out(train.labels)
        train_set, test_set = Subset(train, chosen), Subset(train, held_out_indices) if held_out_indices else None
    return DataSets(
        name=path.resolve().name,
        train=train_set,
        test=test_set,
        num_classes=len(names),
        input_shape=shape,
        classes=names,
    )


def _parts(path: Path) -> tuple[Path, Path | None]:
    """Return the folder to train on and the one to test on. A `train` with no sub-folders is a class of that name."""
    folders = {folder.name: folder for folder in _entries(path) if folder.is_dir()}
    train = folders.get("train")
    if train is None or not any(entry.is_dir() for entry in _entries(train)):
        return path, None
    tests = [folders[name] for name in _TEST_FOLDERS if name in folders]
    with_classes = [folder for folder in tests if any(entry.is_dir() for entry in _entries(folder))]
    if tests and not with_classes:
        raise BadData(f"{tests[0]}: has no class folders, as {train} has.", hint=_LAYOUT)
    return train, with_classes[0] if with_classes else None


def _classes(folder: Path) -> dict[str, list[Path]]:
    """Return the pictures of each class, both in the order of their names."""
    classes = {entry.name: _files(entry) for entry in _entries(folder) if entry.is_dir()}
    if not classes:
        loose = sum(1 for entry in _entries(folder) if entry.is_file())
        beside = f", but {loose} files that belong to no class" if loose else ", and no pictures"
        raise BadData(f"{folder}: has no class folders{beside}.", hint=_LAYOUT)
    if not any(classes.values()):
        raise BadData(f"{folder}: there is no picture in any of its {len(classes)} class folders.", hint=_LAYOUT)
    empty = [name for name, files in classes.items() if not files]
    if empty:
        raise BadData(
            f"{folder}: no picture in the class folder{'s' if len(empty) > 1 else ''} {_some(empty)}.",
            hint="Add pictures, or delete the folder.",
        )
    return classes


def _entries(folder: Path) -> list[Path]:
    """Return what lies in a folder, by name, without what systems leave there."""
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise BadFile(f"{folder}: cannot be read: {error.strerror or error}.") from error
    return [entry for entry in entries if not entry.name.startswith(".") and entry.name.lower() not in _CLUTTER]


def _files(folder: Path) -> list[Path]:
    """Return all files below a class folder. Links to folders are not followed: they may lead in a circle."""
    files: list[Path] = []
    for entry in _entries(folder):
        if not entry.is_dir():
            files.append(entry)
        elif not entry.is_symlink():
            files.extend(_files(entry))
    return files


def check_all(root: Path, files: list[Path]) -> None:
    pillow()  # its absence is no fault of the files
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS) as threads:
        warnings.simplefilter("ignore")  # what they warn of is either harmless or found below
        reasons = list(threads.map(_fault if len(files) <= DECODED_IN_CHECK else _quick_fault, files))
    bad = [f"{os.path.relpath(file, root)} ({reason})" for file, reason in zip(files, reasons) if reason]
    if bad:
        raise BadData(
            f"{root}: {len(bad)} of {len(files)} files cannot be read as pictures: {_some(bad)}.",
            hint=f"Delete or repair {'it' if len(bad) == 1 else 'them'}. Read are: {', '.join(FORMATS)}.",
        )


def _fault(path: Path, *, decode: bool = True) -> str:
    """Return why a file is no picture, or '' if it is one."""
    try:
        with _open(path) as image:
            kind = image.format
            image.verify()  # the checksums in a PNG; only the header of others
        if decode or not (kind == "PNG" or (kind in ("JPEG", "MPO") and _ends_well(path))):
            with _open(path) as image:
                image.draft("L", (1, 1))  # a JPEG is read to its end anyway
                image.load()
    except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
        return reason(error)
    return ""


def _quick_fault(path: Path) -> str:
    """Return why a file is no picture, without decoding what ends as it should: a byte changed inside a JPEG is noticed
    only when the picture is read."""
    return _fault(path, decode=False)


def _ends_well(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-len(_END_OF_JPEG), os.SEEK_END)
        return file.read() == _END_OF_JPEG


def _open(path: Path) -> Image.Image:
    """Open a picture and read its header, not its pixels yet."""
    if not path.is_file():  # opening a pipe would wait for ever
        raise OSError("no such file" if not path.exists() else "not a plain file")
    image: Image.Image = pillow().open(path, formats=FORMATS)
    pixels = image.width * image.height
    if pixels > LARGEST_PIXEL_COUNT or image.mode == "F":
        image.close()
        raise OSError(
            "its pixels are floats, not 0 to 255"
            if image.mode == "F"
            else f"{pixels:,} pixels; at most {LARGEST_PIXEL_COUNT:,} are decoded"
        )
    return image


def eight_bits(image: Image.Image) -> Image.Image:
    """Return a picture of 8 bits: Pillow cuts brighter pixels of 16 bits off at 255; this scales them."""
    if image.mode not in _SIXTEEN_BITS:
        return image
    scaled: Image.Image = pillow().fromarray((numpy.asarray(image).clip(0, 65535) >> 8).astype(numpy.uint8))
    return scaled


def reason(error: Exception) -> str:
    if isinstance(error, pillow().UnidentifiedImageError):
        return "no picture of a known format"
    if isinstance(error, pillow().DecompressionBombError):
        return f"more than {LARGEST_PIXEL_COUNT:,} pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [""])[0][:120].rstrip(".") or type(error).__name__


def _pictures(classes: dict[str, list[Path]], names: tuple[str, ...], shape: tuple[int, ...]) -> PictureData:
    pairs = [(file, names.index(name)) for name, files in classes.items() for file in files]
    return PictureData([file for file, _ in pairs], [label for _, label in pairs], shape)


def _some(names: Iterable[str]) -> str:
    """Return the first few, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
