"""CIFAR-10: its binary files, a copy as JPEG bytes in a .npz file, and a stand-in of drawn stripes.

    cifar-10-batches-bin/data_batch_1.bin ... data_batch_5.bin, test_batch.bin, batches.meta.txt
        records of 3073 bytes: the class, then red, green and blue, 32 rows of 32 each
    .npz with jpeg_train, off_train, y_train (and _test) and classes
        picture i is the bytes off[i]:off[i+1] of jpeg

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The python version of the files is
not read: pickles could be programs.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from manyhands.data.arrays import PIXEL_MEAN, PIXEL_STANDARD_DEVIATION, ArrayData
from manyhands.data.data_sets import DataSets
from manyhands.data.drawn import Draws
from manyhands.data.packed import check_room, check_texts, reading, sizes_of
from manyhands.data.plain_files import read_bytes, read_text
from manyhands.data.split import held_out
from manyhands.facts.errors import BadData, BadFile
from manyhands.facts.extras import load

INPUT_SHAPE = (3, 32, 32)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD_BYTES = 1 + 3 * 32 * 32
LARGEST_BATCH_BYTES = 10 * 10_000 * RECORD_BYTES
LARGEST_COPY_BYTES = 4 * 10**9
LARGEST_PICTURE_BYTES = 10_000_000
LARGEST_SIDE = 4096
LARGEST_CLASS_COUNT = 10_000
SEARCHED = (".", "cifar-10-batches-bin")
_BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST, _META = "test_batch.bin", "batches.meta.txt"
_PICKLES = ("data_batch_1", "test_batch")
_LAYOUT = "Take CIFAR-10's binary version: cifar-10-batches-bin with data_batch_1.bin to 5 and test_batch.bin."
_PARTS = ("train", "test")
_LONGEST_NAME = 200
_DRAWN_PICTURES = (3000, 600)
_SEED = 2009


class JpegData(Dataset[tuple[Tensor, Tensor]]):
    """A data set of pictures held as JPEG bytes, decoded when they are read."""

    def __init__(
        self, content: numpy.ndarray, offsets: numpy.ndarray, labels: numpy.ndarray, shape: tuple[int, ...]
    ) -> None:
        self.labels: list[int] = labels.tolist()
        self._content = content
        self._offsets = offsets
        self._channels, self._height, self._width = shape

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place, decoder = range(len(self))[index], load("PIL.Image", "Reading pictures")
        start, end = self._offsets[place], self._offsets[place + 1]
        try:
            with decoder.open(io.BytesIO(self._content[start:end].tobytes()), formats=("JPEG",)) as image:
                if max(image.size) > LARGEST_SIDE:
                    raise OSError(f"it is {image.width} x {image.height}; at most {LARGEST_SIDE} a side are decoded")
                pixels = image.convert("RGB" if self._channels == 3 else "L")
        except Exception as error:  # Pillow's decoders raise nearly anything
            raise BadData(f"Picture {place} cannot be read: {(str(error).splitlines() or ['?'])[0][:120]}.") from error
        if pixels.size != (self._width, self._height):
            pixels = pixels.resize((self._width, self._height), decoder.Resampling.BILINEAR)
        array = numpy.array(pixels, dtype=numpy.float32).reshape(self._height, self._width, self._channels)
        value = torch.from_numpy(array).permute(2, 0, 1).contiguous()
        return (value / 255 - PIXEL_MEAN) / PIXEL_STANDARD_DEVIATION, torch.tensor(self.labels[place])


# Binary files


def cifar_root(path: Path) -> Path | None:
    """Return the folder of the binary files: `path` or cifar-10-batches-bin in it. Pickled ones are refused."""
    for root in (path / place for place in SEARCHED):
        if (root / _BATCHES[0]).is_file():
            return root
    for root in (path, path / "cifar-10-batches-py"):
        if all((root / name).is_file() for name in _PICKLES):
            raise BadFile(f"{root}: holds pickles, which are not read: they could be programs.", hint=_LAYOUT)
    return None


def load_cifar(root: Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load all data batches that exist; without a test batch a fifth is held out."""
    shape = _shape(str(root), input_shape)
    files = [root / name for name in _BATCHES if (root / name).exists()]
    if not files:
        raise BadFile(f"{root}: there is no {_BATCHES[0]}.", hint=_LAYOUT)
    classes = _class_names(root / _META)
    train = _arrays(files, len(classes), shape)
    train_set: Dataset[Any] = train
    if (root / _TEST).exists():
        test_set: Dataset[Any] | None = _arrays([root / _TEST], len(classes), shape)
    else:
        chosen, held_out_indices = held_out(train.targets.tolist())
        train_set, test_set = Subset(train, chosen), Subset(train, held_out_indices) if held_out_indices else None
    return _sets(root.resolve().name, train_set, test_set, shape, classes)


