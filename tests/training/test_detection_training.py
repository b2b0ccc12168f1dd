"""A detector trained on boxes: tiles give the losses of one device, and networks of another kind are told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import manyhands as mh
from blood_cells import blood_cells
from manyhands.data.data_sets import DataSets
from manyhands.data.loader import example
from manyhands.data.sets import load
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import ByTiles
from manyhands.job.named import build_model, loss_of
from manyhands.models.detections import MeanAveragePrecision
from manyhands.models.yolov2 import VOC_ANCHORS, region_loss
from manyhands.plans.tiles import tile_options
from manyhands.runtime.coordinator import Coordinator
from manyhands.training.arguments import train_config
from manyhands.training.named import train_by_name
from real_runs import Ran, assert_close, train, workers

pytestmark = pytest.mark.xdist_group("detection_training")  # its workers are started once

STEPS = 6
CLASSES = ("disc", "square")
SIDE = 64


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten noisy pictures, 96 x 80, of up to four bright things, in the layout of Pascal VOC."""
    root = tmp_path_factory.mktemp("things")
    for part in ("JPEGImages", "Annotations"):
        (root / part).mkdir()
    generator = torch.Generator().manual_seed(4)
    for number in range(10):
        pixels = torch.randint(0, 90, (80, 96, 3), generator=generator, dtype=torch.uint8)
        objects = ""
        for place in range(number % 4 + 1):
            left, top, width, height = (
                int(torch.randint(low, high, (), generator=generator))
                for low, high in ((0, 60), (0, 50), (10, 36), (10, 30))
            )
            pixels[top : top + height, left : left + width, place % 3] += 120
            objects += (
                f"<object><name>{CLASSES[place % 2]}</name><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>"
                f"<xmax>{left + width}</xmax><ymax>{top + height}</ymax></bndbox></object>"
            )
        Image.fromarray(pixels.numpy()).save(root / "JPEGImages" / f"{number}.png")
        size = "<size><width>96</width><height>80</height></size>"
        (root / "Annotations" / f"{number}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
    return root


@pytest.fixture(scope="module")
def data(folder: Path) -> DataSets:
    return load(folder, input_shape=(3, SIDE, SIDE))


class Detector(nn.Module):
    """A few convolutions, finer features passed through as in YOLOv2, a map of five boxes per cell of 16x16 pixels."""

    def __init__(self, num_classes: int = len(CLASSES)) -> None:
        super().__init__()
        self.fine = nn.Sequential(self._layer(3, 6, 2), self._layer(6, 8, 2), self._layer(8, 8, 2))
        self.coarse = self._layer(8, 16, 2)
        self.reorganise = nn.PixelUnshuffle(2)
        self.detector = nn.Conv2d(16 + 4 * 8, len(VOC_ANCHORS) * (5 + num_classes), 1)

    @staticmethod
    def _layer(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        out: Tensor = self.detector(torch.cat((self.reorganise(fine), self.coarse(fine)), dim=1))
        return out


def detector() -> Detector:
    torch.manual_seed(7)
    return Detector().double()


def tiles_and_one_device(
    cluster: Coordinator, folder: Path, model: Callable[[], nn.Module], data: DataSets, **options: Any
) -> tuple[Ran, Ran]:
    """A run of each, with the same losses and weights; every tile computed its planned share."""
    tiled, one = (
        train(cluster, plan, folder / plan, model=model(), data=data.train, loss=region_loss,
              tiles=tile_options("2x1", None, None) if plan == "tiles" else None, **options)
        for plan in ("tiles", "single")
    )  # fmt: skip
    tiled.assert_as_planned()
    assert isinstance(tiled.result.plan.stages[0].share, ByTiles)
    assert all(log.elements > 0 for log in tiled.result.logs.values())
    assert tiled.result.losses == pytest.approx(one.result.losses, rel=1e-10)
    assert len(set(one.result.losses)) == options["steps"]
    assert_close(tiled.state, one.state)
    return tiled, one


@pytest.mark.slow
def test_tiles_have_the_loss_curve_of_one_device(cluster: Coordinator, data: DataSets, tmp_path: Path) -> None:
    sgd = Optimizer("SGD", lr=1e-3, momentum=0.9)
    tiled, one = tiles_and_one_device(
        cluster, tmp_path, detector, data, optimizer=sgd, batch_size=4, steps=STEPS, test=data.test
    )
    for ran in (tiled, one):
        assert ran.result.test is not None
        assert (ran.result.test.samples, ran.result.accuracy) == (2, None)
    assert tiled.result.test is not None
    assert one.result.test is not None
    assert tiled.result.test.loss == pytest.approx(one.result.test.loss, rel=1e-10)


@pytest.mark.slow
def test_the_mean_average_precision_is_that_of_the_plain_module(
    cluster: Coordinator, data: DataSets, tmp_path: Path
) -> None:
    """By tiles, with targets of several boxes; the best checkpoint goes by it."""
    assert data.test is not None
    metric, plain = MeanAveragePrecision(least_overlap=0.1), MeanAveragePrecision(least_overlap=0.1)
    ran = train(
        cluster, "tiles", tmp_path / "run", model=detector(), data=data.train, loss=region_loss, batch_size=4,
        tiles=tile_options("2x1", None, None), optimizer=Optimizer("SGD", lr=1e-3, momentum=0.9), steps=4,
        validate=data.test, validate_every=2, metrics={"mAP": metric}, verify=False,
        callbacks=[mh.BestCheckpoint("mAP", "max")],
    )  # fmt: skip
    pictures, boxes = example(data.test, len(data.test))  # type: ignore[arg-type]
    with torch.no_grad():
        outputs = ran.model.eval()(pictures.double())
    plain.update(outputs, boxes)
    results = ran.result.validation[-1].metrics
    assert results["mAP"] == pytest.approx(plain.compute(), rel=1e-10)
    assert results["loss"] == pytest.approx(float(region_loss(outputs, boxes.double())), rel=1e-10)
    assert ran.result.best_checkpoint is not None


@pytest.mark.slow
def test_yolov2_on_blood_cells(cluster: Coordinator, tmp_path: Path) -> None:
    """All of it, on real pictures; groups are the planner's choice. At larger rates rounding soon grows."""
    cells = blood_cells(tmp_path / "cells", 96)

    def yolov2() -> nn.Module:
        torch.manual_seed(1)
        return build_model("yolov2", cells).double()

    sgd = Optimizer("SGD", lr=1e-5)
    tiled, _ = tiles_and_one_device(cluster, tmp_path, yolov2, cells, optimizer=sgd, batch_size=2, steps=5)
    assert len(tiled.result.plan.stages) == 1, "tiles up to the loss"


@pytest.mark.slow
def test_the_model_is_told_the_classes_and_the_loss_is_the_detectors(data: DataSets) -> None:
    model = build_model("yolov2", data)
    assert isinstance(model.detector, nn.Conv2d)
    assert model.detector.out_channels == len(VOC_ANCHORS) * (5 + len(CLASSES))
    assert loss_of("yolov2", data) is region_loss
    assert loss_of("mine:detector", data) is region_loss


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        ("resnet18", "3x64x64", r"resnet18 gives an output of shape \(2,\); .* has boxes of 2 classes"),
        ("yolov2", "3x80x80", "yolov2 does not take inputs of shape 3x80x80"),
    ],
)
def test_networks_and_sizes_that_do_not_fit(folder: Path, model: str, shape: str, message: str) -> None:
    """Before any process is started."""
    with pytest.raises(BadValue, match=message):
        train_by_name(train_config({"model": model, "data": str(folder), "input": shape}), mh.Cluster.local(1))
