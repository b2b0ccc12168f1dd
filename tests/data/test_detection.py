"""Pictures with boxes in the layout of Pascal VOC: what is read, and what is said of files that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from manyhands.data import detection
from manyhands.data.data_sets import DataSets
from manyhands.data.loader import example, length
from manyhands.data.sets import load
from manyhands.facts.errors import BadData, BadFile, ManyhandsError
from manyhands.models.yolov2 import VOC_ANCHORS, region_loss

Thing = tuple[str, float, float, float, float]
CAT: Thing = ("cat", 10, 10, 30, 20)
DOG: Thing = ("dog", 0, 0, 40, 20)


def described(things: Sequence[Thing], size: tuple[int, int] = (40, 20), more: str = "") -> str:
    objects = "".join(
        f"<object><name>{name}</name>{more}<bndbox><xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax>"
        f"<ymax>{bottom}</ymax></bndbox></object>"
        for name, left, top, right, bottom in things
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{objects}</annotation>"


def add(root: Path, name: str, things: Sequence[Thing] = (CAT,), *, suffix: str = "jpg", text: str = "") -> None:
    """A picture, white above black, and what is in it."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (40, 20), (0, 0, 0))
    picture.paste((255, 255, 255), (0, 0, 40, 10))
    picture.save(root / "JPEGImages" / f"{name}.{suffix}")
    (root / "Annotations" / f"{name}.xml").write_text(text or described(things))


def lists(root: Path, **names: str) -> Path:
    for part, listed in names.items():
        (root / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(listed.split()) + "\n")
    return root


def small(root: Path) -> Path:
    """Four pictures to train on, two to test on."""
    things: list[list[Thing]] = [[CAT], [DOG, CAT], [], [DOG], [CAT, CAT, DOG], [("ant", 1, 2, 3, 4)]]
    for place, of_picture in enumerate(things):
        add(root, f"p{place}", of_picture, suffix="png" if place == 1 else "jpg")
    return lists(root, train="p0 p1 p2 p3", val="p4 p5", trainval="p0 p1 p2 p3 p4 p5")


def all_of(sets: DataSets) -> tuple[Tensor, Tensor]:
    inputs, boxes = example(sets.train, 100)
    return inputs, boxes


def refused(root: Path, kind: type[ManyhandsError] = BadData) -> str:
    with pytest.raises(kind) as caught:
        load(root)
    return caught.value.message


@pytest.mark.parametrize("below", [".", "VOC2007", "VOCdevkit/VOC2007"])
def test_pictures_and_boxes(tmp_path: Path, below: str) -> None:
    small(tmp_path / "given" / below)
    (tmp_path / "given" / "README.md").write_text("About this.")
    sets = load(tmp_path / "given", input_shape=(3, 16, 32))
    assert sets.has_boxes
    assert (sets.num_classes, sets.classes, sets.input_shape) == (3, ("ant", "cat", "dog"), (3, 16, 32))
    assert sets.name == ("given" if below == "." else "VOC2007")
    assert sets.test is not None
    assert (length(sets.train), length(sets.test)) == (4, 2)
    inputs, boxes = all_of(sets)
    assert (inputs.shape, inputs.dtype, boxes.shape, boxes.dtype) == (
        (4, 3, 16, 32), torch.float32, (4, 3, 5), torch.float32,
    )  # fmt: skip
    assert (inputs.min().item(), inputs.max().item()) == pytest.approx((0.0, 1.0), abs=0.02)
    assert inputs.min() >= 0
    assert inputs.max() <= 1
    assert inputs[:, :, :6].min() > 0.9, "white above"
    assert inputs[:, :, 10:].max() < 0.1
    cat, dog, none = [1.0, 0.5, 0.75, 0.5, 0.5], [2.0, 0.5, 0.5, 1.0, 1.0], [0.0] * 5
    assert boxes.tolist() == [[cat, none, none], [dog, cat, none], [none] * 3, [dog, none, none]]
    assert example(sets.test, 2)[1][1, 0].tolist() == pytest.approx([0.0, 0.05, 0.15, 0.05, 0.1])


