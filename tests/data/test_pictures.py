"""Folders of pictures: the layouts that are read, and broken ones found before training, not in the middle of it."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from manyhands.data import pictures
from manyhands.data.loader import example, length
from manyhands.data.sets import load
from manyhands.facts.errors import BadData

RED, BLUE = (255, 0, 0), (0, 0, 255)


def draw(path: Path, colour: tuple[int, ...] = RED, size: tuple[int, int] = (20, 10)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def fill(folder: Path, *, each: int = 5) -> Path:
    for number in range(each):
        draw(folder / "red" / f"{number}.png", RED)
        draw(folder / "blue" / f"{number}.jpg", BLUE)
    return folder


def test_one_folder_per_class(tmp_path: Path) -> None:
    sets = load(str(fill(tmp_path / "colours", each=10)))
    assert (sets.name, sets.classes, sets.num_classes, sets.input_shape) == ("colours", ("blue", "red"), 2, (3, 64, 64))
    assert sets.test is not None
    assert (length(sets.train), length(sets.test)) == (16, 4)
    inputs, labels = example(sets.train, 16)
    assert (inputs.shape, inputs.dtype, labels.dtype) == ((16, 3, 64, 64), torch.float32, torch.int64)
    reds = inputs[:, 0].mean(dim=(1, 2)) > 0
    assert torch.equal(reds, labels == 1), "each picture with its own class"
    assert sorted(example(sets.test, 4)[1].tolist()) == [0, 0, 1, 1]
    again = load(str(tmp_path / "colours"))
    assert again.test.indices == sets.test.indices  # type: ignore[attr-defined, union-attr]


@pytest.mark.parametrize("name", ["test", "val"])
def test_own_test_folder(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "train", each=6)
    draw(tmp_path / name / "red" / "x.png")
    sets = load(str(tmp_path))
    assert sets.test is not None
    assert (length(sets.train), length(sets.test)) == (12, 1)
    assert sets.test[0][1] == sets.classes.index("red") == 1


def test_train_folder_alone_and_a_class_called_train(tmp_path: Path) -> None:
    fill(tmp_path / "a" / "train")
    assert load(str(tmp_path / "a")).classes == ("blue", "red")
    for name in ("train", "tram", "test"):
        draw(tmp_path / "b" / name / "1.png")
    assert load(str(tmp_path / "b")).classes == ("test", "train", "tram")


def test_deeper_folders_are_read_and_clutter_is_not(tmp_path: Path) -> None:
    fill(tmp_path, each=1)
    draw(tmp_path / "red" / "more" / "deep" / "1.png")
    for clutter in (".DS_Store", "Thumbs.db"):
        (tmp_path / "red" / clutter).write_bytes(b"?")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "red" / "circle").symlink_to(tmp_path)
    sets = load(str(tmp_path))
    assert sets.classes == ("blue", "red")
    assert length(sets.train) == 3
    assert sets.test is None, "one in five of two is none"


def test_shape_channels_and_scale(tmp_path: Path) -> None:
    fill(tmp_path, each=4)  # too few to hold any out
    draw(tmp_path / "red" / "0.png", (255, 255, 255))
    draw(tmp_path / "red" / "1.png", (0, 0, 0))
    sets = load(str(tmp_path), input_shape=(1, 12, 18))
    inputs = torch.stack([sets.train[index][0] for index in range(length(sets.train))])
    assert inputs.shape[1:] == (1, 12, 18)
    assert (float(inputs.min()), float(inputs.max())) == (-1.0, 1.0)


def test_height_is_not_width(tmp_path: Path) -> None:
    """White above black stays so."""
    fill(tmp_path)
    rows = numpy.zeros((40, 30), dtype=numpy.uint8)
    rows[:20] = 255
    Image.fromarray(rows).save(tmp_path / "red" / "half.png")
    data = pictures.PictureData([tmp_path / "red" / "half.png"], [0], (3, 8, 4))
    value, _ = data[0]
    assert value.shape == (3, 8, 4)
    assert bool((value[:, :3] == 1).all())
    assert bool((value[:, 5:] == -1).all())


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_is_taken_at_its_brightness(tmp_path: Path, mode: str, channels: int) -> None:
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    if mode == "I;16":
        Image.fromarray(numpy.full((9, 9), 65535 // 4, dtype=numpy.uint16)).save(path)
    else:
        Image.new("L", (9, 9), 255 if mode == "1" else 64).convert("RGB" if mode == "CMYK" else mode).convert(
            mode
        ).save(path)
    value, _ = pictures.PictureData([path], [0], (channels, 4, 4))[0]
    assert value.shape == (channels, 4, 4)
    assert value.mean().item() == pytest.approx(1.0 if mode == "1" else -0.5, abs=0.02)


def torn(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


@pytest.mark.quick(every=14)
@pytest.mark.parametrize("decoded", [2000, 0], ids=["few files", "many files"])
@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "webp", "tif", "ppm"])
def test_torn_pictures_are_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, decoded: int
) -> None:
    monkeypatch.setattr(pictures, "DECODED_IN_CHECK", decoded)
    fill(tmp_path)
    noise = numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8)
    path = tmp_path / "red" / f"noise.{suffix}"
    Image.fromarray(noise).save(path)
    assert length(load(str(tmp_path)).train) == 9
    torn(path)
    with pytest.raises(BadData, match=rf"1 of 11 files cannot be read as pictures: red/noise\.{suffix} \(") as caught:
        load(str(tmp_path))
    assert "Delete or repair it" in caught.value.hint


def test_a_jpeg_changed_inside_is_found_before_training(tmp_path: Path) -> None:
    """Its header and its end are whole; only decoding tells."""
    fill(tmp_path)
    path = tmp_path / "blue" / "0.jpg"
    content = bytearray(path.read_bytes())
    tables = content.index(b"\xff\xc4")  # the Huffman tables
    content[tables + 5 : tables + 21] = b"\xff" * 16
    path.write_bytes(content)
    with pytest.raises(BadData, match=r"1 of 10 files .* blue/0\.jpg"):
        load(str(tmp_path))


def test_a_jpeg_with_something_after_its_end_is_taken(tmp_path: Path) -> None:
    fill(tmp_path)
    with open(tmp_path / "blue" / "0.jpg", "ab") as file:
        file.write(b"left by a phone")
    assert length(load(str(tmp_path)).train) == 8


def test_many_broken_pictures_are_counted(tmp_path: Path) -> None:
    fill(tmp_path)
    for number in range(7):
        (tmp_path / "red" / f"z{number}.png").write_bytes(b"" if number else b"hello")
    with pytest.raises(BadData) as caught:
        load(str(tmp_path))
    assert "7 of 17" in caught.value.message
    assert "red/z4.png" in caught.value.message
    assert "red/z5.png" not in caught.value.message
    assert "and 2 more" in caught.value.message


def test_formats_that_run_programs_and_odd_files_are_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    # Pillow would hand this one to Ghostscript.
    (tmp_path / "red" / "a.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    os.mkfifo(tmp_path / "red" / "b.png")
    (tmp_path / "red" / "c.png").symlink_to(tmp_path / "nowhere.png")
    Image.fromarray(numpy.zeros((4, 4), dtype=numpy.float32)).save(tmp_path / "red" / "d.tif")
    with pytest.raises(BadData, match="4 of 14") as caught:
        load(str(tmp_path))
    for words in (
        "a.eps (no picture of a known",
        "b.png (not a plain",
        "c.png (no such file",
        "d.tif (its pixels are floats",
    ):
        assert words in caught.value.message


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_decompression_bombs_are_not_decoded(tmp_path: Path, side: int) -> None:
    """Past Pillow's limit, where it warns, and past twice that, where it refuses."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    fill(tmp_path)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    bomb = tmp_path / "red" / "bomb.png"
    bomb.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b""))
    with pytest.raises(BadData, match=r"bomb\.png \(.*pixels"):
        load(str(tmp_path))


