"""Samples as JSON: nested lists of numbers, alone or as {"inputs": ...}. One sample, or several in one more list.

How many numbers and lists there are, and how deeply they are nested, is counted in the text before anything is made of
it: two letters of JSON become thirty bytes of Python.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

from manyhands.data.sample_arrays import of_array
from manyhands.data.wanted import SampleForm, SampleSource
from manyhands.facts.errors import BadData, BadFile
from manyhands.facts.units import format_bytes
from manyhands.files.json_memory import structure_bytes

LARGEST_FILE_BYTES = 64 * 10**6
LARGEST_DECODED_BYTES = 256 * 10**6
DEEPEST = 8
"""The most lists within lists."""
_NUMBER_BYTES = 32
"""The memory that Python takes for one number."""
_KEY = b'"inputs"'
_MARK = b"\xef\xbb\xbf"
_OBJECT = re.compile(rb"\s*\{")
_OPENING = re.compile(rb"[\s\[]*")
_SNIFFED = re.compile(rb"(?:\xef\xbb\xbf)?\s*[\[{]")
_HOW = 'Nested lists of numbers are read: [[...]] or {"inputs": [[...]]}.'
LARGER = "Give fewer samples at a time, or a .npy file, which takes less: numpy.save('samples.npy', x)."


class _Inputs(msgspec.Struct, forbid_unknown_fields=True):
    """A document {"inputs": ...}, whatever it holds."""

    inputs: msgspec.Raw


def looks_like_json(content: bytes) -> bool:
    """Return whether bytes begin as a list or an object does, which no picture and no array file do."""
    return _SNIFFED.match(content) is not None


def read_json_file(path: Path, form: SampleForm) -> SampleSource:
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise BadFile(f"{path}: is not a plain file.")
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}.") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise BadData(f"{path}: more than {format_bytes(LARGEST_FILE_BYTES)}, the most that is read.", hint=LARGER)
    needed = decoded_bytes(content)
    if needed > LARGEST_DECODED_BYTES:
        raise BadData(
            f"{path}: its numbers and lists take {format_bytes(needed)} decoded; at most "
            f"{format_bytes(LARGEST_DECODED_BYTES)} are read.",
            hint=LARGER,
        )
    return read_json(content, str(path), form)


def decoded_bytes(content: bytes) -> int:
    """Return about how much memory the numbers and lists of a JSON text take once it is decoded."""
    return structure_bytes(content, _NUMBER_BYTES)


def read_json(content: bytes, name: str, form: SampleForm) -> SampleSource:
    """Return the samples of a JSON text whose `decoded_bytes` are few enough, if they are what the network takes.
    Numbers are taken as they are: 0 to 255 are no pixels here."""
    try:
        array = _array(_inputs_in(content.removeprefix(_MARK)), form)
    except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
        raise BadData(f"{name}: {_plain(error)}.", hint=_HOW) from error
    except RecursionError as error:
        raise BadData(f"{name}: its lists are nested too deeply.", hint=_HOW) from error
    return of_array(name, array, form)


def _inputs_in(text: bytes) -> bytes | memoryview:
    """Return the lists alone: of {"inputs": ...} what comes after the key."""
    if _OBJECT.match(text) is None:
        return text
    if text.count(_KEY) > 1:
        raise ValueError("'inputs' is written twice")
    return memoryview(msgspec.json.decode(text, type=_Inputs).inputs)


def _array(text: bytes | memoryview, form: SampleForm) -> numpy.ndarray:
    """Return an array of as many axes as the first number is in lists; another depth elsewhere is no array."""
    opening = _OPENING.match(text)
    depth = opening.group().count(b"[") if opening is not None else 0
    if depth > DEEPEST:
        raise ValueError(f"its lists are nested more than {DEEPEST} deep")
    is_float = form.dtype.is_floating_point
    kind: Any = float if is_float else int
    for _ in range(depth):
        kind = list[kind]
    numbers = msgspec.json.decode(text, type=kind)
    stored: Any = numpy.int64
    if is_float:
        stored = numpy.float64 if form.dtype == torch.float64 else numpy.float32
    with numpy.errstate(over="ignore"):  # what becomes infinite is refused with the sample's number
        return numpy.asarray(numbers, stored)


def _plain(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0][:200].rstrip(".")
    if "inhomogeneous" in text:
        return "its lists are of different lengths, so that it is no array"
    return text.replace("`", "'")
