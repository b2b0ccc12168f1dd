"""Checkpoints: folders `checkpoints/step-000120` of a run, whole or not there at all.

    model.safetensors       a plain state dict: module.load_state_dict(safetensors.torch.load_file(...))
    optimizer.safetensors   the optimiser's tensors, by weight/key
    state.json              step, seed, optimiser, its plain values, free facts, the sizes and digests of both files,
                            and its own digest

Nothing in them is code. What is read is taken for hostile; a file of another checkpoint, or half a file, is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile, BadValue, DiskFull, ManyhandsError
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.units import format_bytes
from manyhands.files.documents import (
    file_mode,
    make_folder,
    read_document,
    sync_folder,
    write_document,
    write_failed,
)
from manyhands.files.plain import open_plain
from manyhands.graph.store import separate

CHECKPOINTS_FOLDER = "checkpoints"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
VERSION = 1
_STALE_SECONDS = 3600
"""A temporary folder older than this is what a killed process left."""
_NAME = re.compile(r"step-(\d{6,18})")
_ASIDE = re.compile(r"\.step-(\d{6,18})\.[0-9a-f.]+\.old")
_TEMPORARY = re.compile(r"\.step-\d{6,18}\.[0-9a-f.]+\.(?:tmp|old)")
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


@dataclass(frozen=True, eq=False)
class Newest:
    """The newest checkpoint that can be read, and what is wrong with every one after it."""

    path: Path
    checkpoint: Checkpoint
    broken: tuple[BadFile, ...] = ()
    """The newest first."""

    @property
    def note(self) -> str:
        """What a person is to be told: which were passed over and why, and which is used. Empty where none was."""
        if not self.broken:
            return ""
        wrong = "\n".join(error.message for error in self.broken)
        return f"{wrong}\nPassed over; the checkpoint before is used: {self.path}, of step {self.checkpoint.step}."


class _File(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class _State(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    step: int
    seed: int
    optimizer: dict[str, Any]
    optimizer_scalars: dict[str, Any]
    facts: dict[str, Any]
    files: dict[str, _File]
    sha256: str = ""
    """Of everything else here; version 0.2 did not write it."""


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `folder/checkpoints` and say where. One of the same step is replaced.

    It is written beside its place, forced to disk and renamed. While an old one is replaced it has another name for a
    moment, under which `latest` finds it too.
    """
    if not 0 <= checkpoint.step < 10**18:
        raise BadValue(f"A checkpoint is of step {checkpoint.step}; steps are >= 0.")
    target = Path(folder) / CHECKPOINTS_FOLDER / f"step-{checkpoint.step:06d}"
    temporary = _beside(target, "tmp")
    tensors = {MODEL_FILE: _plain(checkpoint.model), OPTIMIZER_FILE: _plain(checkpoint.optimizer_tensors)}
    try:
        make_folder(temporary)
        for name, state in tensors.items():
            save_file(state, temporary / name)
            (temporary / name).chmod(file_mode(temporary / name))
            _sync(temporary / name)
        write_document(temporary / STATE_FILE, _document(checkpoint, temporary))
        sync_folder(temporary)
        _put_in_place(temporary, target)
    except (OSError, DiskFull, SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        _delete(temporary)  # what is free is counted without it
        needed = sum(tensor.nbytes for state in tensors.values() for tensor in state.values())
        raise write_failed(target, _system_error(error), needed, what="the checkpoint") from error
    finally:
        _delete(temporary)
        with contextlib.suppress(OSError):
            target.parent.rmdir()  # unless something is in it
    return target


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint that `save` wrote, or somebody else; BadFile says what is wrong with it."""
    folder = Path(folder)
    state = _read_state(folder)
    _check_digests(folder, state)
    try:
        optimizer = Optimizer.from_dict(state.optimizer)
    except ManyhandsError as error:
        raise BadFile(f"{folder / STATE_FILE}: {error.message}", hint=error.hint) from error
    return Checkpoint(
        step=state.step,
        model=_read_tensors(folder / MODEL_FILE),
        optimizer_tensors=_read_tensors(folder / OPTIMIZER_FILE),
        optimizer_scalars=state.optimizer_scalars,
        optimizer=optimizer,
        seed=state.seed,
        facts=state.facts,
    )


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step below `folder/checkpoints`. Broken ones are passed over."""
    for path in reversed(_found(folder)):
        with contextlib.suppress(BadFile):
            _check_digests(path, _read_state(path))
            return path
    return None


def load_newest(folder: Path) -> Newest | None:
    """Read the checkpoint of the highest step that can be read; what is wrong with those after it comes along.

    None where there is no checkpoint at all. BadFile, which names all, where there are some and none is good.
    """
    broken: list[BadFile] = []
    for path in reversed(_found(folder)):
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
    """What is wrong with the checkpoints of later steps, the newest first."""
    found = []
    for path in reversed(_found(folder)):
        if _step_of(path.name) <= step:
            break
        try:
            load(path)
        except BadFile as error:
            found.append(error)
    return found


def is_any(folder: Path) -> bool:
    """Whether there is a checkpoint below `folder/checkpoints`, complete or not."""
    return bool(_found(folder))


def prune(folder: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest complete checkpoints, and what killed processes left; say which were deleted.

    Broken ones are not counted, so that they never push out the last that can be read.
    """
    if keep < 1:
        raise BadValue(f"{keep} checkpoints are to be kept; it must be >= 1.")
    kept = 0
    deleted = []
    for path in reversed(_found(folder)):
        if kept == keep:
            deleted.append(path)
            continue
        with contextlib.suppress(BadFile):
            _read_state(path)
            kept += 1
    for path in reversed(deleted):
        _delete(path)
        if os.path.lexists(path):
            raise BadFile(f"{path}: cannot be deleted.")
    _delete_stale(Path(folder) / CHECKPOINTS_FOLDER)
    return deleted[::-1]


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.{suffix}")


def _plain(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors in main memory that share nothing, as the format asks; tied weights are written twice."""
    for name, tensor in state.items():
        if name == "__metadata__" or tensor.is_meta or tensor.layout != torch.strided:
            why = (
                "has no values" if tensor.is_meta else "is not dense" if name != "__metadata__" else "has a taken name"
            )
            raise BadValue(f"The tensor '{name:.120}' {why}; a checkpoint cannot hold it.")
    return separate(state)


def _document(checkpoint: Checkpoint, written: Path) -> dict[str, Any]:
    files = {name: _File(*_size_and_digest(written / name)) for name in (MODEL_FILE, OPTIMIZER_FILE)}
    document: dict[str, Any] = msgspec.to_builtins(
        _State(
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
    return document | {"sha256": _own_digest(document)}


def _own_digest(document: Mapping[str, Any]) -> str:
    """Of a state's values but the digest itself, in their order, however they are spaced in the file."""
    plain = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(plain, default=str).encode()).hexdigest()  # default: to be refused when written


def _system_error(error: BaseException) -> OSError:
    """What the system said, also where a library put it into words of its own."""
    cause = error.__cause__ if isinstance(error, DiskFull) else error
    if isinstance(cause, OSError):
        return cause
    match = _SYSTEM_ERROR.search(str(cause))
    number = int(match.group(1)) if match else 0
    return OSError(number, os.strerror(number) if number else f"{cause!s:.300}")


def _put_in_place(new: Path, target: Path) -> None:
    """A folder cannot be renamed over a full one: the old one steps aside, and back if the new one cannot come."""
    aside = _beside(target, "old")
    replaces = os.path.lexists(target)
    if replaces:
        os.rename(target, aside)
    try:
        os.rename(new, target)
    except BaseException:
        if replaces:
            os.rename(aside, target)
        raise
    sync_folder(target.parent)
    _delete(aside)


def _found(folder: Path) -> list[Path]:
    """Checkpoints by step, complete or not; one that stepped aside comes before the one in its place."""
    parent = Path(folder) / CHECKPOINTS_FOLDER
    try:
        names = [entry.name for entry in parent.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadFile(f"{parent}: cannot be read: {error.strerror or error}.") from error
    steps = [(_step_of(name), name[0] != ".", name) for name in names]
    return [parent / name for step, _, name in sorted(steps) if step >= 0]


def _step_of(name: str) -> int:
    """The step that a checkpoint's name says, also of one that stepped aside; -1: this is no checkpoint's name."""
    match = _NAME.fullmatch(name) or _ASIDE.fullmatch(name)
    return int(match.group(1)) if match else -1


def _read_state(folder: Path) -> _State:
    """What state.json says, once both files are there in the size it gives."""
    if not folder.is_dir():
        raise BadFile(f"{folder}: there is no such checkpoint; it is a folder with {STATE_FILE}.")
    path = folder / STATE_FILE
    _regular_size(path)
    document = read_document(path)
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != VERSION:
        hint = "Read it with the version of manyhands that wrote it."
        raise BadFile(f"{path}: a checkpoint of version {version!s:.40}; this is version {VERSION}.", hint=hint)
    state = decode(document, _State, str(path))
    if state.step < 0:
        raise BadFile(f"{path}: step is {state.step}; it must be >= 0.")
    assert isinstance(document, dict)
    if state.sha256 and (digest := _own_digest(document)) != state.sha256:
        raise BadFile(
            f"{path}: the SHA-256 of its values is {digest[:16]}…; it says {state.sha256:.16}…. The file was damaged "
            f"or changed."
        )
    if set(state.files) != {MODEL_FILE, OPTIMIZER_FILE}:
        names = ", ".join(sorted(state.files))
        raise BadFile(f"{path}: its files are {names:.120}; they must be {MODEL_FILE}, {OPTIMIZER_FILE}.")
    for name, expected in state.files.items():
        size = _regular_size(folder / name)
        if size != expected.bytes:
            raise BadFile(
                f"{folder / name}: {size} bytes ({format_bytes(size)}); {STATE_FILE} says {expected.bytes}. The "
                f"checkpoint is cut short, or mixed of two."
            )
    return state


def _regular_size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise BadFile(f"{path}: is not a plain file.")
    return found.st_size


def _check_digests(folder: Path, state: _State) -> None:
    for name, expected in state.files.items():
        try:
            _, digest = _size_and_digest(folder / name)
        except OSError as error:
            raise BadFile(f"{folder / name}: cannot be read: {error.strerror or error}.") from error
        if digest != expected.sha256:
            raise BadFile(
                f"{folder / name}: its SHA-256 is {digest[:16]}…; {STATE_FILE} says {expected.sha256:.16}…. The file "
                f"was damaged, or is of another checkpoint."
            )


def _size_and_digest(path: Path) -> tuple[int, str]:
    with open_plain(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return os.fstat(file.fileno()).st_size, digest


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except Exception as error:  # the format's reader raises its own error, and whatever PyTorch does
        raise BadFile(f"{path}: is not a safetensors file: {error!s:.300}.") from error
    return tensors


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _delete_stale(parent: Path) -> None:
    """What killed processes left. An old checkpoint that stepped aside stays until one is in its place."""
    with contextlib.suppress(OSError):
        for path in list(parent.iterdir()):
            if not _TEMPORARY.fullmatch(path.name) or time.time() - path.stat().st_mtime < _STALE_SECONDS:
                continue
            match = _ASIDE.fullmatch(path.name)
            if match is None or (parent / f"step-{match.group(1)}").exists():
                _delete(path)
