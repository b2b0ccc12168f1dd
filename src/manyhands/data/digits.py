"""1,797 handwritten digits, bundled so that a first training needs no download.

Source: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49,
its test set, as copied by scikit-learn. E. Alpaydin and C. Kaynak, "Cascading Classifiers", Kybernetika 34 (1998).
Licence: Creative Commons Attribution 4.0 International (CC BY 4.0). Changed here: stored as numpy arrays; when loaded,
enlarged from 8x8 to 16x16, scaled to 0..1 and normalised.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from torch.nn import functional
from torch.utils.data import Subset

from manyhands.data.arrays import ArrayData
from manyhands.data.data_sets import DataSets
from manyhands.data.split import held_out
from manyhands.facts.errors import BadData

FILE = Path(__file__).with_name("digits.npz")
INPUT_SHAPE = (1, 16, 16)
LARGEST_PIXEL = 16
# Of the enlarged pictures in the training part.
PIXEL_MEAN = 0.3058
PIXEL_STANDARD_DEVIATION = 0.3192


def load_digits(*, input_shape: tuple[int, ...] | None = None) -> DataSets:
    """Load the digits, a fifth of them held out. A model for colour pictures gets the grey value in each of its
    channels."""
    shape = input_shape or INPUT_SHAPE
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
        raise BadData(
            f"A digit is a picture of shape {INPUT_SHAPE}; the model takes {shape}.",
            hint="Use a model for pictures of 1 or 3 channels, such as tiny.",
        )
    with numpy.load(FILE, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(numpy.int64)
    pixels = torch.from_numpy(images).unsqueeze(1).float() / LARGEST_PIXEL
    enlarged = functional.interpolate(pixels, INPUT_SHAPE[1:], mode="bilinear")
    inputs = ((enlarged - PIXEL_MEAN) / PIXEL_STANDARD_DEVIATION).expand(-1, shape[0], -1, -1)
    everything = ArrayData(inputs, torch.from_numpy(labels), size=(shape[1], shape[2]))
    train, test = held_out(labels.tolist())
    return DataSets(
        name="digits",
        train=Subset(everything, train),
        test=Subset(everything, test),
        num_classes=10,
        input_shape=shape,
        classes=tuple("0123456789"),
    )
