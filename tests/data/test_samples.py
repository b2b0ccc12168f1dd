"""Inputs of a network that runs: pictures and arrays become what training would have made of them, or are refused."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manyhands.data import sample_arrays
from manyhands.data.arrays import load_arrays
from manyhands.data.pictures import PictureData
from manyhands.data.sample_arrays import read_array, shape_in
from manyhands.data.samples import read_picture, read_samples
from manyhands.data.wanted import Sample, SampleForm
from manyhands.facts.errors import BadData, BadFile

COLOUR, GREY = SampleForm((3, 12, 10)), SampleForm((1, 16, 16))
RESIZED = {one: one.resizing() for one in (COLOUR, GREY)}


def drawn(*shape: int, seed: int = 0) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, shape).astype(numpy.uint8)


def packed(array: numpy.ndarray) -> bytes:
    file = io.BytesIO()
    numpy.save(file, array)
    return file.getvalue()


def tensor(sample: Sample) -> torch.Tensor:
    assert isinstance(sample, torch.Tensor)
    return sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of several kinds and sizes, one of them below, and a file that is none."""
    (tmp_path / "deep").mkdir()
    Image.fromarray(drawn(40, 30, 3)).save(tmp_path / "b.png")
    Image.fromarray(drawn(90, 120, 3, seed=1)).save(tmp_path / "a.jpg", quality=90)
    Image.fromarray(drawn(20, 20, seed=2)).save(tmp_path / "deep" / "c.bmp")
    Image.fromarray(drawn(9, 9).astype(numpy.uint16) * 256).save(tmp_path / "d.png")
    (tmp_path / "notes.txt").write_text("not a picture")
    return tmp_path


@pytest.mark.parametrize("wanted", [COLOUR, GREY], ids=["colour", "grey"])
def test_a_folder_is_read_as_for_training(folder: Path, wanted: SampleForm) -> None:
    """On request: pictures of many sizes are resized."""
    samples = read_samples(str(folder), RESIZED[wanted])
    names = [samples.name(index) for index in range(len(samples))]
    assert names == ["a.jpg", "b.png", "d.png", "deep/c.bmp"]
    assert "1 file(s)" in samples.note
    trained_on = PictureData([folder / name for name in names], [0] * 4, wanted.shape)
    for index, sample in enumerate(samples):
        assert torch.equal(tensor(sample), trained_on[index][0])


def test_bytes_and_a_file_are_the_same_picture(folder: Path) -> None:
    wanted = RESIZED[COLOUR]
    alone = read_samples(str(folder / "a.jpg"), wanted)
    assert len(alone) == 1
    assert torch.equal(tensor(alone[0]), read_picture((folder / "a.jpg").read_bytes(), "x", wanted))


def test_pictures_of_another_size_are_refused_unless_resizing_was_asked_for(folder: Path) -> None:
    """With both sizes and what to type; of a folder before the first is answered."""
    with pytest.raises(BadData, match=r"b\.png is 3x40x30; the network takes 3x12x10") as one:
        read_samples(str(folder / "b.png"), COLOUR)[0]
    assert "--resize" in one.value.hint
    assert "--shape 3x40x30" in one.value.hint
    with pytest.raises(
        BadData, match=r"4 of 4 pictures are not 3x12x10.*a\.jpg is 3x90x120, b\.png is 3x40x30"
    ) as all_of:
        read_samples(str(folder), COLOUR)
    assert "--resize" in all_of.value.hint
    (folder / "fitting").mkdir()
    Image.fromarray(drawn(12, 10, 3)).save(folder / "fitting" / "x.png")
    assert tensor(read_samples(str(folder / "fitting"), COLOUR)[0]).shape == COLOUR.shape


def test_the_mean_is_that_of_training(folder: Path) -> None:
    usual = tensor(read_samples(str(folder / "b.png"), RESIZED[COLOUR])[0])
    other = tensor(
        read_samples(str(folder / "b.png"), SampleForm(COLOUR.shape, torch.float64, 0.25, 2.0).resizing())[0]
    )
    assert other.dtype == torch.float64
    torch.testing.assert_close(other * 2 + 0.25, (usual * 0.5 + 0.5).double(), rtol=0, atol=1e-6)


def test_a_broken_picture_is_named(folder: Path) -> None:
    (folder / "deep" / "broken.jpg").write_bytes((folder / "a.jpg").read_bytes()[:500])
    with pytest.raises(BadData, match=r"deep/broken\.jpg"):
        read_samples(str(folder), COLOUR)
    with pytest.raises(BadData, match="from afar: the picture cannot be read"):
        read_picture(b"\x89PNG no picture", "from afar", COLOUR)


