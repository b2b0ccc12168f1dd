"""SPLIT's Table 2 as presets: every column is there, and its schedule does in steps what the paper's does in epochs."""

from __future__ import annotations

import pytest
import torch

from manyhands.data.sets import STAND_INS
from manyhands.facts.errors import BadValue, UnknownName
from manyhands.facts.hyper import HYPERS, Hyper, find_hyper, hyper
from manyhands.facts.optimizer import parse
from manyhands.models.registry import ZOO
from scheduled_stepper import ScheduledStepper

STEPS = 4


def rates(one: Hyper) -> list[float]:
    """The learning rate of each epoch's first and last step."""
    stepper = ScheduledStepper(parse(one.optimizer_text(STEPS)), {"w": torch.zeros(1, requires_grad=True)})
    found = []
    for _ in range(one.epochs * STEPS):
        found.append(stepper.learning_rate)
        stepper.step()
    assert found[0::STEPS] == found[STEPS - 1 :: STEPS], "it changes between epochs only"
    return found[0::STEPS]


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(
    ("model", "data", "pretrained", "name", "options", "expected"),
    [
        ("resnet50", "cifar10", "", "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
         [0.1] * 80 + [0.01] * 40 + [0.001] * 40),
        ("mobilenetv3-large", "cifar10", "", "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
         [0.1] * 100 + [0.01] * 50 + [1e-3] * 30 + [1e-4] * 20),
        ("vgg19", "cifar10", "", "SGD", {"lr": 5e-4, "momentum": 0.9, "weight_decay": 1e-4},
         [5e-4] * 80 + [5e-5] * 20),
        ("chair", "3dchair", "", "Adam", {"lr": 1e-3}, [1e-3] * 10),
        ("bilstm", "imdb", "", "Adam", {"lr": 8e-5, "weight_decay": 1e-3}, [8e-5] * 3 + [8e-6] * 7),
        ("resnet50", "tiny-imagenet", "imagenet", "RMSprop", {"lr": 5e-5, "weight_decay": 1e-3}, [5e-5] * 5),
        ("resnet50", "cifar10", "imagenet", "SGD", {"lr": 0.1}, [0.1, 1e-2, 1e-3, 1e-4, 1e-5]),
        ("din", "movielens", "", "SGD", {"lr": 0.1}, [0.1, 1e-2, 1e-3, 1e-4, 1e-5]),
    ],
)  # fmt: skip
def test_table_2(
    model: str, data: str, pretrained: str, name: str, options: dict[str, float], expected: list[float]
) -> None:
    one = hyper(model, data, pretrained=pretrained)
    optimizer = parse(one.optimizer_text(STEPS))
    assert (optimizer.name, optimizer.options) == (name, options)
    assert rates(one) == pytest.approx(expected)
    assert model in ZOO
    assert len(HYPERS) == 8


def test_text_is_what_the_command_line_takes() -> None:
    text = hyper("resnet50", "cifar10").optimizer_text(390)
    assert text == (
        "SGD:lr=0.1,momentum=0.9,weight_decay=0.0001,schedule=MultiStepLR,milestones=[31200,46800],gamma=0.1"
    )
    with pytest.raises(BadValue, match="An epoch of 0 steps"):
        hyper("din", "movielens").optimizer_text(0)


def test_names() -> None:
    for stand_in in STAND_INS:
        real = stand_in.removeprefix("synthetic-")
        found = [one for one in HYPERS if one.data == real and not one.pretrained]
        assert found
        assert [find_hyper(one.model, stand_in) for one in found] == found
    assert find_hyper("tiny", "digits") is None
    with pytest.raises(UnknownName, match="no hyper-parameters for resnet50 on imdb") as caught:
        hyper("resnet50", "imdb")
    assert "resnet50 on cifar10 after imagenet" in caught.value.hint
    with pytest.raises(UnknownName) as caught:
        hyper("resnet5", "cifar10")
    assert "resnet50" in caught.value.hint