def test_a_picture_spoilt_after_the_check_is_named(tmp_path: Path) -> None:
    sets = load(str(fill(tmp_path)))
    for path in tmp_path.rglob("*.png"):
        path.unlink()
    with pytest.raises(BadData, match=r"red/\d\.png: the picture cannot be read: no such file"):
        example(sets.train, 8)


def test_layouts_that_are_no_data_set(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(BadData) as caught:
            load(str(folder))
        assert caught.value.hint
        return caught.value.message

    (tmp_path / "empty").mkdir()
    assert "has no class folders, and no pictures" in refused(tmp_path / "empty")
    draw(tmp_path / "flat" / "1.png")
    assert "has no class folders, but 1 files that belong to no class" in refused(tmp_path / "flat")
    draw(tmp_path / "single" / "red" / "1.png")
    assert "has one class, 'red'" in refused(tmp_path / "single")
    (fill(tmp_path / "hollow") / "green").mkdir()
    assert "no picture in the class folder green" in refused(tmp_path / "hollow")
    for name in ("a", "b"):
        (tmp_path / "bare" / name).mkdir(parents=True)
    assert "no picture in any of its 2 class folders" in refused(tmp_path / "bare")
    fill(tmp_path / "strange" / "train")
    draw(tmp_path / "strange" / "test" / "green" / "1.png")
    assert "green: no such class in" in refused(tmp_path / "strange")
    fill(tmp_path / "untold" / "train")
    draw(tmp_path / "untold" / "test" / "1.png")
    assert "has no class folders, as" in refused(tmp_path / "untold")


@pytest.mark.parametrize("shape", [(50,), (2, 8, 8), (3, 0, 8)])
def test_models_that_take_no_pictures(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadData, match="1 or 3 channels") as caught:
        load(str(fill(tmp_path)), input_shape=shape)
    assert str(shape) in caught.value.message
