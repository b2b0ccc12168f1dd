"""Exports a trained network as an ONNX file, to run it without PyTorch: `manyhands export`, `mh.export_onnx`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadFile, BadValue, CaptureFailed
from manyhands.facts.extras import load
from manyhands.files.documents import write_failed

if TYPE_CHECKING:
    from torch import nn

SUFFIX = ".onnx"
MOST_BYTES = 1_900_000_000
"""Most bytes of weights inside the file, which holds 2 GB; beyond that they are stored in a second file."""


def need_onnx() -> None:
    """Check that the ONNX packages are installed, before anything that takes long."""
    for module in ("onnx", "onnxscript"):
        load(module, "Exporting to ONNX")


def check_path(path: str | Path) -> Path:
    """Return the path, if an ONNX file can be written there; else raise."""
    path = Path(path).expanduser()
    if path.suffix.lower() != SUFFIX:
        raise BadValue(f"{path}: an ONNX file's name ends in {SUFFIX}.", hint=f"Write {path.stem or 'model'}{SUFFIX}.")
    if not path.absolute().parent.is_dir():
        raise BadFile(f"{path}: there is no folder {path.absolute().parent}.", hint="Make it first.")
    return path


def export_onnx(model: nn.Module, example: Any, path: str | Path) -> Path:
    """Write `model`, as it evaluates, to an ONNX file that takes batches of any size.

    example     inputs as the model takes them, a batch of 2 or more: a tensor, a tuple of tensors, or a dict by
                argument name. Their first axis is the batch; all other sizes are fixed.

    The model is unchanged. Weights beyond 1.9 GB are stored in a second file beside it.
    """
    need_onnx()
    path = check_path(path)
    import torch

    positional = example if isinstance(example, tuple) else () if isinstance(example, dict) else (example,)
    named = dict(example) if isinstance(example, dict) else {}
    for entry in (*positional, *named.values()):
        if not isinstance(entry, torch.Tensor) or entry.dim() < 1 or len(entry) < 2:
            description = tuple(entry.shape) if isinstance(entry, torch.Tensor) else type(entry).__name__
            raise BadValue(f"example holds {description}; every input is a tensor with a batch of 2 or more first.")
    batch = torch.export.Dim("batch")
    axes: Any = {name: {0: batch} for name in named} if named else tuple({0: batch} for _ in positional)
    with _evaluating(model), tempfile.TemporaryDirectory(dir=path.absolute().parent) as folder:
        made = Path(folder) / path.name
        try:
            with _quiet():
                torch.onnx.export(
                    model, positional, str(made), kwargs=named or None, dynamic_shapes=axes, dynamo=True,
                    external_data=_weight_bytes(model) > MOST_BYTES,
                )  # fmt: skip
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise CaptureFailed(
                f"{type(model).__name__} cannot be written as ONNX: {type(error).__name__}: {reason:.300}",
                hint="Run again with --debug for all that PyTorch says of it.",
            ) from error
        try:
            for entry in sorted(Path(folder).iterdir(), key=lambda entry: entry == made):  # the weights first
                os.replace(entry, path.with_name(entry.name))
        except OSError as error:
            raise write_failed(path, error) from error
    return path


def _weight_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; afterwards each of its modules returns to its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which prints its progress and warns about its own internals."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def export_run(source: str, path: str, *, model: str = "", shape: str = "") -> tuple[Path, str]:
    """Export a run's newest checkpoint, a checkpoint or a file of weights, by names; return the file that was written
    and a note on the origin of its weights."""
    need_onnx()
    target = check_path(path)
    from manyhands.inference.model import load_known

    network = load_known(model, source, shape)
    return export_onnx(network.model, _two(network.example), target), network.note


def _two(example: Any) -> Any:
    """Return a batch of two copies of one sample, as `mh.infer` takes it."""
    import torch

    if isinstance(example, dict):
        return {name: _two(value) for name, value in example.items()}
    return torch.stack([torch.as_tensor(example)] * 2)
