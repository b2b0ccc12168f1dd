"""Loads a network to run, by names: the model, its weights, the form of its samples, and the names of its classes.

A run's folder records all of these. Weights alone tell how many classes and channels the model was built with.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.data.sets import NAMES, STAND_INS
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, UnknownName
from manyhands.inference.lines import Labels
from manyhands.job.config_sections import DATA, MODEL
from manyhands.job.named import load_data
from manyhands.models.registry import ZOO, entry_of, from_file
from manyhands.plans.networks import parse_input
from manyhands.runtime.record import read_config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from manyhands.data.data_sets import DataSets
    from manyhands.data.wanted import Sample, SampleForm

_SHOWN = 4


@dataclass(frozen=True)
class RunNames:
    """The names in a run's folder: its model, its data, and the shape of a sample."""

    model: str = MODEL
    data: str = DATA
    input: str = ""


@dataclass(frozen=True, eq=False)
class Known:
    """A network with its weights, ready to be captured."""

    name: str
    model: nn.Module
    example: Sample
    wanted: SampleForm | dict[str, SampleForm]
    labels: Labels
    note: str
    """The origin of the weights, in a sentence."""


def load_known(model: str = "", weights: str = "", shape: str = "", *, source: str = "", resize: bool = False) -> Known:
    """Return the network that a command names, with its weights. `source`: the inputs, whose shape is used if nothing
    else gives it; `resize`: pictures of another height and width are resized to fit."""
    from manyhands.models import registry

    run, state, note = _weights(Path(weights).expanduser()) if weights else (None, {}, "")
    name = _same_model(model, run, weights)
    entry = entry_of(name)
    input_shape = parse_input(shape) or (parse_input(run.input) if run is not None else None)
    data = _loaded(run) if run is not None and name not in ZOO else None
    is_guessed = input_shape is None and data is None and entry is None
    if input_shape is None and (data is not None or entry is None):
        input_shape = data.input_shape if data is not None else _shape_of(name, source)
    module = _built(name, state, run, data, weights)
    module.eval()
    try:
        batch = registry.example_batch(name, 2, input_shape=input_shape)
    except (ValueError, RuntimeError) as error:
        raise BadValue(
            f"{name} does not take samples of {'x'.join(map(str, input_shape or ()))}: {error}.", hint="Give --shape."
        ) from error
    example, sample_forms = _of_one(module, batch, run.data if run is not None else "")
    if is_guessed and input_shape is not None and not isinstance(example, dict):
        _check_guess(module, example, name, source)
    are_classes = entry is None or entry.loss == "cross_entropy"
    named = run.data if run is not None else source if source in (*NAMES, *STAND_INS) else ""
    names = data.classes if data is not None else _class_names(named) if named else ()
    if not weights:
        note = "The weights are random: the answers mean nothing. Give trained ones with --weights."
    return Known(
        name, module, example, _resizing(sample_forms) if resize else sample_forms, Labels(names, are_classes), note
    )


def _same_model(model: str, run: RunNames | None, weights: str) -> str:
    if run is not None and model and model != run.model:
        raise BadValue(f"{weights} is a run of {run.model}; --model is {model}.", hint="Leave out --model.")
    if run is not None and not model:
        return from_file(run.model, weights)
    return model or MODEL


def _shape_of(name: str, source: str) -> tuple[int, ...] | None:
    """Return the shape of the inputs, unless the model's module defines itself what it takes."""
    from manyhands.data.sample_arrays import shape_in
    from manyhands.data.sets import load
    from manyhands.models.registry import factory, module_of

    factory(name)  # imports its module
    if not source or hasattr(module_of(name), "example_batch"):
        return None
    return load(source).input_shape if source in (*NAMES, *STAND_INS) else shape_in(source)


