"""Pictures of chairs with their descriptions: the folder rendered_chairs, and a stand-in of drawn chairs.

    rendered_chairs/<chair>/renders/image_001_p020_t011_r096.png     62 views of each: p elevation, t azimuth, degrees

Source: Aubry et al., "Seeing 3D chairs", CVPR 2014. A sample is the 825 numbers by which Dosovitskiy et al. describe a
picture (arXiv:1411.5928): which of 809 chairs, sine and cosine of azimuth and elevation, and 12 changes of colour and
shape, zero here: the pictures are as they were rendered. The target is the picture, 3x128x128, from 0 to 1. Of more
than 809 chairs the first by name are taken.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from manyhands.data.data_sets import DataSets
from manyhands.data.drawn import Draws
from manyhands.data.pictures import PIXEL_MEAN, PIXEL_STANDARD_DEVIATION, PictureData, check_all
from manyhands.data.plain_files import entries
from manyhands.data.split import held_out
from manyhands.facts.errors import BadData
from manyhands.facts.extras import load

STYLES, VIEW, CHANGES = 809, 4, 12
INPUT_SHAPE = (STYLES + VIEW + CHANGES,)
PICTURE_SHAPE = (3, 128, 128)
LARGEST_FOLDER_COUNT = 100_000
LARGEST_VIEW_COUNT = 10_000
SEARCHED = (".", "rendered_chairs")
_RENDERS = "renders"
_NAME = re.compile(r"image_[0-9]{1,6}_p([0-9]{3})_t([0-9]{3})_r[0-9]{1,4}\.png", re.ASCII)
_LAYOUT = (
    f"Lay it out as rendered_chairs: one folder per chair, in it {_RENDERS}/image_001_p020_t011_r096.png and so on."
)
_DRAWN_CHAIRS, _DRAWN_AZIMUTHS, _DRAWN_ELEVATIONS = 60, 31, (20, 30)
_SEED = 2014

View = tuple[int, float, float]
"""The number of a chair, and azimuth and elevation in degrees."""


class ChairData(Dataset[tuple[Tensor, Tensor]]):
    """A data set of descriptions, each with its picture."""

    def __init__(self, views: list[View], pictures: Any) -> None:
        self.views = views
        self.styles = [style for style, _, _ in views]
        self._pictures = pictures

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture: Tensor = self._pictures[index][0]
        return description(*self.views[index]), picture * PIXEL_STANDARD_DEVIATION + PIXEL_MEAN


def description(style: int, azimuth: float, elevation: float) -> Tensor:
    """Return the 825 numbers that describe a picture."""
    numbers = torch.zeros(INPUT_SHAPE)
    numbers[style] = 1.0
    angles = (math.radians(azimuth), math.radians(elevation))
    numbers[STYLES : STYLES + VIEW] = torch.tensor([turn(angle) for angle in angles for turn in (math.sin, math.cos)])
    return numbers


def chairs_root(path: Path) -> Path | None:
    """Return the folder of chairs: `path` or rendered_chairs in it, where its first folder has renders of the expected
    names."""
    for root in (path / place for place in SEARCHED):
        try:
            first = min((entry for entry in root.iterdir() if _is_chair(entry)), default=None)
            if first is not None and any(_NAME.fullmatch(entry.name) for entry in (first / _RENDERS).iterdir()):
                return root
        except OSError:
            continue
    return None


def load_chairs(root: Path, *, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load a folder of chairs, with a fifth of each chair's views held out. Every picture is checked first."""
    _check_shape(str(root), input_shape)
    chairs = [folder for folder in entries(root, most=LARGEST_FOLDER_COUNT) if _is_chair(folder)][:STYLES]
    if not chairs:
        raise BadData(f"{root}: there is no chair in it.", hint=_LAYOUT)
    views: list[View] = []
    files: list[Path] = []
    for style, chair in enumerate(chairs):
        renders = entries(chair / _RENDERS, most=LARGEST_VIEW_COUNT)
        if not renders:
            raise BadData(f"{chair / _RENDERS}: there is no picture in it.", hint="Add pictures, or delete the folder.")
        for file in renders:
            views.append((style, *_view(file)))
            files.append(file)
    check_all(root, files)
    return _sets(root.resolve().name, ChairData(views, PictureData(files, [0] * len(files), PICTURE_SHAPE)))


