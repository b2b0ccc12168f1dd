"""A .npz file of inputs and targets as a data set. Nothing is unpickled."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, Subset

from manyhands.data.data_sets import DataSets
from manyhands.data.packed import check_room, reading, sizes_of
from manyhands.data.split import held_out
from manyhands.facts.errors import BadData, BadFile

LARGEST_ARRAYS_BYTES = 32 * 10**9
LARGEST_CLASS_COUNT = 100_000
PIXEL_MEAN = 0.5
PIXEL_STANDARD_DEVIATION = 0.5
_KEYS = (("x_train", "y_train"), ("x", "y"), ("images", "labels"))
_TEST_KEYS = ("x_test", "y_test")
_SAMPLES_AT_ONCE = 1024
_HOW = "Write it with numpy.savez(path, x=x, y=y), or x_train, y_train, x_test and y_test."


class ArrayData(Dataset[tuple[Tensor, Tensor]]):
    """A data set held in memory. Bytes become numbers, and pictures get their size, only when they are read."""

    def __init__(self, inputs: Tensor, targets: Tensor, *, size: tuple[int, int] | None = None) -> None:
        self.inputs = inputs
        self.targets = targets
        self._size = None if size == tuple(inputs.shape[2:]) else size

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = self.inputs[index]
        if value.dtype == torch.uint8:
            value = (value.float() / 255 - PIXEL_MEAN) / PIXEL_STANDARD_DEVIATION
        if self._size is not None:
            value = functional.interpolate(value[None], self._size, mode="bilinear", antialias=True)[0]
        return value, self.targets[index]


def load_arrays(path: Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load inputs under x, x_train or images; targets under y, y_train or labels; tests under x_test and y_test."""
    arrays = _read(path)
    train_keys = next(keys for keys in _KEYS if keys[0] in arrays)
    train = _samples(path, arrays, train_keys, input_shape)
    labelled = not train.targets.is_floating_point()
    if _TEST_KEYS[0] in arrays:
        test = _samples(path, arrays, _TEST_KEYS, input_shape)
        _check_alike(path, train, test)
        num_classes = int(max(train.targets.max(), test.targets.max())) + 1 if labelled else 0
        train_set: Dataset[Any] = train
        test_set: Dataset[Any] | None = test
    else:
        num_classes = int(train.targets.max()) + 1 if labelled else 0
        chosen, held_out_indices = held_out(train.targets.tolist() if labelled else [0] * len(train))
        train_set = Subset(train, chosen)
        test_set = Subset(train, held_out_indices) if held_out_indices else None
    return DataSets(
        name=path.stem,
        train=train_set,
        test=test_set,
        num_classes=num_classes,
        input_shape=input_shape or tuple(train.inputs.shape[1:]),
        classes=tuple(str(number) for number in range(num_classes)),
    )


def _read(path: Path) -> dict[str, numpy.ndarray]:
    """Return the arrays of which a data set is made, and no others."""
    with reading(path, hint=_HOW, memory_hint="A folder of pictures is read piece by piece."):
        if not path.is_file():
            raise BadFile(f"{path}: there is no such file.")
        if not zipfile.is_zipfile(path):
            raise BadFile(f"{path}: is not a .npz file.", hint=_HOW)
        sizes = sizes_of(path)
        keys = _wanted(path, list(sizes))
        total_bytes = sum(sizes[key] for key in keys)
        check_room(path, total_bytes, LARGEST_ARRAYS_BYTES, hint="A folder of pictures is read piece by piece.")
        with numpy.load(path, allow_pickle=False) as packed_arrays:
            return {key: _array(path, packed_arrays, key) for key in keys}


def _wanted(path: Path, names: list[str]) -> list[str]:
    pair = next((pair for pair in _KEYS if pair[0] in names), None)
    pairs = [pair, _TEST_KEYS] if pair and set(names) & set(_TEST_KEYS) else [pair or ("x", "y")]
    keys = [key for pair in pairs for key in pair]
    missing = [key for key in keys if key not in names]
    if missing:
        holds = ", ".join(sorted(names)[:20]) or "no arrays"
        raise BadData(f"{path}: has no {' and no '.join(missing)}; it holds {holds}.", hint=_HOW)
    return keys


def _array(path: Path, packed: Any, key: str) -> numpy.ndarray:
    try:
        array = packed[key]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise BadData(
            f"{path}: {key} holds Python objects, which are not read: they could be programs.",
            hint=f"Make it an array of numbers first: numpy.stack(list({key})).",
        ) from error
    if not isinstance(array, numpy.ndarray):
        raise BadFile(f"{path}: {key} is not an array.", hint=_HOW)
    return array


def _samples(
    path: Path, arrays: dict[str, numpy.ndarray], keys: tuple[str, str], input_shape: tuple[int, ...] | None
) -> ArrayData:
    input_key, target_key = keys
    inputs, targets = arrays[input_key], arrays[target_key]
    for key, array in ((input_key, inputs), (target_key, targets)):
        if array.ndim == 0 or array.size == 0:
            raise BadData(f"{path}: {key} has the shape {array.shape}: there is no sample in it.")
    if len(inputs) != len(targets):
        raise BadData(
            f"{path}: {input_key} has {len(inputs)} samples; {target_key} has {len(targets)}.",
            hint="Each sample needs one target, in the same order.",
        )
    made = _inputs(f"{path}: {input_key}", inputs, input_shape)
    size = (input_shape[1], input_shape[2]) if input_shape is not None and len(input_shape) == 3 else None
    return ArrayData(made, _targets(f"{path}: {target_key}", targets), size=size)