def _class_names(file: Path) -> tuple[str, ...]:
    if not file.exists():
        return CLASSES
    names = tuple(line.strip() for line in read_text(file, 10_000).splitlines() if line.strip())
    if len(names) != len(CLASSES) or len(set(names)) < len(names):
        raise BadData(f"{file}: has {len(set(names))} different names; {len(CLASSES)} are needed.", hint=_LAYOUT)
    return names


def _arrays(files: list[Path], num_classes: int, shape: tuple[int, ...]) -> ArrayData:
    parts = []
    for file in files:
        content = read_bytes(file, LARGEST_BATCH_BYTES)
        if not content or len(content) % RECORD_BYTES:
            raise BadFile(
                f"{file}: has {len(content):,} bytes; records are of {RECORD_BYTES:,} bytes, and there is one or more.",
                hint="It was cut off, or is not of CIFAR-10's binary version.",
            )
        records = numpy.frombuffer(content, dtype=numpy.uint8).reshape(-1, RECORD_BYTES)
        _check_labels(str(file), records[:, 0], num_classes)
        parts.append(records)
    records = numpy.concatenate(parts)
    pixels = torch.from_numpy(numpy.ascontiguousarray(records[:, 1:])).reshape(-1, *INPUT_SHAPE)
    return _array_data(pixels, records[:, 0], shape)


def _array_data(pixels: Tensor, labels: numpy.ndarray, shape: tuple[int, ...]) -> ArrayData:
    return ArrayData(pixels, torch.from_numpy(labels.astype(numpy.int64)), size=(shape[1], shape[2]))


def _check_labels(subject: str, labels: numpy.ndarray, num_classes: int) -> None:
    bad = labels >= num_classes
    if bad.any():
        first = int(bad.argmax())
        raise BadData(f"{subject}: the class of picture {first} is {labels[first]}; there are {num_classes}, from 0.")


# JPEG bytes


def is_jpeg_copy(path: Path) -> bool:
    """Return whether a path is a .npz file that holds jpeg_train."""
    try:
        with zipfile.ZipFile(path) as packed:
            return "jpeg_train.npy" in packed.namelist()
    except Exception:  # zipfile raises nearly anything for what is no archive
        return False


