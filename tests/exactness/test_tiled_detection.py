"""A detector by tiles, its region loss on the gateway, is one device's: small on drawn boxes, whole on blood cells.

In float64 and at a small rate. In float32 a difference in the last digit grows to percents of YOLOv2's loss within some
steps, also on one device that gets the samples of each batch in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from blood_cells import blood_cells
from harness import Batch, alone, relative, run
from manyhands.data.loader import example, length
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import ByTiles
from manyhands.graph.capture import capture
from manyhands.graph.weights import Weights
from manyhands.models import registry
from manyhands.models.yolov2 import VOC_ANCHORS, region_loss
from tiled_cases import Case, stirred, tiled, unwritten_memory_noticed
from tiled_networks import SmallYolo

SLOWLY = Optimizer("SGD", lr=1e-5)
SAMPLES, STEPS, SIDE = 2, 5, 96
CLASSES = 3
WAYS = {"2x1": ByTiles((1, 1)), "2x2": ByTiles((1, 1), (1, 1)), "2x2 uneven": ByTiles((2, 1), (1, 3), None, (0,))}


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory() -> Iterator[None]:
    with unwritten_memory_noticed():
        yield


def detection(module: nn.Module, batches: list[Batch], name: str) -> Case:
    graph = capture(stirred(module), batches[0][0], loss=region_loss, target=batches[0][1], name=name)
    return Case(graph, batches)


@cache
def one_device(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    return alone(case.graph, case.batches, SLOWLY, seed=7)


def check(case: Case, share: ByTiles) -> None:
    """Weights move little at this rate, so by how much each has moved is compared too."""
    weights, losses = one_device(case)
    assert len(set(losses)) == STEPS
    ran = run(case.graph, case.plan(case.tiled(share)), case.batches, SLOWLY, seed=7, limit_seconds=60.0)
    ran.assert_as_planned(STEPS)
    ran.assert_equals(weights, losses)
    assert all(log.elements > 0 for log in ran.logs.values())
    for name, before in Weights.copied(case.graph).trainable().items():
        moved = weights[name] - before.detach()
        assert moved.any(), name
        for device, own in ran.weights.items():
            difference = relative(own[name] - before.detach(), moved)
            assert difference <= 1e-9, (device, name, difference)


@pytest.fixture(scope="module")
def small() -> Case:
    """YOLOv2's shape, with boxes as the zoo draws them."""
    torch.manual_seed(1)
    module = SmallYolo()
    module.detector = nn.Conv2d(12, len(VOC_ANCHORS) * (5 + CLASSES), 1)
    batches = [
        (torch.rand(SAMPLES, 3, 24, 28, dtype=torch.float64),
         registry.example_target("yolov2", SAMPLES, num_classes=CLASSES, seed=step))
        for step in range(STEPS)
    ]  # fmt: skip
    return detection(module, batches, "small")


@pytest.mark.slow
@pytest.mark.quick("2x2")
@tiled("small detector")
@pytest.mark.parametrize("way", WAYS)
def test_a_small_detector(small: Case, way: str) -> None:
    check(small, WAYS[way])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """All of YOLOv2, on the first of the pictures to train on."""
    cells = blood_cells(tmp_path_factory.mktemp("cells"), SIDE)
    assert cells.test is not None
    assert (length(cells.train), length(cells.test)) == (205, 87)
    assert cells.classes == ("Platelets", "RBC", "WBC")
    torch.manual_seed(1)
    pictures, boxes = example(cells.train, SAMPLES * STEPS)
    batches = list(zip(pictures.double().split(SAMPLES), boxes.split(SAMPLES)))
    yield detection(registry.build("yolov2", num_classes=CLASSES), batches, "yolov2")
    one_device.cache_clear()


@pytest.mark.slow
@tiled("blood cells")
@pytest.mark.parametrize("way", ["2x1", "2x2"])
def test_yolov2_on_blood_cells(whole: Case, way: str) -> None:
    check(whole, WAYS[way])
