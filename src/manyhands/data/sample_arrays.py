"""Arrays of one sample, or of several on their first axis (.npy, .npz). Nothing is unpickled.

Shapes, types and sizes are checked before memory is allocated. As in training, bytes become numbers by a mean and a
deviation; unlike there, an array of another shape is refused, and resized only where the caller requested it
(wanted.py).
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from manyhands.data.arrays import LARGEST_ARRAYS_BYTES
from manyhands.data.packed import check_room, reading
from manyhands.data.wanted import Sample, SampleForm, SampleSource, misfit
from manyhands.facts.errors import BadData, BadFile

MAGIC = b"\x93NUMPY"
HOW = "Write samples with numpy.save('samples.npy', x), several of them on the first axis."
_START = struct.Struct("<6sBBH")
_LONGEST_HEADER = 10_000
_FIELDS = tuple(
    re.compile(rb"['\"]%s['\"]\s*:\s*%s" % (key, value))
    for key, value in (
        (b"descr", rb"['\"]([<>|=]?[a-zA-Z]\d{0,3})['\"]"),
        (b"fortran_order", rb"(True|False)"),
        (b"shape", rb"\(([\d\s,]*)\)"),
    )
)
_KEYS = ("x_test", "x", "images", "inputs", "x_train")


def shape_in(source: str) -> tuple[int, ...] | None:
    """Return the shape of one sample where the file says it: arrays do, pictures are made to fit."""
    path = Path(source).expanduser()
    if path.suffix.lower() not in (".npy", ".npz") or not path.is_file():
        return None
    with reading(path, hint=HOW):
        if path.suffix.lower() == ".npy":
            with open(path, "rb") as file:
                return _header(path.name, file)[0][1:]
        if not zipfile.is_zipfile(path):
            raise BadFile(f"{path}: is not a .npz file.", hint=HOW)
        with zipfile.ZipFile(path) as packed, packed.open(f"{_chosen_key(path, packed)}.npy") as file:
            return _header(path.name, file)[0][1:]


def read_array(content: bytes, name: str, form: SampleForm) -> SampleSource:
    """Return the samples in the bytes of a .npy file: one, or several on the first axis."""
    file = io.BytesIO(content)
    with _blamed(name):
        shape, dtype, is_fortran = _header(name, file)
        start = file.tell()
        needed = math.prod(shape) * dtype.itemsize
        if len(content) - start != needed:
            raise BadData(
                f"{name}: {'x'.join(map(str, shape))} of {dtype} are {needed:,} bytes; {len(content) - start:,} came."
            )
        array = numpy.frombuffer(content, dtype, offset=start).reshape(shape, order="F" if is_fortran else "C")
    return of_array(name, array, form)


def read_npy(path: Path, form: SampleForm) -> SampleSource:
    """Return the samples in a .npy file, whose pages are read when a sample is."""
    with reading(path, hint=HOW):
        if not path.is_file():
            raise BadFile(f"{path}: is not a plain file.")
        with open(path, "rb") as file:
            _header(str(path), file)
        array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    return of_array(str(path), array, form)


def read_npz(path: Path, form: SampleForm) -> SampleSource:
    return of_array(str(path), _unpacked(path, "", form), form)


def read_several(path: Path, forms: Mapping[str, SampleForm]) -> SampleSource:
    """Return samples with an array for each of the network's arguments."""
    arrays = {key: of_array(f"{path}: {key}", _unpacked(path, key, form), form) for key, form in forms.items()}
    counts = {key: len(samples) for key, samples in arrays.items()}
    if len(set(counts.values())) > 1:
        raise BadData(f"{path}: the arrays have different numbers of samples: {counts}.")

    def make(index: int) -> Sample:
        made: dict[str, Any] = {key: samples[index] for key, samples in arrays.items()}
        return made

    return SampleSource(next(iter(counts.values())), make, lambda index: f"{path.name}[{index}]")


def _unpacked(path: Path, key: str, form: SampleForm) -> numpy.ndarray:
    """Return one array of a .npz file, after checking its header."""
    with reading(path, hint=HOW):
        if not zipfile.is_zipfile(path):
            raise BadFile(f"{path}: is not a .npz file.", hint=HOW)
        with zipfile.ZipFile(path) as packed:
            key = _chosen_key(path, packed, key)
            entry = packed.getinfo(f"{key}.npy")
            with packed.open(entry) as file:
                shape, dtype, _ = _header(f"{path}: {key}", file)
                start = file.tell()
        needed = math.prod(shape) * dtype.itemsize
        if needed != entry.file_size - start:
            raise BadFile(f"{path}: {key} is cut off, or not what it says.", hint=HOW)
        hint = "A .npy file is read piece by piece: numpy.save('samples.npy', x)."
        check_room(path, needed, LARGEST_ARRAYS_BYTES, hint=hint)
        _fitted(f"{path}: {key}", numpy.broadcast_to(numpy.empty((), dtype), shape), form)
        with numpy.load(path, allow_pickle=False) as arrays:
            array: numpy.ndarray = arrays[key]
            return array


