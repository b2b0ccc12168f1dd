"""EfficientNet-B1: Tan and Le, "EfficientNet: Rethinking Model Scaling", ICML 2019 (arXiv:1905.11946).

Stochastic depth: Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016 (arXiv:1603.09382).
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from manyhands.models.mobilenet import ConvClassifier, InvertedResidual, SqueezeExcite, conv_norm, round_channels


class StochasticDepth(nn.Module):
    """A layer that, in training, drops a sample's whole residual with probability `rate` and scales up the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        survival = 1.0 - self.rate
        mask = x.new_empty([x.shape[0], 1, 1, 1]).bernoulli_(survival)
        return x * mask.div_(survival)


# Table 1 of the paper (B0): expansion, kernel, stride of the first, output channels, repeats.
_B0_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def efficientnet(
    *, width: float, depth: float, num_classes: int, dropout: float, stochastic_depth: float, small_images: bool = False
) -> ConvClassifier:
    """Return the B0 stages, made `width` times wider and `depth` times deeper; `small_images` keeps full size for two
    more stages, as is usual for 32x32 pictures."""
    inputs = round_channels(32 * width)
    blocks: list[nn.Module] = [*conv_norm(3, inputs, 3, 1 if small_images else 2), nn.SiLU(inplace=True)]
    total = sum(math.ceil(repeats * depth) for *_, repeats in _B0_STAGES)
    built = 0
    for stage, (expansion, kernel, stage_stride, channels, repeats) in enumerate(_B0_STAGES):
        first_stride = 1 if small_images and stage == 1 else stage_stride
        outputs = round_channels(channels * width)
        for index in range(math.ceil(repeats * depth)):
            expanded = inputs * expansion
            excite = SqueezeExcite(expanded, max(1, inputs // 4), activation=nn.SiLU(inplace=True), gate=nn.Sigmoid())
            blocks.append(
                InvertedResidual(
                    inputs,
                    expanded,
                    outputs,
                    kernel=kernel,
                    stride=first_stride if index == 0 else 1,
                    activation=nn.SiLU,
                    excite=excite,
                    # The rate grows with depth, as in the stochastic depth paper.
                    drop=StochasticDepth(stochastic_depth * built / total),
                )
            )
            inputs = outputs
            built += 1
    blocks += [*conv_norm(inputs, 4 * inputs), nn.SiLU(inplace=True)]
    classifier = nn.Linear(4 * inputs, num_classes)
    bound = 1.0 / math.sqrt(num_classes)
    nn.init.uniform_(classifier.weight, -bound, bound)
    nn.init.zeros_(classifier.bias)
    return ConvClassifier(blocks, [nn.Dropout(dropout, inplace=True), classifier])


def efficientnet_b1(
    num_classes: int = 1000, *, dropout: float = 0.2, stochastic_depth: float = 0.2, small_images: bool = False
) -> ConvClassifier:
    """Return EfficientNet-B1; `small_images` keeps full size for two more stages, as is usual for 32x32 pictures."""
    return efficientnet(
        width=1.0,
        depth=1.1,
        num_classes=num_classes,
        dropout=dropout,
        stochastic_depth=stochastic_depth,
        small_images=small_images,
    )


def efficientnet_b1_32(num_classes: int = 10, *, dropout: float = 0.2, stochastic_depth: float = 0.2) -> ConvClassifier:
    """Return EfficientNet-B1 for the 32x32 pictures of CIFAR-10."""
    return efficientnet_b1(num_classes, dropout=dropout, stochastic_depth=stochastic_depth, small_images=True)
