"""Builds models, data sets and losses by name, as the command line gives them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadValue
from manyhands.job.config_sections import DATA, MODEL
from manyhands.models.registry import entry_of
from manyhands.plans.networks import parse_input

if TYPE_CHECKING:
    from torch import nn

    from manyhands.data.data_sets import DataSets


def build_model(name: str, data: DataSets) -> nn.Module:
    """Return a model for a data set, built with the numbers of classes and channels if it accepts them."""
    import torch

    from manyhands.models import registry

    torch.manual_seed(0)
    if name.partition(":")[0] in ("torchvision", "timm"):
        return registry.build(name, num_classes=data.num_classes) if data.num_classes else registry.build(name)
    options = {"num_classes": data.num_classes, "channels": data.input_shape[0] if data.input_shape else 0}
    options |= data.model_options
    accepted: Mapping[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # a callable without a signature accepts no options
        accepted = inspect.signature(registry.factory(name)).parameters
    return registry.build(name, **{key: value for key, value in options.items() if value and key in accepted})


def load_data(model: str, data: str, input: str = "") -> DataSets:
    """Return the data set of that name, in the shape that `input` gives, else in the model's own."""
    from manyhands.data.sets import load

    shape = parse_input(input)
    entry = entry_of(model)
    if shape is None and entry is not None and (model, data) != (MODEL, DATA):
        shape = entry.input_shape
    return load(data, input_shape=shape)


def none_held_out(data: DataSets) -> str:
    """Return a note on why there will be no accuracy, and how to get one."""
    from manyhands.data.loader import length

    return (
        f"{data.name} has {length(data.train)} sample(s), too few to hold one in five out: there will be no accuracy. "
        "Give some to test on: x_test and y_test in a .npz file, or a folder test beside train."
    )


def loss_of(name: str, data: DataSets) -> Any:
    from manyhands.models.registry import loss_function

    entry = entry_of(name)
    if entry is not None and entry.loss not in ("cross_entropy", "mse"):
        return loss_function(entry.loss)
    if data.has_boxes:
        return loss_function("region")
    return loss_function("cross_entropy" if data.num_classes else "mse")


def check_classes(model: nn.Module, name: str, data_name: str, data: DataSets) -> None:
    """Refuse a network that does not fit the data, such as one with fewer outputs than there are classes: later it
    would fail with a less helpful error."""
    import torch

    from manyhands.data.loader import example

    entry = entry_of(name)
    if not data.num_classes and entry is not None and entry.loss not in ("cross_entropy", "mse"):
        return
    inputs, targets = example(data.train, 2)
    was_training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        shape = "x".join(map(str, data.input_shape))
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadValue(
            f"{name} does not take inputs of shape {shape}, as {data_name} gives them: {reason.rstrip('.')}.",
            hint="Give data that fits with --data; pictures are resized by --input, like --input 3x64x64.",
        ) from error
    finally:
        model.train(was_training)
    if not data.num_classes:
        _check_numbers(output, targets, name, data_name)
    elif data.has_boxes:
        from manyhands.models.yolov2 import VOC_ANCHORS

        channels = len(VOC_ANCHORS) * (5 + data.num_classes)
        if not isinstance(output, torch.Tensor) or output.dim() != 4 or output.shape[1] != channels:
            gives = f"an output of shape {tuple(output.shape[1:])}" if isinstance(output, torch.Tensor) else "no tensor"
            raise BadValue(
                f"{name} gives {gives}; {data_name} has boxes of {data.num_classes} classes, for which a "
                f"detector gives maps of {channels} channels.",
                hint="Give a detector, such as --model yolov2, or a folder with one sub-folder of pictures per class.",
            )
    elif isinstance(output, torch.Tensor) and output.dim() == 2 and output.shape[1] < data.num_classes:
        raise BadValue(
            f"{name} has {output.shape[1]} outputs; {data_name} has {data.num_classes} classes.",
            hint="Build it with more: a factory may take num_classes.",
        )


def _check_numbers(output: Any, targets: Any, name: str, data_name: str) -> None:
    """Refuse targets of another shape than the output: unless they are class numbers, elements are compared one by
    one."""
    import torch

    if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor) or output.shape == targets.shape:
        return
    gives, wants = ("x".join(map(str, tensor.shape[1:])) or "one number" for tensor in (output, targets))
    hint = "Give targets of the shape that the model gives, or a model that gives theirs."
    if output.shape == (*targets.shape, 1):
        hint = "Give targets of the same shape: y[:, None]."
    elif targets.dim() == 1 and bool((targets == targets.round()).all()):
        hint = "Floats are numbers that the output is to come near to. If they are classes: y.astype('int64')."
    raise BadValue(
        f"{name} gives {gives} for a sample; the target of {data_name} is {wants}, {targets.flatten()[0].item():g} for "
        f"the first, as {str(targets.dtype).removeprefix('torch.')}.",
        hint=hint,
    )