def _chosen_key(path: Path, packed: zipfile.ZipFile, key: str = "") -> str:
    names = [name.removesuffix(".npy") for name in packed.namelist() if name.endswith(".npy")]
    chosen = [key] if key else [usual for usual in _KEYS if usual in names] or (names if len(names) == 1 else [])
    if not chosen or chosen[0] not in names:
        expected = key or " or ".join(_KEYS)
        raise BadData(f"{path}: has no {expected}; it holds {', '.join(names[:20]) or 'no arrays'}.", hint=HOW)
    return chosen[0]


def _header(name: str, file: IO[bytes]) -> tuple[tuple[int, ...], numpy.dtype[Any], bool]:
    """Return the shape, the type, and whether the first index runs fastest.

    numpy reads a header as Python's own syntax, whose reader several threads cannot use at once before Python 3.12.
    """
    start = file.read(_START.size)
    if len(start) < _START.size or not start.startswith(MAGIC):
        raise BadFile(f"{name}: is not a .npy array.", hint=HOW)
    _, major, _, length = _START.unpack(start)
    if major in (2, 3):
        length += int.from_bytes(file.read(2), "little") << 16
    text = file.read(length) if length <= _LONGEST_HEADER else b""
    matches = [pattern.search(text) for pattern in _FIELDS]
    if major not in (1, 2, 3) or not all(matches):
        raise BadFile(f"{name}: is no array of numbers.", hint=HOW)
    kind, order, extents = (match.group(1).decode() for match in matches if match is not None)
    if kind.endswith("O"):
        raise BadData(
            f"{name}: holds Python objects, which are not read: they could be programs.",
            hint="Make it an array of numbers first: numpy.stack(list(x)).",
        )
    try:
        dtype = numpy.dtype(kind)
    except TypeError as error:
        raise BadFile(f"{name}: holds '{kind}', which numpy does not know.", hint=HOW) from error
    return tuple(int(extent) for extent in extents.split(",") if extent.strip()), dtype, order == "True"


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    """Raise an error that names the bytes, for what numpy raises of bytes that are no array."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise BadData(f"{name}: is no .npy array: {str(error)[:200]}.", hint=HOW) from error


def of_array(name: str, array: numpy.ndarray, form: SampleForm) -> SampleSource:
    """Return the samples of an array, each made when it is read."""
    fitted = _fitted(name, array, form)
    short = Path(name).name
    return SampleSource(
        len(fitted),
        lambda index: _sample(f"{name}, sample {index}", numpy.asarray(fitted[index]), form),
        lambda index: f"{short}[{index}]",
    )


def _fitted(name: str, array: numpy.ndarray, form: SampleForm) -> numpy.ndarray:
    """Return a view with samples first, if the network can take them."""
    floats = form.dtype.is_floating_point
    if array.dtype.kind not in ("fiub" if floats else "iub"):
        kind = "numbers" if floats else "whole numbers"
        raise BadData(f"{name} holds {array.dtype}; the network takes {kind}.", hint="Convert it: x.astype('float32').")
    if array.size == 0:
        raise BadData(f"{name} has the shape {array.shape}: there is no sample in it.", hint=HOW)
    if array.ndim not in (len(form.shape), len(form.shape) + 1):
        raise misfit(name, array.shape, form)
    samples = array[None] if array.ndim == len(form.shape) else array
    is_resized = form.resize and samples.shape[1] == form.shape[0]
    if samples.shape[1:] != form.shape and not is_resized:
        raise misfit(name, array.shape, form)
    if form.can_resize and array.dtype.kind in "iub" and array.dtype != numpy.uint8:
        raise BadData(f"{name} holds {array.dtype} pictures.", hint="Use uint8 for pixels from 0 to 255, else float32.")
    return samples


def _sample(name: str, array: numpy.ndarray, form: SampleForm) -> Tensor:
    if not form.dtype.is_floating_point:
        return torch.from_numpy(array.astype(numpy.int64)).to(form.dtype)
    number_type = numpy.float64 if form.dtype == torch.float64 else numpy.float32
    with numpy.errstate(over="ignore"):
        value = torch.from_numpy(array.astype(number_type))
    if array.dtype == numpy.uint8:
        value = (value / 255 - form.mean) / form.deviation
    elif not torch.isfinite(value).all():
        raise BadData(f"{name} has a NaN or infinite value.", hint="Fill the gaps with numpy.nan_to_num.")
    if tuple(value.shape) != form.shape:
        value = functional.interpolate(value[None], form.shape[1:], mode="bilinear", antialias=True)[0]
    return value.to(form.dtype)