def load_jpeg_copy(path: Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load a copy as JPEG bytes; each picture's first and last bytes are checked at once, what is inside when it is
    read."""
    shape = _shape(str(path), input_shape, channels=(1, 3))
    arrays = _unpacked(path)
    classes = tuple(str(name) for name in arrays["classes"])
    if not 2 <= len(classes) <= LARGEST_CLASS_COUNT or len(set(classes)) < len(classes):
        raise BadData(f"{path}: has {len(set(classes)):,} different classes; 2 to {LARGEST_CLASS_COUNT:,} are taken.")
    parts = [_jpegs(path, arrays, part, len(classes), shape) for part in _PARTS if f"jpeg_{part}" in arrays]
    train_set: Dataset[Any] = parts[0]
    if len(parts) == 2:
        test_set: Dataset[Any] | None = parts[1]
    else:
        chosen, held_out_indices = held_out(parts[0].labels)
        train_set, test_set = Subset(parts[0], chosen), Subset(parts[0], held_out_indices) if held_out_indices else None
    return _sets(path.stem, train_set, test_set, shape, classes)


def _unpacked(path: Path) -> dict[str, numpy.ndarray]:
    with reading(path):
        sizes = sizes_of(path)
        parts = [part for part in _PARTS if part == "train" or f"jpeg_{part}" in sizes]
        keys = ["classes", *(f"{key}_{part}" for part in parts for key in ("jpeg", "off", "y"))]
        missing = [key for key in keys if key not in sizes]
        if missing:
            raise BadData(f"{path}: has no {' and no '.join(missing)}, which belongs to jpeg_train.")
        check_room(path, sum(sizes[key] for key in keys), LARGEST_COPY_BYTES)
        with numpy.load(path, allow_pickle=False) as opened:
            arrays: dict[str, Any] = {key: opened[key] for key in keys}
    for key, array in arrays.items():
        if not isinstance(array, numpy.ndarray) or array.ndim != 1:
            raise BadData(f"{path}: {key} is not an array of one axis.")
        kinds, content = ("U", "names") if key == "classes" else ("iu", "whole numbers")
        if array.dtype.kind not in kinds or array.dtype.itemsize > 4 * _LONGEST_NAME:
            raise BadData(f"{path}: {key} holds {array.dtype}; it must hold {content}.")
        if array.dtype.kind == "U":
            check_texts(path, key, array)
    return arrays


def _jpegs(
    path: Path, arrays: dict[str, numpy.ndarray], part: str, num_classes: int, shape: tuple[int, ...]
) -> JpegData:
    content, labels = arrays[f"jpeg_{part}"], arrays[f"y_{part}"]
    if content.dtype != numpy.uint8:
        raise BadData(f"{path}: jpeg_{part} holds {content.dtype}; it must hold uint8.")
    offsets = arrays[f"off_{part}"]
    if len(offsets) != len(labels) + 1 or not len(labels):
        raise BadData(
            f"{path}: off_{part} has {len(offsets)} places; {len(labels)} pictures need one more than they are."
        )
    ends_right = int(offsets[0]) == 0 and int(offsets[-1]) == len(content)
    if not ends_right or (offsets[1:] <= offsets[:-1]).any():
        raise BadData(f"{path}: off_{part} does not rise from 0 to {len(content)}, the length of jpeg_{part}.")
    places = offsets.astype(numpy.int64)
    sizes = numpy.diff(places)
    if sizes.max() > LARGEST_PICTURE_BYTES:
        raise BadData(f"{path}: picture {int(sizes.argmax())} of jpeg_{part} is larger than 10 MB.")
    starts, ends = places[:-1], places[1:]
    whole = (sizes >= 4) & (content[starts] == 0xFF) & (content[ends - 1] == 0xD9)
    whole &= (content[(starts + 1).clip(max=len(content) - 1)] == 0xD8) & (content[ends - 2] == 0xFF)
    if not whole.all():
        raise BadData(f"{path}: picture {int(whole.argmin())} of jpeg_{part} is not a whole JPEG.")
    if labels.min() < 0:
        raise BadData(f"{path}: y_{part} is {labels.min()} for picture {int(labels.argmin())}; classes start at 0.")
    _check_labels(f"{path}: y_{part}", labels, num_classes)
    return JpegData(content, places, labels, shape)


# Drawn


def synthetic_cifar10(*, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Return a stand-in: stripes of five directions in warm or cold colours, under noise."""
    shape = _shape("synthetic-cifar10", input_shape)
    parts = []
    for stream, count in enumerate(_DRAWN_PICTURES):
        draws = Draws(_SEED, stream)
        labels = numpy.arange(count) % len(CLASSES)
        angle = (labels % 5) * (numpy.pi / 5) + 0.2 * (draws.uniform(count) - 0.5)
        rows, columns = numpy.meshgrid(*[numpy.arange(32, dtype=numpy.float32)] * 2, indexing="ij")
        pace = 0.6 + 0.3 * draws.uniform(count)
        across, down, shift = pace * numpy.cos(angle), pace * numpy.sin(angle), 2 * numpy.pi * draws.uniform(count)
        along = _each(across) * columns + _each(down) * rows + _each(shift)
        noise = draws.bytes(count, 3, 32, 32).astype(numpy.float32) / 255 - 0.5
        tint = numpy.where((labels // 5 == 0)[:, None], (1.0, 0.7, 0.4), (0.4, 0.7, 1.0)).astype(numpy.float32)
        light = (128 + 50 * numpy.sin(along)[:, None] + 60 * noise) * tint[:, :, None, None]
        pixels = torch.from_numpy(light.astype(numpy.uint8))
        parts.append(_array_data(pixels, labels, shape))
    return _sets("synthetic-cifar10", parts[0], parts[1], shape, CLASSES)


def _each(values: numpy.ndarray) -> numpy.ndarray:
    """Return one number for each picture, shaped to be multiplied with its pixels."""
    return values.astype(numpy.float32)[:, None, None]


def _shape(subject: str, input_shape: tuple[int, ...] | None, channels: tuple[int, ...] = (3,)) -> tuple[int, ...]:
    shape = input_shape or INPUT_SHAPE
    if len(shape) != 3 or shape[0] not in channels or not 1 <= min(shape[1:]) <= max(shape[1:]) <= LARGEST_SIDE:
        counts = " or ".join(map(str, channels))
        raise BadData(
            f"{subject}: pictures have {counts} channels, a height and a width; the model takes {shape}.",
            hint="Use a model for colour pictures.",
        )
    return shape


def _sets(
    name: str, train: Dataset[Any], test: Dataset[Any] | None, shape: tuple[int, ...], classes: tuple[str, ...]
) -> DataSets:
    return DataSets(
        name=name,
        train=train,
        test=test,
        num_classes=len(classes),
        input_shape=shape,
        classes=classes,
        kind="cifar10" if classes == CLASSES else "",
    )
