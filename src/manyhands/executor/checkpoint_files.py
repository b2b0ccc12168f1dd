"""The files of a checkpoint: their names, sizes and digests, and how a folder takes its place.

Files that are read are treated as hostile: a file of another checkpoint, or half a file, is refused.
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
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile
from manyhands.facts.units import format_bytes
from manyhands.files.documents import make_folder, read_document, sync_folder, write_failed
from manyhands.files.plain import open_plain

CHECKPOINTS_FOLDER = "checkpoints"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
EMA_FILE = "ema.safetensors"
"""The averaged weights, beside the others only where an average is kept."""
STATE_FILE = "state.json"
VERSION = 1
_STALE_SECONDS = 3600
"""A temporary folder older than this was left by a killed process."""
_NAME = re.compile(r"step-(\d{6,18})")
_ASIDE = re.compile(r"\.step-(\d{6,18})\.[0-9a-f.]+\.old")
_TEMPORARY = re.compile(r"\.step-\d{6,18}\.[0-9a-f.]+\.(?:tmp|old)")


class CheckpointFile(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class StateDocument(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    step: int
    seed: int
    optimizer: dict[str, Any]
    optimizer_scalars: dict[str, Any]
    facts: dict[str, Any]
    files: dict[str, CheckpointFile]
    sha256: str = ""
    """The digest of everything else here; version 0.2 did not write it."""


def document_digest(document: Mapping[str, Any]) -> str:
    """Return the digest of a state's values except the digest itself, in their order, however the file spaces them."""
    plain = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(plain, default=str).encode()).hexdigest()  # default: to be refused when written


def read_state(folder: Path) -> StateDocument:
    """Return the contents of state.json, once both files are there in the size that it gives."""
    if not folder.is_dir():
        raise BadFile(f"{folder}: there is no such checkpoint; it is a folder with {STATE_FILE}.")
    path = folder / STATE_FILE
    _regular_size(path)
    document = read_document(path)
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != VERSION:
        hint = "Read it with the version of manyhands that wrote it."
        raise BadFile(f"{path}: a checkpoint of version {version!s:.40}; this is version {VERSION}.", hint=hint)
    state = decode(document, StateDocument, str(path))
    if state.step < 0:
        raise BadFile(f"{path}: step is {state.step}; it must be >= 0.")
    assert isinstance(document, dict)
    if state.sha256 and (digest := document_digest(document)) != state.sha256:
        raise BadFile(
            f"{path}: the SHA-256 of its values is {digest[:16]}…; it says {state.sha256:.16}…. The file was damaged "
            f"or changed."
        )
    if set(state.files) - {EMA_FILE} != {MODEL_FILE, OPTIMIZER_FILE}:
        names = ", ".join(sorted(state.files))
        raise BadFile(f"{path}: its files are {names:.120}; they must be {MODEL_FILE}, {OPTIMIZER_FILE}.")
    for name, expected in state.files.items():
        size = _regular_size(folder / name)
        if size != expected.bytes:
            raise BadFile(
                f"{folder / name}: {size} bytes ({format_bytes(size)}); {STATE_FILE} says {expected.bytes}. The "
                f"checkpoint is cut short, or mixed from two."
            )
    return state


def _regular_size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadFile(f"{path}: is not a plain file.")
    return status.st_size


def check_digests(folder: Path, state: StateDocument) -> None:
    for name, expected in state.files.items():
        try:
            _, digest = size_and_digest(folder / name)
        except OSError as error:
            raise BadFile(f"{folder / name}: cannot be read: {error.strerror or error}.") from error
        if digest != expected.sha256:
            raise BadFile(
                f"{folder / name}: its SHA-256 is {digest[:16]}…; {STATE_FILE} says {expected.sha256:.16}…. The file "
                f"was damaged, or belongs to another checkpoint."
            )


def size_and_digest(path: Path) -> tuple[int, str]:
    with open_plain(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return os.fstat(file.fileno()).st_size, digest


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except Exception as error:  # the format's reader raises its own error, and whatever PyTorch does
        raise BadFile(f"{path}: is not a safetensors file: {error!s:.300}.") from error
    return tensors


def sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def delete_stale(parent: Path) -> None:
    """Delete what killed processes left. An old checkpoint that stepped aside stays until there is one in its place."""
    with contextlib.suppress(OSError):
        for path in list(parent.iterdir()):
            if not _TEMPORARY.fullmatch(path.name) or time.time() - path.stat().st_mtime < _STALE_SECONDS:
                continue
            match = _ASIDE.fullmatch(path.name)
            if match is None or (parent / f"step-{match.group(1)}").exists():
                delete(path)


def beside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.{suffix}")


def put_in_place(new: Path, target: Path) -> None:
    """Move a new folder to its place. A folder cannot be renamed over a full one: the old one steps aside, and back if
    the new one cannot take its place."""
    aside = beside(target, "old")
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
    delete(aside)


def keep_as(checkpoint: Path, target: Path) -> None:
    """Keep a checkpoint under another name too, whole or not at all, in place of what was there."""
    temporary = beside(target, "tmp")
    try:
        make_folder(temporary)
        for name in (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE):
            try:
                os.link(checkpoint / name, temporary / name)
            except OSError:  # not every file system has links
                shutil.copy2(checkpoint / name, temporary / name)
        sync_folder(temporary)
        put_in_place(temporary, target)
    except OSError as error:
        raise write_failed(target, error, what="the checkpoint") from error
    finally:
        delete(temporary)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints by step, complete or not; one that stepped aside comes before the one in its place."""
    parent = Path(folder) / CHECKPOINTS_FOLDER
    try:
        names = [entry.name for entry in parent.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadFile(f"{parent}: cannot be read: {error.strerror or error}.") from error
    steps = [(step_of(name), name[0] != ".", name) for name in names]
    return [parent / name for step, _, name in sorted(steps) if step >= 0]


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name, also of one that stepped aside; -1: this is no checkpoint's name."""
    match = _NAME.fullmatch(name) or _ASIDE.fullmatch(name)
    return int(match.group(1)) if match else -1