def _inputs(subject: str, array: numpy.ndarray, input_shape: tuple[int, ...] | None) -> Tensor:
    """Return samples of one shape: pictures with their channels first, or rows of numbers as they are."""
    full_shape = array.shape
    if array.dtype.kind not in "fiub":
        raise BadData(f"{subject} holds {array.dtype}; inputs are numbers.", hint="Use uint8 for pixels, else float32.")
    if array.ndim == 1:
        raise BadData(
            f"{subject} has the shape {full_shape}: one number is no sample.", hint="Give it the shape N x 1."
        )
    as_it_is = full_shape[1:] == input_shape
    if array.ndim == 3 and not as_it_is:
        array = array[:, None]
    elif array.ndim == 4 and array.dtype == numpy.uint8 and not as_it_is and _channels_last(full_shape):
        array = array.transpose(0, 3, 1, 2)
    if array.dtype.kind in "iub" and array.dtype != numpy.uint8 and array.ndim > 2 and not as_it_is:
        raise BadData(
            f"{subject} holds {array.dtype} pictures.", hint="Use uint8 for pixels from 0 to 255, else float32."
        )
    shape = array.shape[1:]
    resizable = input_shape is not None and len(shape) == len(input_shape) == 3 and shape[0] == input_shape[0]
    if min(shape) < 1 or (
        input_shape is not None and (min(input_shape) < 1 or (shape != input_shape and not resizable))
    ):
        raise BadData(
            f"{subject} has samples of shape {shape}; the model takes {input_shape}.", hint=_misfit(shape, input_shape)
        )
    if array.dtype.kind == "f":
        return _finite(subject, array)
    numbers = array if array.dtype == numpy.uint8 else array.astype(numpy.int64)
    return torch.from_numpy(numpy.ascontiguousarray(numbers))


def _misfit(shape: tuple[int, ...], input_shape: tuple[int, ...] | None) -> str:
    """Return a hint about samples of another shape: pictures are resized, so that only their channels can be wrong."""
    if input_shape is None or len(shape) != 3 or len(input_shape) != 3 or min(input_shape) < 1:
        return "Give samples of the model's shape, or the shape they have with --input, to a model that takes it."
    if shape[2] == input_shape[0]:
        return "Channels come first: x.transpose(0, 3, 1, 2) moves them from last to first."
    remedy = f"x.mean(axis=1, keepdims=True) makes {shape[0]} channels one" if input_shape[0] == 1 else ""
    remedy = f"x.repeat({input_shape[0]}, axis=1) makes one channel {input_shape[0]}" if shape[0] == 1 else remedy
    size = "x".join(map(str, (shape[0], *input_shape[1:])))
    return (
        f"Pictures are resized, but channels must agree: {shape[0]} are given, {input_shape[0]} taken. For a model "
        f"that can be built for {shape[0]}: --input {size}. {remedy}"
    ).strip()


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether the channels are the last axis; where both ends could be, the first is taken."""
    return shape[3] in (1, 3) and shape[1] not in (1, 3)


def _targets(subject: str, array: numpy.ndarray) -> Tensor:
    if array.dtype.kind == "f":
        return _finite(subject, array)
    if array.dtype.kind not in "iub":
        raise BadData(
            f"{subject} holds {array.dtype}; targets are class numbers or floats.",
            hint="Number the classes from 0: classes, y = numpy.unique(names, return_inverse=True).",
        )
    if array.ndim != 1:
        raise BadData(
            f"{subject} has the shape {array.shape}; class numbers have the shape ({len(array)},).",
            hint="Use one whole number a sample, or floats for targets of other shapes.",
        )
    for bad, rule in (
        (array < 0, "class numbers start at 0"),
        (array >= LARGEST_CLASS_COUNT, "that is no class number"),
    ):
        if bad.any():
            first = int(bad.argmax())
            raise BadData(
                f"{subject} is {array[first]} for sample {first}; {rule}.",
                hint="Number the classes from 0: classes, y = numpy.unique(y, return_inverse=True).",
            )
    return torch.from_numpy(array.astype(numpy.int64))


def _finite(subject: str, array: numpy.ndarray) -> Tensor:
    """Return floats in single precision, or refuse an array in which one is no number."""
    with numpy.errstate(over="ignore"):
        floats = torch.from_numpy(numpy.ascontiguousarray(array, dtype=numpy.float32))
    values = floats[0].numel()
    for start in range(0, len(floats), _SAMPLES_AT_ONCE):  # in parts: the results take memory too
        whole = torch.isfinite(floats[start : start + _SAMPLES_AT_ONCE]).reshape(-1, values).all(dim=1)
        if not whole.all():
            raise BadData(
                f"{subject} has a NaN or infinite value in sample {start + int(whole.int().argmin())}.",
                hint="Leave such samples out, or fill the gaps with numpy.nan_to_num.",
            )
    return floats


def _check_alike(path: Path, train: ArrayData, test: ArrayData) -> None:
    """Refuse tests of another shape or kind than the training samples."""
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        shapes = tuple(train.inputs.shape[1:]), tuple(test.inputs.shape[1:])
        raise BadData(f"{path}: the samples of x_train have the shape {shapes[0]}; those of x_test {shapes[1]}.")
    kinds = [(part.inputs.dtype, part.targets.dtype, tuple(part.targets.shape[1:])) for part in (train, test)]
    for array, first, second in zip(("x", "y", "y"), *kinds):
        if first != second:
            raise BadData(f"{path}: {array}_train is {first}; {array}_test is {second}.", hint="Both must be alike.")