def synthetic_chairs(*, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Return a stand-in: 60 chairs made of boxes, each from 62 sides, drawn when they are read."""
    _check_shape("synthetic-3dchair", input_shape)
    views: list[View] = [
        (style, 360.0 * turn / _DRAWN_AZIMUTHS, float(elevation))
        for style in range(_DRAWN_CHAIRS)
        for elevation in _DRAWN_ELEVATIONS
        for turn in range(_DRAWN_AZIMUTHS)
    ]
    return _sets("synthetic-3dchair", ChairData(views, _Drawn(views)))


def _sets(name: str, everything: ChairData) -> DataSets:
    chosen, held_out_indices = held_out(everything.styles)
    return DataSets(
        name=name,
        train=Subset(everything, chosen),
        test=Subset(everything, held_out_indices) if held_out_indices else None,
        num_classes=0,
        input_shape=INPUT_SHAPE,
        classes=(),
        kind="3dchair",
    )


def _check_shape(subject: str, input_shape: tuple[int, ...] | None) -> None:
    if input_shape not in (None, INPUT_SHAPE):
        raise BadData(
            f"{subject}: a picture is described by {INPUT_SHAPE[0]} numbers; the model takes {input_shape}.",
            hint="Use a model that draws chairs, such as chair.",
        )


def _is_chair(folder: Path) -> bool:
    return not folder.name.startswith(".") and (folder / _RENDERS).is_dir()


def _view(file: Path) -> tuple[float, float]:
    """Return azimuth and elevation, from the name."""
    match = _NAME.fullmatch(file.name)
    if match is None:
        raise BadData(f"{file}: its name does not tell the view.", hint=_LAYOUT)
    elevation, azimuth = (float(number) for number in match.groups())
    if elevation > 90 or azimuth > 360:
        raise BadData(
            f"{file}: an elevation of {elevation:g} and an azimuth of {azimuth:g} degrees; at most 90 and 360."
        )
    return azimuth, elevation


# Drawn chairs

_CORNERS = numpy.array([(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)])
_FACES = ((0, 1, 3, 2), (4, 5, 7, 6), (0, 1, 5, 4), (2, 3, 7, 6), (0, 2, 6, 4), (1, 3, 7, 5))
_SHADES = (0.7, 0.7, 0.85, 0.85, 0.55, 1.0)


class _Drawn:
    """A data set of views of chairs made of boxes, in the same scale as pictures that were read."""

    def __init__(self, views: list[View]) -> None:
        self._views = views
        self._forms = Draws(_SEED).uniform(_DRAWN_CHAIRS, 8)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        style, azimuth, elevation = self._views[index]
        side = PICTURE_SHAPE[1]
        image = load("PIL.Image", "Drawing chairs").new("RGB", (side, side), (255, 255, 255))
        draw = load("PIL.ImageDraw", "Drawing chairs").Draw(image)
        boxes, colour = _chair(self._forms[style])
        turned = _turned(boxes, azimuth, elevation)
        faces = [(box[list(face)], shade) for box in turned for face, shade in zip(_FACES, _SHADES)]
        for corners, shade in sorted(faces, key=lambda face: -float(face[0][:, 1].mean())):  # the farthest first
            outline = [(side * (0.5 + x), side * (0.75 - z)) for x, _, z in corners.tolist()]
            red, green, blue = (int(255 * shade * part) for part in colour)
            draw.polygon(outline, fill=(red, green, blue))
        pixels = torch.from_numpy(numpy.array(image, dtype=numpy.float32)).permute(2, 0, 1).contiguous()
        return (pixels / 255 - PIXEL_MEAN) / PIXEL_STANDARD_DEVIATION, 0


def _chair(form: numpy.ndarray) -> tuple[list[tuple[float, ...]], tuple[float, float, float]]:
    """Return seat, back and legs as boxes (low and high x, y, z), and a colour, from eight numbers between 0 and 1."""
    width, depth, height, back, leg, *colour = (float(number) for number in form)
    half, deep = 0.14 + 0.08 * width, 0.14 + 0.08 * depth
    seat, top, thick = 0.14 + 0.16 * height, 0.12 + 0.2 * back, 0.015 + 0.025 * leg
    boxes: list[tuple[float, ...]] = [
        (-half, half, -deep, deep, seat, seat + 0.04),
        (-half, half, deep - 0.04, deep, seat + 0.04, seat + 0.04 + top),
    ]
    boxes += [(x, x + thick, y, y + thick, 0.0, seat) for x in (-half, half - thick) for y in (-deep, deep - thick)]
    red, green, blue = (0.15 + 0.7 * part for part in colour)
    return boxes, (red, green, blue)


def _turned(boxes: list[tuple[float, ...]], azimuth: float, elevation: float) -> numpy.ndarray:
    """Return corners (box, corner, x to the right, y away, z up) in the viewer's coordinates."""
    limits = numpy.array(boxes).reshape(len(boxes), 1, 3, 2)
    corners = limits[..., 0] + (limits[..., 1] - limits[..., 0]) * _CORNERS
    turn, lift = math.radians(azimuth), math.radians(elevation)
    x = corners[..., 0] * math.cos(turn) - corners[..., 1] * math.sin(turn)
    y = corners[..., 0] * math.sin(turn) + corners[..., 1] * math.cos(turn)
    z = corners[..., 2]
    rotated = (x, y * math.cos(lift) - z * math.sin(lift), y * math.sin(lift) + z * math.cos(lift))
    return numpy.stack(rotated, axis=-1)