def _check_guess(module: nn.Module, example: Tensor, name: str, source: str) -> None:
    """Check that the model runs on samples along the file's first axis, if only the file tells what a sample is."""
    import torch

    from manyhands.data.wanted import shape_text

    try:
        with torch.no_grad():
            module(torch.stack([example, example]))
    except Exception as error:  # a module may raise anything
        raise BadValue(
            f"{name} does not run on samples of {shape_text(example.shape)}, which {source} has on its first axis: "
            f"{(str(error).splitlines() or ['?'])[0]:.200}",
            hint="Say what one sample is, like --shape 3x32x32: the file holds one, or several on one more axis.",
        ) from error


# Weights


def _weights(path: Path) -> tuple[RunNames | None, dict[str, Tensor], str]:
    """Return run, weights and a note on their origin: from a run's newest checkpoint, a checkpoint's folder or a file.

    The run is None where it is not known.
    """
    from manyhands.executor import checkpoint, checkpoint_files

    if not path.exists():
        raise BadFile(
            f"{path}: there is no such run folder or file of weights.",
            hint="List runs: ls runs\nTrain: manyhands train",
        )
    if path.is_file():
        return None, _tensors(path), f"Weights of {path}."
    if (path / checkpoint_files.MODEL_FILE).is_file():
        folder = path.absolute().parent.parent
        run = _run(folder) if (folder / "config.yaml").exists() else None
        return run, checkpoint.load(path).model, f"Weights of {path}."
    newest = checkpoint.load_newest(path)
    if newest is None:
        raise BadFile(f"{path}: has no checkpoint.", hint="Give a run folder, or a .safetensors file.")
    note = f"Weights of {newest.path}, after {newest.checkpoint.step} steps."
    run = _run(path) if (path / "config.yaml").exists() else None
    return run, newest.checkpoint.model, f"{newest.note}\n{note}".strip()


def _run(folder: Path) -> RunNames | None:
    """Return the names of a run, if it was started by names."""
    stored = read_config(folder).get("wish")
    if not isinstance(stored, dict):
        return None
    fields = {key: stored[key] for key in ("model", "data", "input") if isinstance(stored.get(key), str)}
    return RunNames(**fields)


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:  # the format's reader raises its own error, and whatever PyTorch does
        raise BadFile(
            f"{path}: is not a safetensors file: {error!s:.200}.",
            hint="safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')",
        ) from error
    return tensors


def _loaded(run: RunNames) -> DataSets | None:
    """Return the data of a run, if it still exists: it gives the shapes and sizes of a model from elsewhere."""
    with contextlib.suppress(BadFile, UnknownName):  # it may have been removed since
        return load_data(run.model, run.data, run.input)
    return None


# The model


def _built(
    name: str, state: Mapping[str, Tensor], run: RunNames | None, data: DataSets | None, weights: str
) -> nn.Module:
    """Return the model with the weights loaded."""
    import torch

    from manyhands.job.named import build_model
    from manyhands.models import registry

    torch.manual_seed(0)
    module = build_model(name, data) if data is not None else registry.build(name)
    if not state:
        return module
    state = _with_tied(module, state)
    options = _options(name, module, state)
    if options:
        module = registry.build(name, **options)
    if _misfits(module, state) and data is None and run is not None and (run_data := _loaded(run)) is not None:
        module = build_model(name, run_data)
    if misfits := _misfits(module, state):
        more = f" and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else ""
        raise BadFile(
            f"{weights}: does not fit {name}: {'; '.join(misfits[:_SHOWN])}{more}.",
            hint="Give the model that the weights were trained with: --model NAME",
        )
    module.load_state_dict(dict(state))
    return module


