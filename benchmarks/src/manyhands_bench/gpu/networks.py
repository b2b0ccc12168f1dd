"""The networks of `manyhands bench gpu`, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from manyhands.facts.errors import BadValue
from manyhands.models import registry

CLASSES = 10
TOKENS, LENGTH = 30522, 128
Make = Callable[[], nn.Module]
Draw = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class GpuNetwork:
    """A network, how one is built, and how inputs for some samples are drawn."""

    title: str
    build: Make
    draw: Draw
    batch_size: int

    def data(self, batches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels for so many batches."""
        torch.manual_seed(1)
        samples = batches * self.batch_size
        return self.draw(samples), torch.randint(0, CLASSES, (samples,))


loss = functional.cross_entropy


def _pictures(side: int) -> Draw:
    return lambda samples: torch.randn(samples, 3, side, side)


def _from_zoo(name: str) -> Make:
    return lambda: registry.build(name, num_classes=CLASSES)


class _Logits(nn.Module):
    """A classifier of transformers that returns its logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.network(input_ids=tokens).logits


def _bert() -> nn.Module:
    """Return BERT of the size `base`, as transformers builds it, without weights of anybody's."""
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError as error:
        raise BadValue("The BERT needs transformers.", hint="pip install transformers") from error
    return _Logits(BertForSequenceClassification(BertConfig(num_labels=CLASSES)))


def _vit() -> nn.Module:
    try:
        from torchvision.models import vit_b_16
    except ImportError as error:
        raise BadValue("The ViT needs torchvision.", hint="pip install torchvision") from error
    built: nn.Module = vit_b_16(num_classes=CLASSES)
    return built


NETWORKS: Mapping[str, GpuNetwork] = {
    "resnet50": GpuNetwork("ResNet-50, 224x224, batch 64", _from_zoo("resnet50"), _pictures(224), 64),
    "resnet18": GpuNetwork("ResNet-18, 64x64, batch 64", _from_zoo("resnet18"), _pictures(64), 64),
    "mobilenet": GpuNetwork("MobileNetV2, 224x224, batch 64", _from_zoo("mobilenetv2"), _pictures(224), 64),
    "bert": GpuNetwork(
        "BERT base, 128 tokens, batch 32", _bert, lambda samples: torch.randint(0, TOKENS, (samples, LENGTH)), 32
    ),
    "vit": GpuNetwork("ViT-B/16, 224x224, batch 32", _vit, _pictures(224), 32),
}
"""What the issue of speed on one GPU names: networks that keep it busy, and some that wait for Python."""
