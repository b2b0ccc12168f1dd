"""Samples to run a network on: a folder of pictures, one picture, arrays, or the held-out part of a data set.

Bytes from 0 to 255 become numbers by the mean and deviation that the network was trained with. Pictures and arrays of
another height and width are resized only where that was asked for (wanted.py); a data set by name comes as training has
it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from manyhands.data.pictures import FORMATS, LARGEST_PIXEL_COUNT, check_all, eight_bits, pillow, reason
from manyhands.data.plain_files import entries
from manyhands.data.sample_arrays import HOW, read_npy, read_npz, read_several
from manyhands.data.sample_json import read_json_file
from manyhands.data.sets import NAMES, STAND_INS, load
from manyhands.data.wanted import Sample, SampleForm, SampleSource, misfit, misfit_hint, shape_text
from manyhands.facts.errors import BadData, BadFile, ManyhandsError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
LARGEST_FILE_COUNT = 1_000_000
_NAMED = 5
_THREADS = 8


def read_samples(source: str, wanted: SampleForm | Mapping[str, SampleForm]) -> SampleSource:
    """A folder of pictures, one picture, .npy, .npz, .json, or the held-out samples of a data set by its name.

    `wanted` is one for each argument where the network takes several; then a .npz file has an array for each.
    """
    path = Path(source).expanduser()
    if source in (*NAMES, *STAND_INS):
        return _data_set(source, wanted)
    if not path.exists():
        raise BadFile(
            f"{source}: there is no such file, folder or data set.",
            hint=f"Give a folder of pictures, a picture, a .npy, .npz or .json file, or {', '.join(NAMES)}.",
        )
    suffix = path.suffix.lower()
    if not isinstance(wanted, SampleForm):
        if suffix != ".npz":
            raise BadData(
                f"{path}: the network takes several arrays for a sample: {', '.join(wanted)}.",
                hint=f"Write them with numpy.savez('samples.npz', {', '.join(f'{key}={key}' for key in wanted)}).",
            )
        return read_several(path, wanted)
    if path.is_dir():
        from manyhands.data.cifar import cifar_root

        return _data_set(source, wanted) if cifar_root(path) is not None else _folder(path, wanted)
    if suffix == ".npy":
        return read_npy(path, wanted)
    if suffix == ".json":
        return read_json_file(path, wanted)
    if suffix == ".npz":
        from manyhands.data.cifar import is_jpeg_copy

        return _data_set(source, wanted) if is_jpeg_copy(path) else read_npz(path, wanted)
    _check_pictures(str(path), wanted)
    return SampleSource(1, lambda index: read_picture(path, str(path), wanted), lambda index: path.name)


# Pictures


def read_picture(
    source: Path | bytes, name: str, wanted: SampleForm, *, largest_pixel_count: int = LARGEST_PIXEL_COUNT
) -> Tensor:
    """One picture, decoded as for training. One of another height or width is resized where that was asked for."""
    _check_pictures(name, wanted)
    channels, height, width = wanted.shape
    mode, decoder = "RGB" if channels == 3 else "L", pillow()
    with _opened(source, name, largest_pixel_count) as image:
        if not wanted.resize and (image.height, image.width) != (height, width):
            raise misfit(name, (channels, image.height, image.width), wanted)
        image.draft(mode, (2 * width, 2 * height))  # a large JPEG need not be decoded in full
        pixels = eight_bits(image).convert(mode).resize((width, height), decoder.Resampling.BILINEAR)
    array = numpy.array(pixels, dtype=numpy.float32).reshape(height, width, channels)
    value = torch.from_numpy(array).permute(2, 0, 1).contiguous()
    return ((value / 255 - wanted.mean) / wanted.deviation).to(wanted.dtype)


@contextmanager
def _opened(source: Path | bytes, name: str, largest_pixel_count: int = LARGEST_PIXEL_COUNT) -> Iterator[Any]:
    """A picture of which the header is read, not its pixels yet. What Pillow cannot decode is refused by name."""
    try:
        if isinstance(source, Path) and not source.is_file():  # opening a pipe would wait for ever
            raise OSError("no such file" if not source.exists() else "not a plain file")
        with pillow().open(source if isinstance(source, Path) else io.BytesIO(source), formats=FORMATS) as image:
            pixel_count = image.width * image.height
            if pixel_count > largest_pixel_count:
                raise OSError(f"{pixel_count:,} pixels; at most {largest_pixel_count:,} are decoded")
            if image.mode == "F":
                raise OSError("its pixels are floats, not 0 to 255")
            yield image
    except ManyhandsError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything
        raise BadData(
            f"{name}: the picture cannot be read: {reason(error)}.",
            hint=f"Read are: {', '.join(FORMATS)}; arrays as .npy or .json.",
        ) from error


def _check_pictures(name: str, wanted: SampleForm) -> None:
    if not wanted.takes_pictures:
        raise BadData(
            f"{name}: pictures have 1 or 3 channels, a height and a width; the network takes {wanted.text}.", hint=HOW
        )


def _folder(folder: Path, wanted: SampleForm) -> SampleSource:
    """Every picture below a folder, by name; all are looked at first, so that the last one cannot end a long job."""
    _check_pictures(str(folder), wanted)
    files, others = _below(folder)
    if not files:
        beside = f"; {others} other file(s)" if others else ""
        raise BadData(f"{folder}: there is no picture in it{beside}.", hint=f"Looked for: {', '.join(SUFFIXES)}.")
    check_all(folder, files)
    if not wanted.resize:
        _check_sizes(folder, files, wanted)
    return SampleSource(
        len(files),
        lambda index: read_picture(files[index], str(files[index]), wanted),
        lambda index: files[index].relative_to(folder).as_posix(),
        note=f"{others} file(s) in {folder} are no pictures by their names and were left out." if others else "",
    )


def _check_sizes(folder: Path, files: list[Path], wanted: SampleForm) -> None:
    """All pictures have the network's height and width, as their headers say."""

    def shape(file: Path) -> tuple[int, ...]:
        with _opened(file, str(file)) as image:
            return wanted.shape[0], image.height, image.width

    with ThreadPoolExecutor(_THREADS) as threads:
        shapes = list(threads.map(shape, files))
    others = [(file, shape) for file, shape in zip(files, shapes) if shape != wanted.shape]
    if others:
        named = [f"{file.relative_to(folder).as_posix()} is {shape_text(shape)}" for file, shape in others[:_NAMED]]
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise BadData(
            f"{folder}: {len(others)} of {len(files)} pictures are not {wanted.text}, which the network takes: "
            f"{', '.join(named)}{more}.",
            hint=misfit_hint(others[0][1], wanted),
        )


