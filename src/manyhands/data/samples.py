"""Samples to run a network on: a folder of pictures, one picture, arrays, or the held-out part of a data set.

Bytes from 0 to 255 become numbers by the mean and deviation that the network was trained with. Pictures and arrays of
another height and width are resized only where the caller requested it (wanted.py); a data set by name is the same
as in training.
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


def read_samples(source: str, form: SampleForm | Mapping[str, SampleForm]) -> SampleSource:
    """Return the samples of a folder of pictures, one picture, .npy, .npz, .json, or the held-out part of a data set by
    name.

    `form` maps each argument to its form where the network takes several; then a .npz file has an array for each.
    """
    path = Path(source).expanduser()
    if source in (*NAMES, *STAND_INS):
        return _data_set(source, form)
    if not path.exists():
        raise BadFile(
            f"{source}: there is no such file, folder or data set.",
            hint=f"Give a folder of pictures, a picture, a .npy, .npz or .json file, or {', '.join(NAMES)}.",
        )
    suffix = path.suffix.lower()
    if not isinstance(form, SampleForm):
        if suffix != ".npz":
            raise BadData(
                f"{path}: the network takes several arrays for a sample: {', '.join(form)}.",
                hint=f"Write them with numpy.savez('samples.npz', {', '.join(f'{key}={key}' for key in form)}).",
            )
        return read_several(path, form)
    if path.is_dir():
        from manyhands.data.cifar import cifar_root

        return _data_set(source, form) if cifar_root(path) is not None else _folder(path, form)
    if suffix == ".npy":
        return read_npy(path, form)
    if suffix == ".json":
        return read_json_file(path, form)
    if suffix == ".npz":
        from manyhands.data.cifar import is_jpeg_copy

        return _data_set(source, form) if is_jpeg_copy(path) else read_npz(path, form)
    _check_pictures(str(path), form)
    return SampleSource(1, lambda index: read_picture(path, str(path), form), lambda index: path.name)


# Pictures


def read_picture(
    source: Path | bytes, name: str, form: SampleForm, *, largest_pixel_count: int = LARGEST_PIXEL_COUNT
) -> Tensor:
    """Return one picture, decoded as for training. One of another height or width is resized where `form` says so."""
    _check_pictures(name, form)
    channels, height, width = form.shape
    mode, decoder = "RGB" if channels == 3 else "L", pillow()
    with _opened(source, name, largest_pixel_count) as image:
        if not form.resize and (image.height, image.width) != (height, width):
            raise misfit(name, (channels, image.height, image.width), form)
        image.draft(mode, (2 * width, 2 * height))  # a large JPEG need not be decoded in full
        pixels = eight_bits(image).convert(mode).resize((width, height), decoder.Resampling.BILINEAR)
    array = numpy.array(pixels, dtype=numpy.float32).reshape(height, width, channels)
    value = torch.from_numpy(array).permute(2, 0, 1).contiguous()
    return ((value / 255 - form.mean) / form.deviation).to(form.dtype)


@contextmanager
def _opened(source: Path | bytes, name: str, largest_pixel_count: int = LARGEST_PIXEL_COUNT) -> Iterator[Any]:
    """Open a picture of which the header is read, not its pixels yet. A picture that Pillow cannot decode is refused by
    name."""
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


def _check_pictures(name: str, form: SampleForm) -> None:
    if not form.takes_pictures:
        raise BadData(
            f"{name}: pictures have 1 or 3 channels, a height and a width; the network takes {form.text}.", hint=HOW
        )


def _folder(folder: Path, form: SampleForm) -> SampleSource:
    """Return every picture below a folder, by name; all are checked first, so that the last one cannot end a long
    job."""
    _check_pictures(str(folder), form)
    files, others = _below(folder)
    if not files:
        beside = f"; {others} other file(s)" if others else ""
        raise BadData(f"{folder}: there is no picture in it{beside}.", hint=f"Looked for: {', '.join(SUFFIXES)}.")
    check_all(folder, files)
    if not form.resize:
        _check_sizes(folder, files, form)
    return SampleSource(
        len(files),
        lambda index: read_picture(files[index], str(files[index]), form),
        lambda index: files[index].relative_to(folder).as_posix(),
        note=f"{others} file(s) in {folder} are no pictures by their names and were left out." if others else "",
    )


def _check_sizes(folder: Path, files: list[Path], form: SampleForm) -> None:
    """Refuse pictures without the network's height and width, going by their headers."""

    def shape(file: Path) -> tuple[int, ...]:
        with _opened(file, str(file)) as image:
            return form.shape[0], image.height, image.width

    with ThreadPoolExecutor(_THREADS) as threads:
        shapes = list(threads.map(shape, files))
    others = [(file, shape) for file, shape in zip(files, shapes) if shape != form.shape]
    if others:
        named = [f"{file.relative_to(folder).as_posix()} is {shape_text(shape)}" for file, shape in others[:_NAMED]]
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise BadData(
            f"{folder}: {len(others)} of {len(files)} pictures are not {form.text}, which the network takes: "
            f"{', '.join(named)}{more}.",
            hint=misfit_hint(others[0][1], form),
        )


def _below(folder: Path) -> tuple[list[Path], int]:
    """Return the pictures below a folder, and how many files are none. Links to folders may lead in a circle."""
    files: list[Path] = []
    others = 0
    for entry in entries(folder, most=LARGEST_FILE_COUNT):
        if entry.is_dir():
            if not entry.is_symlink():
                pictures_below, others_below = _below(entry)
                files, others = files + pictures_below, others + others_below
        elif entry.suffix.lower() in SUFFIXES:
            files.append(entry)
        else:
            others += 1
    return files, others


def _data_set(source: str, form: SampleForm | Mapping[str, SampleForm]) -> SampleSource:
    """Return the held-out samples, or all where none are held out."""
    sets = load(source, input_shape=form.shape if isinstance(form, SampleForm) else None)
    data: Any = sets.test if sets.test is not None else sets.train

    def make(index: int) -> Sample:
        value = data[index][0]
        if isinstance(form, SampleForm) and isinstance(value, Tensor):
            if tuple(value.shape) != form.shape:
                raise misfit(f"{source}: sample {index}", tuple(value.shape), form)
            return value.to(form.dtype)
        made: Sample = value
        return made

    targets = [int(data[index][1]) for index in range(len(data))] if sets.num_classes and not sets.has_boxes else ()
    part = "held-out " if sets.test is not None else ""
    return SampleSource(
        len(data), make, lambda index: f"{sets.name}[{index}]", targets=targets,
        note=f"The {len(data)} {part}samples of {sets.name}.",
    )  # fmt: skip
