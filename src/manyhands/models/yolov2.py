"""YOLOv2, its first sixteen layers alone, and its region loss.

Redmon and Farhadi, "YOLO9000: Better, Faster, Stronger", CVPR 2017 (arXiv:1612.08242); layers, anchors and the
weights of the loss are those of the authors' darknet configuration yolov2-voc.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Output channels and kernel of each convolution; None is a 2x2 max-pool. All but the detector's own layers.
_DARKNET19: tuple[tuple[int, int] | None, ...] = (
    (32, 3), None,
    (64, 3), None,
    (128, 3), (64, 1), (128, 3), None,
    (256, 3), (128, 1), (256, 3), None,
    (512, 3), (256, 1), (512, 3), (256, 1), (512, 3), None,
    (1024, 3), (512, 1), (1024, 3), (512, 1), (1024, 3),
)  # fmt: skip
# The layers up to the 512-channel map that the passthrough takes.
_PASSTHROUGH_AT = 17

# Width and height in grid cells, for pictures of 416x416.
VOC_ANCHORS = ((1.3221, 1.73145), (3.19275, 4.00944), (5.05587, 8.09892), (9.47112, 4.84053), (11.2364, 10.0071))
_OBJECT_SCALE = 5.0
# A prediction that overlaps some box by more than this is not punished for seeing an object.
_IGNORE_ABOVE = 0.6
_EXAMPLE_BOXES = 8


def _convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.1, inplace=True),
    )


def _stack(inputs: int, layers: Sequence[tuple[int, int] | None]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for layer in layers:
        if layer is None:
            modules.append(nn.MaxPool2d(2))
        else:
            outputs, kernel = layer
            modules.append(_convolution(inputs, outputs, kernel))
            inputs = outputs
    return nn.Sequential(*modules)


class YOLOv2(nn.Module):
    """A detector: Darknet-19, two more convolutions, finer features passed through, and 5 boxes per cell of 32x32
    pixels."""

    def __init__(self, num_classes: int = 20) -> None:
        super().__init__()
        self.fine = _stack(3, _DARKNET19[:_PASSTHROUGH_AT])
        self.coarse = _stack(512, (*_DARKNET19[_PASSTHROUGH_AT:], (1024, 3), (1024, 3)))
        self.passthrough = _convolution(512, 64, 1)
        # Four neighbours become channels. (Darknet's "reorg" orders them otherwise; the sizes are the same.)
        self.reorganise = nn.PixelUnshuffle(2)
        self.joined = _convolution(4 * 64 + 1024, 1024, 3)
        self.detector = nn.Conv2d(1024, len(VOC_ANCHORS) * (5 + num_classes), 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        joined = torch.cat((self.reorganise(self.passthrough(fine)), self.coarse(fine)), dim=1)
        out: Tensor = self.detector(self.joined(joined))
        return out


def yolov2(num_classes: int = 20) -> YOLOv2:
    return YOLOv2(num_classes)


def yolov2_first16() -> nn.Sequential:
    """Return twelve convolutions and four max-pools."""
    return _stack(3, _DARKNET19[:16])


def intersection_over_union(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of boxes given as (..., 4) centre x, y, width, height."""
    low = torch.maximum(first[..., :2] - first[..., 2:] / 2, second[..., :2] - second[..., 2:] / 2)
    high = torch.minimum(first[..., :2] + first[..., 2:] / 2, second[..., :2] + second[..., 2:] / 2)
    shared = (high - low).clamp(min=0).prod(dim=-1)
    union = first[..., 2:].prod(dim=-1) + second[..., 2:].prod(dim=-1) - shared
    return shared / union.clamp(min=1e-9)