def _with_tied(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return stored weights with those that are stored under another name only: a tied weight is stored once."""
    stored_name = {tensor.data_ptr(): key for key, tensor in module.state_dict().items() if key in state}
    tied = {
        key: state[stored_name[tensor.data_ptr()]]
        for key, tensor in module.state_dict().items()
        if key not in state and tensor.numel() and tensor.data_ptr() in stored_name
    }
    return {**state, **tied}


def _misfits(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    parameters = module.state_dict()
    misfits = [f"'{key}' is missing" for key in parameters if key not in state]
    misfits += [f"'{key}' is not in it" for key in state if key not in parameters]
    misfits += [
        f"'{key}' is {_by(tensor)}, not {_by(parameters[key])}"
        for key, tensor in state.items()
        if key in parameters and tensor.shape != parameters[key].shape
    ]
    return misfits


def _by(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"


def _options(name: str, module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how many classes and channels the weights were made for, as options that the model accepts."""
    from manyhands.models import registry

    sizes_by_option: dict[str, set[int]] = {"num_classes": set(), "channels": set()}
    for key, tensor in module.state_dict().items():
        stored = state.get(key)
        if stored is None or stored.dim() != tensor.dim() or stored.shape == tensor.shape:
            continue
        differs = [axis for axis in range(tensor.dim()) if stored.shape[axis] != tensor.shape[axis]]
        if differs in ([0], [1]):
            sizes_by_option["num_classes" if differs == [0] else "channels"].add(stored.shape[differs[0]])
    accepted: Mapping[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # a callable without a signature accepts no options
        accepted = inspect.signature(registry.factory(name)).parameters
    if name.partition(":")[0] in ("torchvision", "timm"):
        accepted = {"num_classes": None}
    return {key: sizes.pop() for key, sizes in sizes_by_option.items() if len(sizes) == 1 and key in accepted}


def _of_one(module: nn.Module, batch: Any, data: str) -> tuple[Sample, SampleForm | dict[str, SampleForm]]:
    """Return one sample of an example batch, and the form of samples; floats are of the model's own type."""
    import torch

    from manyhands.data import digits, pictures
    from manyhands.data.wanted import SampleForm

    floats = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
    pixels = (pictures.PIXEL_MEAN, pictures.PIXEL_STANDARD_DEVIATION)
    if data.partition(":")[0] == "digits":  # enlarged pictures of its own brightness
        pixels = (digits.PIXEL_MEAN, digits.PIXEL_STANDARD_DEVIATION)

    def one(tensor: Tensor) -> tuple[Tensor, SampleForm]:
        kind = floats if tensor.is_floating_point() else tensor.dtype
        return tensor[0].to(kind), SampleForm(tuple(tensor.shape[1:]), kind, *pixels)

    if isinstance(batch, dict):
        pairs = {key: one(tensor) for key, tensor in batch.items()}
        return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}
    if not isinstance(batch, torch.Tensor):
        raise BadValue(
            f"The model takes a {type(batch).__name__} for a batch, which no file here holds.",
            hint="In Python: mh.infer(model, inputs).",
        )
    return one(batch)


def _resizing(sample_forms: SampleForm | dict[str, SampleForm]) -> SampleForm | dict[str, SampleForm]:
    """Return the same forms with pictures resized; of several arrays, only those that are pictures."""
    if not isinstance(sample_forms, dict):
        return sample_forms.resizing()
    pictures = {key: sample_form.resizing() for key, sample_form in sample_forms.items() if sample_form.can_resize}
    if not pictures:
        raise BadValue(f"--resize: the network takes no pictures, but {', '.join(sample_forms)}.", hint="Leave it out.")
    return sample_forms | pictures


# Classes


def _class_names(data: str) -> tuple[str, ...]:
    """Return the class names of a run's data, without reading a picture; empty if the data is gone or has none."""
    path = Path(data).expanduser()
    if data not in (*NAMES, *STAND_INS) and path.is_dir() and (names := _folders(path)):
        return names
    with contextlib.suppress(ManyhandsError, OSError):
        from manyhands.data.sets import load

        return load(data).classes
    return ()


def _folders(path: Path) -> tuple[str, ...]:
    """Return the names of the folders, one for each class: those in train/, else those in `path`."""
    for folder in (path / "train", path):
        with contextlib.suppress(OSError):
            names = sorted(
                entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
            )
            if names:
                return tuple(names)
    return ()
