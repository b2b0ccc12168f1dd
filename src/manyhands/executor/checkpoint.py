"""Checkpoints: folders `checkpoints/step-000120` of a run, whole or not there at all.

    model.safetensors       a plain state dict: module.load_state_dict(safetensors.torch.load_file(...))
    optimizer.safetensors   the optimiser's tensors, by weight/key
    state.json              step, seed, optimiser, its plain values, free facts, the sizes and digests of both files,
                            and its own digest

None of them holds code. How they lie on the disk is in checkpoint_files.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from manyhands.executor.checkpoint_files import (
    CHECKPOINTS_FOLDER,
    EMA_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    VERSION,
    CheckpointFile,
    StateDocument,
    beside,
    check_digests,
    checkpoint_folders,
    delete,
    delete_stale,
    document_digest,
    put_in_place,
    read_state,
    read_tensors,
    size_and_digest,
    step_of,
    sync,
)
from manyhands.facts.errors import BadFile, BadValue, DiskFull, ManyhandsError
from manyhands.facts.optimizer import Optimizer
from manyhands.files.documents import (
    file_mode,
    make_folder,
    sync_folder,
    write_document,
    write_failed,
)
from manyhands.graph.store import separate

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass(eq=False)
class Checkpoint:
    """All that is needed to go on from a step as if there had been no break."""

    step: int
    model: dict[str, torch.Tensor]
    optimizer_tensors: dict[str, torch.Tensor]
    optimizer_scalars: dict[str, Any]
    optimizer: Optimizer
    seed: int
    facts: dict[str, Any] = field(default_factory=dict)
    ema: dict[str, torch.Tensor] | None = None
    """The model with averaged weights, as `model`; None: no average is kept."""


@dataclass(frozen=True, eq=False)
class Newest:
    """The newest checkpoint that can be read, and what is wrong with every later one."""

    path: Path
    checkpoint: Checkpoint
    broken: tuple[BadFile, ...] = ()
    """The errors of the later checkpoints, the newest first."""

    @property
    def note(self) -> str:
        """A note for the user: which checkpoints were passed over and why, and which is used. Empty where none was
        passed over."""
        if not self.broken:
            return ""
        wrong = "\n".join(error.message for error in self.broken)
        return f"{wrong}\nPassed over; the checkpoint before is used: {self.path}, of step {self.checkpoint.step}."


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `folder/checkpoints` and return its path. One of the same step is replaced.

    It is written beside its place, forced to disk and renamed. While an old one is replaced it has another name for a
    moment, under which `latest` finds it too.
    """
    if not 0 <= checkpoint.step < 10**18:
        raise BadValue(f"A checkpoint is of step {checkpoint.step}; steps are >= 0.")
    target = Path(folder) / CHECKPOINTS_FOLDER / f"step-{checkpoint.step:06d}"
    temporary = beside(target, "tmp")
    tensors = {MODEL_FILE: _plain(checkpoint.model), OPTIMIZER_FILE: _plain(checkpoint.optimizer_tensors)}
    if checkpoint.ema is not None:
        tensors[EMA_FILE] = _plain(checkpoint.ema)
    try:
        make_folder(temporary)
        for name, state in tensors.items():
            save_file(state, temporary / name)
            (temporary / name).chmod(file_mode(temporary / name))
            sync(temporary / name)
        write_document(temporary / STATE_FILE, _document(checkpoint, temporary, tensors))
        sync_folder(temporary)
        put_in_place(temporary, target)
    except (OSError, DiskFull, SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        delete(temporary)  # so that free space is counted without it
        needed = sum(tensor.nbytes for state in tensors.values() for tensor in state.values())
        raise write_failed(target, _system_error(error), needed, what="the checkpoint") from error
    finally:
        delete(temporary)
        with contextlib.suppress(OSError):
            target.parent.rmdir()  # unless something is in it
    return target


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint that `save` wrote, or another program; BadFile says what is wrong with it."""
    folder = Path(folder)
    state = read_state(folder)
    check_digests(folder, state)
    try:
        optimizer = Optimizer.from_dict(state.optimizer)
    except ManyhandsError as error:
        raise BadFile(f"{folder / STATE_FILE}: {error.message}", hint=error.hint) from error
    return Checkpoint(
        step=state.step,
        model=read_tensors(folder / MODEL_FILE),
        optimizer_tensors=read_tensors(folder / OPTIMIZER_FILE),
        optimizer_scalars=state.optimizer_scalars,
        optimizer=optimizer,
        seed=state.seed,
        facts=state.facts,
        ema=read_tensors(folder / EMA_FILE) if EMA_FILE in state.files else None,
    )


def latest(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step below `folder/checkpoints`; None: there is none. Broken ones
    are passed over."""
    for path in reversed(checkpoint_folders(folder)):
        with contextlib.suppress(BadFile):
            check_digests(path, read_state(path))
            return path
    return None


def load_newest(folder: Path) -> Newest | None:
    """Read the checkpoint of the highest step that can be read, together with what is wrong with later ones.

    Return None where there is no checkpoint at all. Raise BadFile, which names all of them, where there are some and
    none is good.
    """
    broken: list[BadFile] = []
    for path in reversed(checkpoint_folders(folder)):
        try:
            return Newest(path, load(path), tuple(broken))
        except BadFile as error:
            broken.append(error)
    if not broken:
        return None
    raise BadFile(
        f"{Path(folder) / CHECKPOINTS_FOLDER}: none of {len(broken)} checkpoint(s) can be read.\n"
        + "\n".join(error.message for error in broken),
        hint="Bring one back from a copy, or start anew, without resume.",
    )


def broken_after(folder: Path, step: int) -> list[BadFile]:
    """Return what is wrong with the checkpoints of later steps, the newest first."""
    errors = []
    for path in reversed(checkpoint_folders(folder)):
        if step_of(path.name) <= step:
            break
        try:
            load(path)
        except BadFile as error:
            errors.append(error)
    return errors


def is_any(folder: Path) -> bool:
    """Return whether there is a checkpoint below `folder/checkpoints`, complete or not."""
    return bool(checkpoint_folders(folder))


def prune(folder: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest complete checkpoints, and what killed processes left; return the deleted paths.

    Broken ones are not counted, so that they never push out the last one that can be read.
    """
    if keep < 1:
        raise BadValue(f"{keep} checkpoints are to be kept; it must be >= 1.")
    kept_count = 0
    deleted = []
    for path in reversed(checkpoint_folders(folder)):
        if kept_count == keep:
            deleted.append(path)
            continue
        with contextlib.suppress(BadFile):
            read_state(path)
            kept_count += 1
    for path in reversed(deleted):
        delete(path)
        if os.path.lexists(path):
            raise BadFile(f"{path}: cannot be deleted.")
    delete_stale(Path(folder) / CHECKPOINTS_FOLDER)
    return deleted[::-1]


def _plain(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors in main memory that share nothing, as the format requires; tied weights are written
    twice."""
    for name, tensor in state.items():
        if name == "__metadata__" or tensor.is_meta or tensor.layout != torch.strided:
            why = (
                "has no values" if tensor.is_meta else "is not dense" if name != "__metadata__" else "has a taken name"
            )
            raise BadValue(f"The tensor '{name:.120}' {why}; a checkpoint cannot hold it.")
    return separate(state)


def _document(checkpoint: Checkpoint, written: Path, names: Iterable[str]) -> dict[str, Any]:
    files = {name: CheckpointFile(*size_and_digest(written / name)) for name in names}
    document: dict[str, Any] = msgspec.to_builtins(
        StateDocument(
            version=VERSION,
            step=checkpoint.step,
            seed=checkpoint.seed,
            optimizer=checkpoint.optimizer.to_dict(),
            optimizer_scalars={},
            facts={},
            files=files,
        )
    )
    document |= {"optimizer_scalars": checkpoint.optimizer_scalars, "facts": checkpoint.facts}
    return document | {"sha256": document_digest(document)}


def _system_error(error: BaseException) -> OSError:
    """Return the system's error, also where a library put it into words of its own."""
    cause = error.__cause__ if isinstance(error, DiskFull) else error
    if isinstance(cause, OSError):
        return cause
    match = _SYSTEM_ERROR.search(str(cause))
    number = int(match.group(1)) if match else 0
    return OSError(number, os.strerror(number) if number else f"{cause!s:.300}")