def test_a_picture_that_unpacks_to_too_much_is_refused() -> None:
    file = io.BytesIO()
    Image.new("L", (3000, 3000)).save(file, "PNG")
    with pytest.raises(BadData, match="9,000,000 pixels; at most 1,000,000"):
        read_picture(file.getvalue(), "bomb", GREY, largest_pixel_count=1_000_000)


def test_pictures_need_a_network_for_pictures(folder: Path) -> None:
    with pytest.raises(BadData, match="the network takes 8"):
        read_samples(str(folder), SampleForm((8,)))


def test_a_folder_without_pictures_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no picture"):
        read_samples(str(tmp_path), COLOUR)
    with pytest.raises(BadFile, match="no such file"):
        read_samples(str(tmp_path / "away"), COLOUR)


# Arrays


@settings(max_examples=20)
@given(
    st.sampled_from(["first", "other size", "one", "one of another size"]),
    st.booleans(),
    st.sampled_from([">f8", "<f4", "uint8", "f2"]),
)
def test_arrays_are_read_as_for_training(tmp_path_factory: Any, way: str, fortran: bool, kind: str) -> None:
    """Also in the other byte order, with the first index fastest, and from bytes that came over a wire."""
    shape = {
        "first": (5, 3, 12, 10), "other size": (5, 3, 7, 9), "one": (3, 12, 10), "one of another size": (3, 7, 9)
    }[way]  # fmt: skip
    wanted = RESIZED[COLOUR] if "other" in way else COLOUR
    array = drawn(*shape).astype(kind)
    array = numpy.asfortranarray(array) if fortran else array
    path = tmp_path_factory.mktemp("arrays") / "x.npy"
    numpy.save(path, array)
    whole = array if array.ndim == 4 else array[None]
    numpy.savez(path.with_suffix(".npz"), x=numpy.repeat(whole, 2, 0)[:5], y=numpy.arange(min(5, 2 * len(whole))) % 2)
    trained_on: Any = load_arrays(path.with_suffix(".npz"), input_shape=COLOUR.shape)
    samples = read_samples(str(path), wanted)
    assert len(samples) == len(whole)
    first = trained_on.train.dataset[0][0] if hasattr(trained_on.train, "dataset") else trained_on.train[0][0]
    torch.testing.assert_close(tensor(samples[0]), first.float(), rtol=0, atol=1e-6)
    for one, other in zip(samples, read_array(path.read_bytes(), "wire", wanted), strict=True):
        assert torch.equal(tensor(one), tensor(other))
    assert torch.equal(tensor(read_samples(str(path.with_suffix(".npz")), wanted)[0]), tensor(samples[0]))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (
            numpy.zeros((4, 12, 10, 3), numpy.float32),
            r"4x12x10x3; the network takes 3x12x10 .*Nx3x12x10(.|\n)*transpose\(0, 3, 1, 2\)",
        ),
        (numpy.zeros((12, 10, 3), numpy.uint8), r"12x10x3; the network takes 3x12x10(.|\n)*transpose\(2, 0, 1\)"),
        (numpy.zeros((3, 12, 12), numpy.float32), r"3x12x12; the network takes 3x12x10(.|\n)*--resize"),
        (numpy.zeros((4, 3, 24, 20), numpy.uint8), r"4x3x24x20; the network takes 3x12x10(.|\n)*--resize"),
        (numpy.zeros((4, 1, 12, 10), numpy.uint8), r"4x1x12x10; the network takes 3x12x10(.|\n)*--shape 1x12x10"),
        (numpy.zeros((1, 4, 3, 12, 10), numpy.uint8), r"1x4x3x12x10; the network takes 3x12x10"),
        (numpy.zeros((4, 360), numpy.float32), r"4x360; the network takes 3x12x10(.|\n)*reshape\(-1, 3, 12, 10\)"),
        (numpy.zeros((4, 5), numpy.float32), r"4x5; the network takes 3x12x10(.|\n)*--shape 5"),
        (numpy.zeros((0, 3, 12, 10), numpy.float32), "no sample"),
        (numpy.zeros((2, 3, 12, 10), numpy.complex64), "complex64"),
        (numpy.zeros((2, 3, 12, 10), numpy.int64), "int64 pictures"),
    ],
    ids=[
        "channels last",
        "one, channels last",
        "one of another size",
        "of another size",
        "grey",
        "an axis too many",
        "flat",
        "strange",
        "empty",
        "complex",
        "integers",
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(tmp_path: Path, array: numpy.ndarray, words: str) -> None:
    numpy.save(tmp_path / "x.npy", array)
    numpy.savez(tmp_path / "x.npz", x=array)
    for read in (
        lambda: read_samples(str(tmp_path / "x.npy"), COLOUR),
        lambda: read_samples(str(tmp_path / "x.npz"), COLOUR),
        lambda: read_array(packed(array), "wire", COLOUR),
    ):
        with pytest.raises(BadData, match=words):
            read()


def test_an_array_is_one_sample_or_has_one_axis_more(tmp_path: Path) -> None:
    """3x32x32 is not three grey samples, neither of another size nor of this."""
    for size in (32, 16):
        numpy.save(tmp_path / "x.npy", numpy.zeros((3, size, size), numpy.float32))
        for wanted in (GREY, RESIZED[GREY]):
            with pytest.raises(BadData, match=rf"x\.npy is 3x{size}x{size}; the network takes 1x16x16 \(one sample\)"):
                read_samples(str(tmp_path / "x.npy"), wanted)
    numpy.save(tmp_path / "x.npy", numpy.zeros((3, 1, 16, 16), numpy.float32))
    assert len(read_samples(str(tmp_path / "x.npy"), GREY)) == 3
    numpy.save(tmp_path / "x.npy", numpy.float32(2.5))
    alone = read_samples(str(tmp_path / "x.npy"), SampleForm(()))
    assert [tensor(one).tolist() for one in alone] == [2.5]


def test_only_what_has_a_size_is_resized() -> None:
    for wanted in (SampleForm((8,)), SampleForm((3, 4, 5), torch.int64)):
        with pytest.raises(BadData, match=f"the network takes {wanted.text}"):
            wanted.resizing()


def test_a_sample_that_is_no_number_is_named(tmp_path: Path) -> None:
    array = numpy.zeros((3, 4), numpy.float32)
    array[1, 2] = numpy.nan
    numpy.save(tmp_path / "x.npy", array)
    samples = read_samples(str(tmp_path / "x.npy"), SampleForm((4,)))
    assert tensor(samples[0]).sum() == 0
    with pytest.raises(BadData, match="sample 1 has a NaN"):
        samples[1]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    array = numpy.array([{"a": 1}, None], dtype=object)
    numpy.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(BadData, match="could be programs"):
        read_samples(str(tmp_path / "x.npy"), SampleForm((4,)))
    with pytest.raises(BadData, match="could be programs"):
        read_array((tmp_path / "x.npy").read_bytes(), "wire", SampleForm((4,)))


def lying(shape: str) -> bytes:
    """A header that says more than there is."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content", [lying("(1000000000000, 4)"), lying("(3, 4)"), b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff"]
)
def test_a_header_is_not_believed(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is allocated for it."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("was read")

    (tmp_path / "x.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("x.npy", content)
    with pytest.raises((BadData, BadFile)):
        read_array(content, "wire", SampleForm((4,)))
    with pytest.raises((BadData, BadFile)):
        read_samples(str(tmp_path / "x.npy"), SampleForm((4,)))
    monkeypatch.setattr(sample_arrays.numpy, "load", refuse)
    with pytest.raises((BadData, BadFile)):
        read_samples(str(tmp_path / "x.npz"), SampleForm((4,)))


def test_a_large_file_is_not_loaded(tmp_path: Path) -> None:
    """A terabyte with nothing in it: only the pages of the sample that is asked for are read."""
    with open(tmp_path / "x.npy", "wb") as file:
        file.write(lying("(62500000000, 4)"))
        file.truncate(file.tell() + 62500000000 * 16)
    samples = read_samples(str(tmp_path / "x.npy"), SampleForm((4,)))
    assert len(samples) == 62500000000
    assert tensor(samples[62499999999]).tolist() == [0, 0, 0, 0]


def test_several_inputs_come_by_name(tmp_path: Path) -> None:
    wanted = {"films": SampleForm((5,), torch.int64), "age": SampleForm(())}
    numpy.savez(tmp_path / "x.npz", films=numpy.arange(15).reshape(3, 5), age=numpy.array([1.0, 2.0, 3.0]))
    samples = read_samples(str(tmp_path / "x.npz"), wanted)
    last = samples[2]
    assert isinstance(last, dict)
    assert last["films"].tolist() == [10, 11, 12, 13, 14]
    assert float(last["age"]) == 3.0
    numpy.savez(tmp_path / "y.npz", films=numpy.arange(15).reshape(3, 5))
    with pytest.raises(BadData, match="no age"):
        read_samples(str(tmp_path / "y.npz"), wanted)


def test_the_shape_of_arrays_is_known_from_the_file(tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", numpy.zeros((4, 2, 3)))
    numpy.savez(tmp_path / "x.npz", x=numpy.zeros((4, 7)), y=numpy.zeros(4))
    assert shape_in(str(tmp_path / "x.npy")) == (2, 3)
    assert shape_in(str(tmp_path / "x.npz")) == (7,)
    assert shape_in(str(tmp_path)) is None


def test_digits_have_their_classes() -> None:
    samples = read_samples("digits", GREY)
    assert len(samples.targets) == len(samples) > 300
    assert tensor(samples[0]).shape == (1, 16, 16)