def _below(folder: Path) -> tuple[list[Path], int]:
    """The pictures below a folder, and how many files are none. Links to folders may lead in a circle."""
    files: list[Path] = []
    others = 0
    for entry in entries(folder, most=LARGEST_FILE_COUNT):
        if entry.is_dir():
            if not entry.is_symlink():
                found, rest = _below(entry)
                files, others = files + found, others + rest
        elif entry.suffix.lower() in SUFFIXES:
            files.append(entry)
        else:
            others += 1
    return files, others


def _data_set(source: str, wanted: SampleForm | Mapping[str, SampleForm]) -> SampleSource:
    """The held-out samples; all of them where none are."""
    sets = load(source, input_shape=wanted.shape if isinstance(wanted, SampleForm) else None)
    data: Any = sets.test if sets.test is not None else sets.train

    def make(index: int) -> Sample:
        value = data[index][0]
        if isinstance(wanted, SampleForm) and isinstance(value, Tensor):
            if tuple(value.shape) != wanted.shape:
                raise misfit(f"{source}: sample {index}", tuple(value.shape), wanted)
            return value.to(wanted.dtype)
        made: Sample = value
        return made

    targets = [int(data[index][1]) for index in range(len(data))] if sets.num_classes and not sets.has_boxes else ()
    part = "held-out " if sets.test is not None else ""
    return SampleSource(
        len(data), make, lambda index: f"{sets.name}[{index}]", targets=targets,
        note=f"The {len(data)} {part}samples of {sets.name}.",
    )  # fmt: skip
