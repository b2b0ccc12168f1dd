"""All of torchvision's networks but the quantised ones, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manyhands_bench.networks.subject import Subject, first_that_runs, images

PICTURE_SIDES = (128, 224, 299)
VIDEO_SHAPES = ((3, 8, 64, 64), (3, 16, 112, 112), (3, 16, 224, 224))
"""Input sizes from small to large: each network is given the first that it takes."""
DETECTION_SIDE = 128
VIDEO_PATCH = (2, 4, 4)
"""The strides, in pictures, rows and columns, with which MViT cuts a video into patches."""


def torchvision_names() -> list[str]:
    """Return the names of all networks but the quantised ones."""
    from torchvision import models

    return [name for name in models.list_models() if not name.startswith("quantized_")]


def torchvision_detectors() -> set[str]:
    from torchvision import models

    return set(models.list_models(module=models.detection))


def torchvision_subject(name: str, *, is_trained: bool = False) -> Subject:
    """Return a network of torchvision with batches of the smallest size that it takes. One that `is_trained` is made
    for smaller inputs, where its own are too large to be trained several times over in float64."""
    from torchvision import models

    options: dict[str, Any] = {"weights": None}
    groups = {"detection": models.detection, "segmentation": models.segmentation}
    group = next((group for group, module in groups.items() if name in models.list_models(module=module)), "")
    if group:
        options["weights_backbone"] = None
    if group == "detection":
        return _detector(name, options)
    module: nn.Module = models.get_model(name, **options)
    if is_trained and isinstance(module, models.video.MViT):
        _take_small_videos(module)
    if name in models.list_models(module=models.optical_flow):
        return Subject(module, lambda samples: (torch.randn(samples, 3, 128, 128), torch.randn(samples, 3, 128, 128)))
    if name in models.list_models(module=models.video):
        return Subject(module, first_that_runs(module, [images(*shape) for shape in VIDEO_SHAPES]))
    return Subject(module, first_that_runs(module, [images(3, side, side) for side in PICTURE_SIDES]))


def _take_small_videos(module: Any) -> None:
    """Give an MViT positions for the smallest videos: it takes those of the one size that its positions are for.

    At its own, 16 pictures of 224 x 224, PyTorch itself holds 2.7 GB for the backward pass of a sample in float64, and
    computes 71 G multiply-accumulates forward. All layers stay as they are.
    """
    from torchvision.models.video.mvit import PositionalEncoding

    before = module.pos_encoding
    _, *extents = VIDEO_SHAPES[0]
    pictures, rows, columns = (extent // stride for extent, stride in zip(extents, VIDEO_PATCH, strict=True))
    module.pos_encoding = PositionalEncoding(
        embed_size=before.class_token.numel(), spatial_size=(rows, columns), temporal_size=pictures,
        rel_pos_embed=before.spatial_pos is None,
    )  # fmt: skip


def _detector(name: str, options: dict[str, Any]) -> Subject:
    """Return a detector with batches of images and targets, for which it computes its own losses."""
    from torchvision import models

    if not name.startswith("ssd"):  # the others enlarge every image to 800 points unless they are told otherwise
        options |= {"min_size": DETECTION_SIDE, "max_size": DETECTION_SIDE}
    side = DETECTION_SIDE

    def batch(samples: int) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
        box = torch.tensor([[side * 0.1, side * 0.1, side * 0.7, side * 0.8]])
        target = {"boxes": box, "labels": torch.ones(1, dtype=torch.int64)}
        if "mask" in name:
            target["masks"] = torch.ones(1, side, side, dtype=torch.uint8)
        if "keypoint" in name:
            target["keypoints"] = torch.full((1, 17, 3), side * 0.5)
        return torch.rand(samples, 3, side, side), [dict(target) for _ in range(samples)]

    return Subject(models.get_model(name, **options), batch, is_detector=True)