def region_loss(output: Tensor, target: Tensor, anchors: Sequence[tuple[float, float]] = VOC_ANCHORS) -> Tensor:
    """Return the mean over the batch of darknet's region cost.

    `output` is (batch, anchors * (5 + classes), height, width). `target` is (batch, boxes, 5): class, centre x, centre
    y, width and height as fractions of the picture; rows of zeros are padding. Each box belongs to the cell of its
    centre and the anchor nearest its shape. Left out: darknet's pull towards the anchors over the first 12,800
    pictures. Two boxes in one cell and anchor both count, where darknet keeps the later.
    """
    height, width = output.shape[2], output.shape[3]
    places = len(anchors) * height * width
    sizes = output.new_tensor(anchors)
    grid = output.new_tensor([width, height])

    # (batch, anchors * height * width, 5 + classes)
    predicted = torch.unflatten(output, 1, (len(anchors), output.shape[1] // len(anchors)))
    predicted = predicted.permute(0, 1, 3, 4, 2).flatten(1, 3)
    rows, columns = torch.meshgrid(
        torch.arange(height, device=output.device), torch.arange(width, device=output.device), indexing="ij"
    )
    corners = torch.stack((columns, rows), dim=-1).reshape(-1, 2).repeat(len(anchors), 1).to(output.dtype)
    priors = sizes.repeat_interleave(height * width, dim=0)

    classes, boxes = target[..., 0].long(), target[..., 1:].to(output.dtype)
    real = (boxes[..., 2] > 0).to(output.dtype)
    centres, shapes = boxes[..., :2] * grid, boxes[..., 2:] * grid
    cells = torch.minimum(centres.floor().clamp(min=0), grid - 1)

    # The anchor that each box takes: overlap of the bare shapes.
    flat_shapes = torch.cat((torch.zeros_like(shapes), shapes), dim=-1)
    best = intersection_over_union(
        flat_shapes.unsqueeze(2), torch.cat((torch.zeros_like(sizes), sizes), dim=-1)
    ).argmax(dim=2)
    place = best * (height * width) + (cells[..., 1] * width + cells[..., 0]).long()

    # Objectness where there is nothing: every prediction that is neither assigned to a box nor close to one.
    with torch.no_grad():
        guessed = torch.cat(
            (predicted[..., :2].sigmoid() + corners, predicted[..., 2:4].clamp(max=8).exp() * priors), dim=-1
        )
        truth = torch.cat((centres, shapes), dim=-1)
        closeness = (intersection_over_union(guessed.unsqueeze(2), truth.unsqueeze(1)) * real.unsqueeze(1)).amax(dim=2)
        everywhere = torch.arange(places, device=output.device)
        assigned = ((place.unsqueeze(2) == everywhere) & (real > 0).unsqueeze(2)).any(dim=1)
        empty = ((closeness <= _IGNORE_ABOVE) & ~assigned).to(output.dtype)
    objectness = predicted[..., 4].sigmoid()
    empty_loss = (empty * objectness.square()).sum()

    # Everything else: only the predictions that boxes take.
    index = place.unsqueeze(2).expand(-1, -1, predicted.shape[2])
    chosen = predicted.gather(1, index)
    with torch.no_grad():
        overlap = intersection_over_union(guessed.gather(1, index[..., :4]), truth)
    object_loss = _OBJECT_SCALE * (real * (chosen[..., 4].sigmoid() - overlap).square()).sum()
    # Small boxes count up to twice as much.
    weight = real * (2.0 - boxes[..., 2] * boxes[..., 3])
    position = (chosen[..., :2].sigmoid() - (centres - cells)).square().sum(dim=2)
    log_scales = (shapes.clamp(min=1e-6) / sizes[best]).log()
    extent = (chosen[..., 2:4] - log_scales).square().sum(dim=2)
    place_loss = (weight * (position + extent)).sum()
    class_loss = (real * F.cross_entropy(chosen[..., 5:].transpose(1, 2), classes, reduction="none")).sum()
    # Halves, because darknet's gradients are those of half squares.
    total: Tensor = 0.5 * (empty_loss + object_loss + place_loss) + class_loss
    return total / output.shape[0]


def example_boxes(
    batch_size: int, input_shape: tuple[int, ...], num_classes: int, generator: torch.Generator
) -> Tensor:
    """Return one to four random boxes per picture, padded with zeros."""
    classes = torch.randint(0, num_classes, (batch_size, _EXAMPLE_BOXES, 1), generator=generator).float()
    centres = 0.2 + 0.6 * torch.rand(batch_size, _EXAMPLE_BOXES, 2, generator=generator)
    shapes = 0.1 + 0.3 * torch.rand(batch_size, _EXAMPLE_BOXES, 2, generator=generator)
    counts = torch.randint(1, 5, (batch_size, 1, 1), generator=generator)
    present = torch.arange(_EXAMPLE_BOXES).view(1, -1, 1) < counts
    return torch.cat((classes, centres, shapes), dim=2) * present


def example_map(batch_size: int, input_shape: tuple[int, ...], num_classes: int, generator: torch.Generator) -> Tensor:
    """Return a random map of the shape that the first sixteen layers give."""
    _, height, width = input_shape
    return torch.randn(batch_size, 256, height // 16, width // 16, generator=generator)
