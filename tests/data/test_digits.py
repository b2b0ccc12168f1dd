"""The bundled digits: whole, split fairly, in the form the tiny model takes, and learnable."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from manyhands.data.digits import FILE, load_digits
from manyhands.data.loader import example, length
from manyhands.data.sets import load
from manyhands.facts.errors import BadData
from manyhands.models.registry import ZOO, build


def whole(dataset: Dataset[Any] | None) -> tuple[Tensor, Tensor]:
    assert dataset is not None
    inputs, targets = example(dataset, 10_000)
    return inputs, targets


def test_the_file_holds_all_digits_and_is_small() -> None:
    assert FILE.stat().st_size < 100_000
    with numpy.load(FILE, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    assert (images.shape, images.dtype, labels.shape) == ((1797, 8, 8), numpy.uint8, (1797,))
    assert (images.min(), images.max()) == (0, 16)
    # Per class as UCI states it for the test set; the total of all pixels, so that none was changed.
    assert Counter(labels.tolist()) == dict(enumerate([178, 182, 177, 183, 181, 182, 181, 179, 174, 180]))
    assert int(images.sum(dtype=numpy.int64)) == 561718


def test_split_is_fixed_and_covers_everything_once() -> None:
    sets = load("digits")
    train_labels, test_labels = whole(sets.train)[1], whole(sets.test)[1]
    assert len(train_labels) + len(test_labels) == 1797
    assert 0.18 < len(test_labels) / 1797 < 0.21
    for label, count in Counter(test_labels.tolist()).items():
        assert 30 <= count <= 40, f"class {label} is tested too rarely or too often"
    again = load("digits")
    assert torch.equal(whole(again.test)[0], whole(sets.test)[0])
    assert again.train.indices == sets.train.indices  # type: ignore[attr-defined]
    assert not set(sets.train.indices) & set(sets.test.indices)  # type: ignore[attr-defined, union-attr]
    # Written down once: results of different versions and machines are only comparable on the same split.
    named = hashlib.sha256(str(sets.test.indices).encode()).hexdigest()  # type: ignore[union-attr]
    assert named[:16] == "5b0c6deb1259aac1"


def test_inputs_are_normalised_and_fit_tiny() -> None:
    sets = load("digits")
    inputs, labels = whole(sets.train)
    assert sets.input_shape == ZOO["tiny"].input_shape == tuple(inputs.shape[1:])
    assert (sets.num_classes, sets.classes[3], inputs.dtype, labels.dtype) == (10, "3", torch.float32, torch.int64)
    assert abs(float(inputs.mean())) < 0.01
    assert abs(float(inputs.std()) - 1) < 0.01


def test_other_sizes_and_colour() -> None:
    sets = load("digits", input_shape=(3, 24, 20))
    value, _ = sets.train[0]
    assert tuple(value.shape) == sets.input_shape == (3, 24, 20)
    assert torch.equal(value[0], value[2])


@pytest.mark.parametrize("shape", [(50,), (2, 16, 16), (1, 0, 16)])
def test_shapes_that_are_no_picture(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadData, match=r"\(1, 16, 16\); the model takes") as caught:
        load_digits(input_shape=shape)
    assert str(shape) in caught.value.message


def test_tiny_learns_them() -> None:
    torch.manual_seed(0)
    sets = load("digits")
    model = build("tiny")
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    inputs, targets = whole(sets.train)
    for epoch in range(3):
        order = torch.randperm(length(sets.train), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64):
            optimiser.zero_grad()
            functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimiser.step()
    model.eval()
    test_inputs, test_targets = whole(sets.test)
    with torch.no_grad():
        right = (model(test_inputs).argmax(1) == test_targets).float().mean()
    assert right > 0.9


def test_names_are_listed_without_torch() -> None:
    code = (
        "import sys; from manyhands.data import sets; from manyhands.data.order import BatchOrder; "
        "assert sets.NAMES == ('digits',); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
