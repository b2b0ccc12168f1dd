"""Transfer learning: begin with weights that were trained elsewhere, and train only the layers after some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

from manyhands.executor import checkpoint, checkpoint_files
from manyhands.facts.errors import BadFile, BadValue, unknown
from manyhands.facts.network import Network
from manyhands.job.evaluation import captured
from manyhands.session.session import Say

MOST_NAMED = 5


def begin_with(model: nn.Module, source: str | Path, say: Say | None = None) -> list[str]:
    """Copy weights into a model: from a run's newest checkpoint, one checkpoint, or a .safetensors file.

    Weights without a counterpart of their name and shape stay as they are (a head for other classes). Returns their
    names.
    """
    loaded = _read(Path(source))
    state = model.state_dict()
    fitting = {
        name: tensor for name, tensor in loaded.items()
        if name in state and tensor.shape == state[name].shape
        and tensor.dtype.is_complex == state[name].dtype.is_complex
    }  # fmt: skip
    if not fitting:
        raise BadValue(
            f"{source}: none of its {len(loaded)} weights is one of {type(model).__name__}'s, by name and shape.",
            hint="Give the model that these weights are of.",
        )
    model.load_state_dict(fitting, strict=False)
    unmatched = [name for name in state if name not in fitting]
    if say is not None:
        shown = ", ".join(unmatched[:MOST_NAMED]) + (" ..." if len(unmatched) > MOST_NAMED else "")
        say(f"{len(fitting)} of {len(state)} weights are those of {source}" + (f"; not {shown}" if unmatched else ""))
    return unmatched


def _read(path: Path) -> dict[str, torch.Tensor]:
    if (path / checkpoint_files.STATE_FILE).exists():
        return checkpoint.load(path).model
    if path.is_dir():
        newest = checkpoint.load_newest(path)
        if newest is None:
            raise BadFile(f"{path}: has no complete checkpoint.", hint="Give a run's folder, or a .safetensors file.")
        return newest.checkpoint.model
    if not path.is_file():
        raise BadFile(f"{path}: there is no such file or folder.", hint="Give a run's folder, or a .safetensors file.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadFile(
            f"{path}: cannot be read as .safetensors: {str(error)[:200]}.", hint="Pickled weights are not read."
        ) from error


def frozen_weights(network: Network, freeze: int | str) -> tuple[str, ...]:
    """Return the names of the trained weights before a layer; `freeze` is its number, or its name."""
    names = [layer.name for layer in network.layers]
    if str(freeze) in names:
        count = names.index(str(freeze))
    elif str(freeze).isdecimal():
        count = int(freeze)
    else:
        raise unknown("layer to freeze up to", str(freeze), names)
    if count >= len(names):
        raise BadValue(
            f"freeze is {freeze}; {network.name} has {len(names)} layers, and nothing would be left to train.",
            hint=f"Freeze at most {len(names) - 1}.",
        )
    before = network.weights_of(0, network.layers[count].first)
    behind = set(network.weights_of(network.layers[count].first, len(network.ops)))
    shared = [name for name in before if name in behind and network.weights[name].trainable]
    if shared:
        raise BadValue(f"{shared[0]} is used on both sides of layer {freeze}: it cannot be frozen on one of them.")
    return tuple(name for name in before if network.weights[name].trainable)


@contextlib.contextmanager
def frozen(
    model: nn.Module, data: Dataset[Any], freeze: int | str, *, granularity: str, name: str, say: Say | None = None
) -> Iterator[None]:
    """Freeze the first layers: they are not trained, and get no gradients; afterwards the model is as it was."""
    if str(freeze) == "0":
        yield
        return
    network = captured(model, data, None, granularity=granularity, name=name).network
    names = set(frozen_weights(network, freeze))
    changed = [weight for key, weight in model.named_parameters() if key in names and weight.requires_grad]
    if not changed:
        raise BadValue(f"There is nothing to train before layer {freeze} of {network.name}.", hint="Leave out freeze.")
    for weight in changed:
        weight.requires_grad_(False)
    if say is not None:
        say(f"{len(changed)} weights before layer {freeze} are frozen")
    try:
        yield
    finally:
        for weight in changed:
            weight.requires_grad_(True)
