""".npz files: the shapes and kinds that are taken, and what is said of the others."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from manyhands.data import arrays
from manyhands.data.data_sets import DataSets
from manyhands.data.loader import example, length
from manyhands.data.sets import load
from manyhands.facts.errors import BadData, BadFile, BadValue, ManyhandsError
from manyhands.job.named import build_model, check_classes

LABELS = numpy.arange(20) % 4


def saved(folder: Path, **content: Any) -> str:
    numpy.savez_compressed(folder / "data.npz", **content)
    return str(folder / "data.npz")


def shape_of(sets: DataSets) -> tuple[int, ...]:
    value, _ = sets.train[0]
    assert tuple(value.shape) == sets.input_shape
    return sets.input_shape


@pytest.mark.parametrize(
    ("given", "kind", "asked", "made"),
    [
        ((20, 3, 8, 6), "uint8", None, (3, 8, 6)),
        ((20, 3, 8, 6), "float64", None, (3, 8, 6)),
        ((20, 8, 6), "uint8", None, (1, 8, 6)),
        ((20, 8, 6), "float32", None, (1, 8, 6)),
        ((20, 8, 6, 3), "uint8", None, (3, 8, 6)),
        ((20, 8, 6, 1), "uint8", (1, 16, 16), (1, 16, 16)),
        ((20, 3, 6, 3), "uint8", None, (3, 6, 3)),
        ((20, 8, 6, 3), "float32", None, (8, 6, 3)),
        ((20, 3, 8, 6), "float16", (3, 4, 12), (3, 4, 12)),
        ((20, 8, 6), "float32", (8, 6), (8, 6)),
        ((20, 50), "int32", (50,), (50,)),
        ((20, 50), ">f4", None, (50,)),
        ((20, 50), ">i2", None, (50,)),
    ],
)
def test_shapes(
    tmp_path: Path, given: tuple[int, ...], kind: str, asked: tuple[int, ...] | None, made: tuple[int, ...]
) -> None:
    x = numpy.random.default_rng(0).integers(0, 255, given).astype(kind)
    sets = load(saved(tmp_path, x=x, y=LABELS), input_shape=asked)
    assert shape_of(sets) == made
    inputs, targets = example(sets.train, 4)
    assert inputs.dtype == (torch.int64 if "i" in kind and kind != "uint8" else torch.float32)
    assert targets.dtype == torch.int64
    assert (sets.num_classes, sets.classes) == (4, ("0", "1", "2", "3"))


def test_bytes_are_scaled_floats_are_not(tmp_path: Path) -> None:
    x = numpy.zeros((20, 2, 2, 3), dtype=numpy.uint8)
    x[..., 1] = 255
    value, _ = load(saved(tmp_path, x=x, y=LABELS)).train[0]
    assert value[:, 0, 0].tolist() == [-1.0, 1.0, -1.0], "channels first, from -1 to 1"
    value, _ = load(saved(tmp_path, x=x.astype(float) * 2, y=LABELS)).train[0]
    assert float(value.max()) == 510.0


def test_each_sample_keeps_its_target(tmp_path: Path) -> None:
    x = numpy.repeat(numpy.arange(20.0)[:, None], 3, axis=1)
    sets = load(saved(tmp_path, images=x, labels=LABELS))
    assert sets.test is not None
    seen = [sets.train[i] for i in range(length(sets.train))] + [sets.test[i] for i in range(length(sets.test))]
    assert sorted(float(value[0]) for value, _ in seen) == list(range(20))
    assert all(int(value[0]) % 4 == int(label) for value, label in seen)
    assert length(sets.test) == 4


def test_own_test_arrays_are_kept_apart(tmp_path: Path) -> None:
    x, y = numpy.zeros((20, 5)), LABELS
    sets = load(saved(tmp_path, x_train=x, y_train=y, x_test=x[:3] + 1, y_test=numpy.array([0, 1, 6]), more=y))
    assert sets.test is not None
    assert (length(sets.train), length(sets.test), sets.num_classes) == (20, 3, 7)
    assert float(sets.test[0][0][0]) == 1.0
    assert length(load(saved(tmp_path, x_train=x, y_train=y)).train) == 16


def test_float_targets_of_any_shape(tmp_path: Path) -> None:
    sets = load(saved(tmp_path, x=numpy.zeros((20, 5)), y=numpy.ones((20, 2, 3))))
    assert (sets.num_classes, sets.classes) == (0, ())
    assert example(sets.train, 4)[1].shape == (4, 2, 3)
    assert example(sets.train, 4)[1].dtype == torch.float32


def test_too_few_to_hold_any_out(tmp_path: Path) -> None:
    assert load(saved(tmp_path, x=numpy.zeros((4, 5)), y=numpy.arange(4))).test is None


@pytest.mark.slow
def test_fifty_thousand_classes_have_held_out_samples(tmp_path: Path) -> None:
    """One sample of each: none of a class could be spared, and the accuracy was gone without a word."""
    sets = load(saved(tmp_path, x=numpy.zeros((50_000, 2)), y=numpy.arange(50_000)))
    assert sets.test is not None
    assert (length(sets.train), length(sets.test), sets.num_classes) == (40_000, 10_000, 50_000)


ZEROS = numpy.zeros((20, 1, 4, 4), dtype=numpy.float32)
WITH_NAN = ZEROS.copy()
WITH_NAN[7, 0, 1, 1] = numpy.nan
NEGATIVE = LABELS.copy()
NEGATIVE[11] = -1


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"inputs": ZEROS, "y": LABELS}, r"has no x; it holds inputs, y"),
        ({"a": ZEROS}, r"has no x and no y; it holds a"),
        ({}, "it holds no arrays"),
        ({"x": ZEROS, "labels": LABELS}, r"has no y; it holds labels, x"),
        ({"x_train": ZEROS, "y_train": LABELS, "x_test": ZEROS}, "has no y_test"),
        ({"x_train": ZEROS, "y_train": LABELS, "y_test": LABELS}, "has no x_test"),
        ({"x": ZEROS, "y": LABELS[:-1]}, "x has 20 samples; y has 19"),
        ({"x": ZEROS[:0], "y": LABELS[:0]}, "no sample in it"),
        ({"x": numpy.array(3.0), "y": LABELS}, r"x has the shape \(\): there is no sample"),
        ({"x": numpy.zeros(20), "y": LABELS}, r"x has the shape \(20,\): one number is no sample"),
        ({"x": WITH_NAN, "y": LABELS}, "x has a NaN or infinite value in sample 7"),
        ({"x": ZEROS + numpy.inf, "y": LABELS}, "infinite value in sample 0"),
        ({"x": ZEROS.astype(float) + 1e300, "y": LABELS}, "infinite value in sample 0"),
        ({"x": ZEROS, "y": numpy.where(LABELS == 3, numpy.nan, 1.0)}, "y has a NaN or infinite value in sample 3"),
        ({"x": ZEROS, "y": NEGATIVE}, "y is -1 for sample 11; class numbers start at 0"),
        ({"x": ZEROS, "y": LABELS + 10**12}, "y is 1000000000000 for sample 0"),
        ({"x": ZEROS, "y": LABELS[:, None]}, r"y has the shape \(20, 1\); class numbers have the shape \(20,\)"),
        ({"x": ZEROS, "y": LABELS.astype(str)}, "y holds <U21; targets are class numbers"),
        ({"x": ZEROS.astype(str), "y": LABELS}, "x holds <U32; inputs are numbers"),
        ({"x": ZEROS.astype(complex), "y": LABELS}, "x holds complex128"),
        ({"x": ZEROS.astype("uint16"), "y": LABELS}, "x holds uint16 pictures"),
        ({"x": numpy.array([None] * 20), "y": LABELS}, "x holds Python objects"),
        (
            {"x_train": ZEROS, "y_train": LABELS, "x_test": ZEROS[..., :2], "y_test": LABELS},
            r"\(1, 4, 4\); .*\(1, 4, 2\)",
        ),
        (
            {"x_train": ZEROS, "y_train": LABELS, "x_test": ZEROS, "y_test": LABELS * 0.5},
            "y_train is torch.int64; y_test",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(BadData, match=message) as caught:
        load(saved(tmp_path, **content))
    assert "data.npz" in caught.value.message


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((20, 1, 4, 4), (3, 8, 8)),
        ((20, 4, 4, 3), (3, 8, 8)),
        ((20, 1, 4, 4), (16,)),
        ((20, 16), (1, 4, 4)),
        ((20, 5), (6,)),
    ],
)
def test_both_shapes_are_told_where_they_differ(tmp_path: Path, given: tuple[int, ...], asked: tuple[int, ...]) -> None:
    with pytest.raises(BadData) as caught:
        load(saved(tmp_path, x=numpy.zeros(given), y=LABELS), input_shape=asked)
    assert str(asked) in caught.value.message
    assert str(given[1:]) in caught.value.message


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(b"hello")
    with pytest.raises(BadFile, match=r"is not a \.npz file"):
        load(str(path))
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("x.npy", "no array")
        packed.writestr("y.npy", "no array")
    with pytest.raises(BadFile, match="x is not an array"):
        load(str(path))
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("x.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (10**5")
        packed.writestr("y.npy", "no array")
    with pytest.raises(BadFile, match="cannot be read"):
        load(str(path))


def test_torn_files_are_an_error_wherever_they_are_torn(tmp_path: Path) -> None:
    path = Path(saved(tmp_path, x=numpy.random.default_rng(0).random((20, 5)), y=LABELS))
    whole = path.read_bytes()
    for kept in range(0, len(whole), 37):
        path.write_bytes(whole[:kept])
        with pytest.raises(ManyhandsError):
            load(str(path))


def test_changed_bytes_are_an_error_or_harmless(tmp_path: Path) -> None:
    path = Path(saved(tmp_path, x=numpy.random.default_rng(0).random((20, 5)), y=LABELS))
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 11):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            load(str(path))
        except ManyhandsError:
            refused += 1
    assert refused > 20


def test_a_file_that_unpacks_to_too_much_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, x=ZEROS, y=LABELS)
    monkeypatch.setattr(arrays, "LARGEST_ARRAYS_BYTES", 1000)
    with pytest.raises(BadData, match="unpacked; at most"):
        load(path)


def test_resizing_is_bilinear() -> None:
    data = arrays.ArrayData(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]), torch.zeros(1), size=(2, 4))
    assert data[0][0][0, 0].tolist() == pytest.approx([0.0, 0.25, 0.75, 1.0])


@pytest.mark.parametrize(
    ("given", "taken", "hint"),
    [
        ((3, 20, 20), (1, 16, 16), r"3 are given, 1 taken.*--input 3x16x16.*x\.mean\(axis=1, keepdims=True\)"),
        ((1, 20, 20), (3, 16, 16), r"1 are given, 3 taken.*--input 1x16x16.*x\.repeat\(3, axis=1\)"),
        ((20, 20, 3), (3, 16, 16), r"^Channels come first: x\.transpose\(0, 3, 1, 2\)"),
        ((8,), (1, 16, 16), "^Give samples of the model's shape"),
    ],
)
def test_samples_of_another_shape(tmp_path: Path, given: tuple[int, ...], taken: tuple[int, ...], hint: str) -> None:
    """Both shapes, and to move the channels only where that would help."""
    path = saved(tmp_path, x=numpy.zeros((20, *given), "float32"), y=LABELS)
    with pytest.raises(BadData) as caught:
        load(path, input_shape=taken)
    assert f"x has samples of shape {given}; the model takes {taken}" in caught.value.message
    assert re.search(hint, caught.value.hint), caught.value.hint
    assert ("transpose" in caught.value.hint) == (given[-1] == taken[0])


@pytest.mark.parametrize(
    ("y", "said", "hint"),
    [
        (
            LABELS.astype("float32"),
            "tiny gives 10 for a sample; the target of it is one number, 0 for the first",
            "int64",
        ),
        (numpy.full((20, 3), 0.5), "the target of it is 3, 0.5 for the first, as float32", "of the shape"),
    ],
)
def test_numbers_that_the_output_has_no_place_for(tmp_path: Path, y: Any, said: str, hint: str) -> None:
    sets = load(saved(tmp_path, x=numpy.zeros((20, 1, 16, 16), "float32"), y=y))
    with pytest.raises(BadValue, match=said) as caught:
        check_classes(build_model("tiny", sets), "tiny", "it", sets)
    assert hint in caught.value.hint
