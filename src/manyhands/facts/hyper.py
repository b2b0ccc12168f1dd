"""Hyperparameters of the papers: optimiser, schedule and epochs by model and data set. At present SPLIT's Table 2.

    hyper("resnet50", "cifar10").optimizer_text(steps_per_epoch=390)
    SGD:lr=0.1,momentum=0.9,weight_decay=0.0001,schedule=MultiStepLR,milestones=[31200,46800],gamma=0.1

The paper's schedules count epochs, ours steps, so an optimiser follows from how many steps an epoch has. Where the
table is not clear, `note` says how it was read.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from manyhands.facts.errors import BadValue, UnknownName, did_you_mean

STAND_IN = "synthetic-"


class Hyper(msgspec.Struct, frozen=True):
    """A column of the table."""

    model: str
    data: str
    optimizer: str
    """The optimiser without its schedule, as `facts.optimizer.parse` takes it."""
    epochs: int
    step_epochs: tuple[int, ...] = ()
    """The epochs after which the learning rate is multiplied by `decay`."""
    decay_every_epoch: bool = False
    decay: float = 1.0
    augmentation: bool = False
    """Whether pictures are changed at random in training. This is information only: no data set here does it."""
    pretrained: str = ""
    """The data set the model was trained on before."""
    batch_size: int = 32
    input_shape: tuple[int, ...] = ()
    """The shape of one sample in the paper's Table 3; empty where the model's own is meant."""
    model_options: Mapping[str, bool] = {}
    """Arguments of the model's factory."""
    source: str = "SPLIT Table 2; batch and input sizes: its Table 3"
    note: str = ""

    def optimizer_text(self, steps_per_epoch: int) -> str:
        """Return the optimiser as one word, as the command line takes it."""
        if steps_per_epoch < 1:
            raise BadValue(f"An epoch of {steps_per_epoch} steps; it must have 1 or more.")
        if self.decay_every_epoch:
            return f"{self.optimizer},schedule=StepLR,step_size={steps_per_epoch},gamma={self.decay:g}"
        if self.step_epochs:
            steps = ",".join(str(epoch * steps_per_epoch) for epoch in self.step_epochs)
            return f"{self.optimizer},schedule=MultiStepLR,milestones=[{steps}],gamma={self.decay:g}"
        return self.optimizer


_SGD = "SGD:lr=0.1,momentum=0.9,weight_decay=0.0001"
_SMALL = {"small_images": True}
HYPERS: tuple[Hyper, ...] = (
    Hyper("resnet50", "cifar10", _SGD, 160, (80, 120), decay=0.1, augmentation=True, input_shape=(3, 32, 32),
          model_options=_SMALL),
    Hyper("mobilenetv3-large", "cifar10", _SGD, 200, (100, 150, 180), decay=0.1, augmentation=True,
          input_shape=(3, 32, 32), model_options=_SMALL),
    Hyper("vgg19", "cifar10", "SGD:lr=0.0005,momentum=0.9,weight_decay=0.0001", 100, (80,), decay=0.1,
          input_shape=(3, 32, 32)),
    Hyper("chair", "3dchair", "Adam:lr=0.001", 10,
          note="The momentum of 0.9 is Adam's first beta, which PyTorch has by default."),
    Hyper("bilstm", "imdb", "Adam:lr=0.00008,weight_decay=0.001", 10, (3,), decay=0.1,
          note="The table gives no factor for the step at epoch 3: PyTorch's default, 0.1, is taken."),
    Hyper("resnet50", "tiny-imagenet", "RMSprop:lr=0.00005,weight_decay=0.001", 5, augmentation=True,
          pretrained="imagenet", input_shape=(3, 224, 224),
          note="The cell of the step epoch seems to reach here, but the table says there is no schedule."),
    Hyper("resnet50", "cifar10", "SGD:lr=0.1", 5, decay_every_epoch=True, decay=0.1, augmentation=True,
          pretrained="imagenet", input_shape=(3, 32, 32),
          note="An exponential schedule: PyTorch's counts epochs, so the factor is taken once an epoch."),
    Hyper("din", "movielens", "SGD:lr=0.1", 5, decay_every_epoch=True, decay=0.1,
          note="An exponential schedule: PyTorch's counts epochs, so the factor is taken once an epoch."),
)  # fmt: skip


def find_hyper(model: str, data: str, *, pretrained: str = "") -> Hyper | None:
    """Return the preset for a model and a data set, or what the data set stands in for; None where no paper has one."""
    real = data.removeprefix(STAND_IN)
    return next(
        (entry for entry in HYPERS if (entry.model, entry.data, entry.pretrained) == (model, real, pretrained)), None
    )


def hyper(model: str, data: str, *, pretrained: str = "") -> Hyper:
    """Return the same as `find_hyper`, or raise an error that names the existing presets."""
    entry = find_hyper(model, data, pretrained=pretrained)
    if entry is None:
        before = f", trained on {pretrained} before" if pretrained else ""
        titles = [_title(other) for other in HYPERS if other.model == model]
        hint = f"There are: {', '.join(titles)}." if titles else did_you_mean(model, {other.model for other in HYPERS})
        raise UnknownName(f"There are no hyper-parameters for {model} on {data}{before}.", hint=hint)
    return entry


def _title(entry: Hyper) -> str:
    return f"{entry.model} on {entry.data}" + (f" after {entry.pretrained}" if entry.pretrained else "")