def test_the_region_loss_takes_them(tmp_path: Path) -> None:
    sets = load(small(tmp_path), input_shape=(3, 64, 64))
    output = torch.randn(4, len(VOC_ANCHORS) * 8, 2, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = region_loss(output, all_of(sets)[1])
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert output.grad is not None
    assert torch.isfinite(output.grad).all()


def test_boxes_are_cut_off_at_the_edge_and_those_of_no_area_left_out(tmp_path: Path) -> None:
    add(tmp_path, "a", [("x", -20, -5, 20, 10), ("x", 30, 10, 400, 200.5), ("x", 7, 7, 7, 9), ("x", 41, 0, 50, 9)])
    add(tmp_path, "b", text=described([CAT], more="<difficult>1</difficult>"))
    sets = load(lists(tmp_path, train="a b", val="a"))
    boxes = all_of(sets)[1]
    assert sets.classes == ("x",), "what is left out counts for no class"
    assert boxes[0].tolist() == pytest.approx(torch.tensor([[0, 0.25, 0.25, 0.5, 0.5], [0, 0.875, 0.75, 0.25, 0.5]]))
    assert not boxes[1].any()
    low, high = boxes[..., 1:3] - boxes[..., 3:] / 2, boxes[..., 1:3] + boxes[..., 3:] / 2
    assert low.min() >= 0
    assert high.max() <= 1


def test_fractions_are_of_the_size_the_annotation_was_made_for(tmp_path: Path) -> None:
    add(tmp_path, "a", text=described([("x", 200, 0, 400, 100)], size=(400, 200)))
    assert all_of(load(lists(tmp_path, train="a", val="a")))[1][0, 0].tolist() == [0, 0.75, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(
    ("given", "train", "test"),
    [
        ({"train": "a b", "val": "c", "test": "d e", "trainval": "a b c"}, "a b", "c"),
        ({"train": "a b", "test": "d e"}, "a b", "d e"),
        ({"train": "a b", "val": "", "test": "d"}, "a b", "d"),
        ({"trainval": "a b c", "val": "c", "test": "d e"}, "a b c", "d e"),
        ({"trainval": "a b c", "val": "c"}, "a b", "c"),
        ({"train": "a b"}, "a b", ""),
    ],
)
def test_lists_say_what_is_trained_and_tested_on(tmp_path: Path, given: dict[str, str], train: str, test: str) -> None:
    for place, name in enumerate("abcde"):
        add(tmp_path, name, [("x", 0, 0, 2 + place, 10)])
    sets = load(lists(tmp_path, **given))
    parts = (sets.train, sets.test)
    widths = [
        [] if part is None else [round(40 * part[i][1][0, 3].item()) for i in range(length(part))] for part in parts
    ]
    assert widths == [["abcde".index(name) + 2 for name in part.split()] for part in (train, test)]


def test_without_lists_a_fifth_is_held_out(tmp_path: Path) -> None:
    for number in range(10):
        add(tmp_path, f"p{number}")
    sets = load(tmp_path)
    assert sets.test is not None
    assert (length(sets.train), length(sets.test)) == (8, 2)
    assert sets.input_shape == detection.INPUT_SHAPE


def test_files_that_are_missing(tmp_path: Path) -> None:
    small(tmp_path)
    lists(tmp_path, train="p0 ../p1")
    assert "train.txt, line 2: there is no picture '../p1' in" in refused(tmp_path)
    lists(tmp_path, train="p0 p1")
    (tmp_path / "Annotations" / "p1.xml").unlink()
    assert "train.txt, line 2: there is no annotation" in refused(tmp_path)
    lists(tmp_path, train="")
    assert "no picture to train on" in refused(tmp_path)
    for part in ("train", "trainval"):
        (tmp_path / "ImageSets" / "Main" / f"{part}.txt").unlink()
    assert "has no train.txt and no trainval.txt; it has val.txt" in refused(tmp_path)


def test_pictures_that_are_torn_are_found_before_training(tmp_path: Path) -> None:
    small(tmp_path)
    path = tmp_path / "JPEGImages" / "p4.jpg"
    path.write_bytes(path.read_bytes()[:300])
    assert "1 of 6 files cannot be read as pictures: JPEGImages/p4.jpg (" in refused(tmp_path)


def test_two_data_sets_in_one_folder(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        small(tmp_path / year)
    assert "holds 2 data sets of pictures with boxes" in refused(tmp_path)


def test_nothing_in_any_picture(tmp_path: Path) -> None:
    add(tmp_path, "a", [])
    assert "there is no box in any" in refused(lists(tmp_path, train="a", val="a"))


@pytest.mark.parametrize("shape", [(50,), (2, 8, 8), (3, 0, 8)])
def test_models_that_take_no_pictures(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadData, match="1 or 3 channels") as caught:
        load(small(tmp_path), input_shape=shape)
    assert str(shape) in caught.value.message


GOOD = described([DOG, CAT])
BOMB = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;">]>' + GOOD.replace("dog", "&c;")


@pytest.mark.quick(every=18)
@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (GOOD.replace("<xmin>10</xmin>", ""), BadData, "object 2: bndbox/xmin is missing or empty"),
        (GOOD.replace("<xmin>10</xmin>", "<xmin/>"), BadData, "object 2: bndbox/xmin is missing or empty"),
        (GOOD.replace("<xmin>10<", "<xmin>ten<"), BadData, "object 2: bndbox/xmin is 'ten'; it must be a number"),
        (GOOD.replace("<xmin>10<", "<xmin>nan<"), BadData, "object 2: bndbox/xmin is 'nan'"),
        (GOOD.replace("<xmin>10<", "<xmin>1e999<"), BadData, "object 2: bndbox/xmin is '1e999'"),
        (GOOD.replace("<xmin>10<", f"<xmin>{'1' * 999}<"), BadData, "object 2: bndbox/xmin has 999 letters"),
        (GOOD.replace("<xmin>10<", "<xmin>31<"), BadData, "object 2: xmin is 31, more than xmax, 30"),
        (GOOD.replace("<ymin>10<", "<ymin>21<"), BadData, "object 2: ymin is 21, more than ymax, 20"),
        (GOOD.replace("<name>dog</name>", ""), BadData, "object 1: name is missing or empty"),
        (GOOD.replace("<width>40</width>", ""), BadData, "size/width is missing or empty"),
        (GOOD.replace("<height>20<", "<height>0<"), BadData, "size is 40 x 0; both must be 1 or more"),
        (GOOD.replace("annotation>", "drawing>"), BadFile, "the outermost tag is 'drawing'"),
        (GOOD[:-5], BadFile, "is not XML"),
        ("hello", BadFile, "is not XML"),
        (BOMB, BadFile, "declares a document type"),
        (described([CAT] * 1001), BadData, "has 1001 objects; at most 1000"),
        (" " * 2_000_001, BadFile, "is longer than 2"),
        ("<a>" * 100_000 + "</a>" * 100_000, BadFile, "the outermost tag is 'a'"),
    ],
)
def test_annotations_that_are_wrong(tmp_path: Path, text: str, kind: type[ManyhandsError], message: str) -> None:
    small(tmp_path)
    (tmp_path / "Annotations" / "p3.xml").write_text(text)
    told = refused(tmp_path, kind)
    assert message in told
    assert "p3.xml" in told
    assert len(told) < 600


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_other_encodings_hide_nothing(tmp_path: Path, encoding: str) -> None:
    small(tmp_path)
    text = BOMB.replace('"1.0"', f'"1.0" encoding="{encoding}"').replace("cat", "Käfer")
    (tmp_path / "Annotations" / "p3.xml").write_bytes(text.encode(encoding))
    told = refused(tmp_path, BadFile)
    assert "p3.xml: is not text in UTF-8" in told


def test_changed_bytes_are_an_error_or_harmless(tmp_path: Path) -> None:
    small(tmp_path)
    path = tmp_path / "Annotations" / "p1.xml"
    whole = path.read_bytes()
    refusals = []
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            load(tmp_path)
        except ManyhandsError as error:
            refusals.append(error.message)
    assert len(refusals) > 20
    assert all("p1.xml" in message for message in refusals)
