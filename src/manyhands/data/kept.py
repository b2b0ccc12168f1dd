"""Batches that come only once, kept until no replay can need them: in memory, and beyond a limit in files.

A recovery goes back to a step of which every weight exists, at worst to the last checkpoint, and runs the steps since
then again. What a data set or a user's loop has drawn at random cannot be drawn again, so its batches are kept until
then. Files are safetensors of the tensors alone: the structure of a batch, and what is no tensor, stay in memory.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.files.documents import write_failed

MOST_BYTES = 512 * 2**20
"""The most bytes of batches that are kept in memory; beyond them, batches are written to files."""
_PREFIX = "kept-batches-"
_SPILLED = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@dataclass
class _Kept:
    """A batch: its leaves, of which tensors are None while they are in a file."""

    leaves: list[Any]
    structure: TreeSpec
    bytes: int
    """Bytes of those of its tensors that a file could hold, while they are in memory."""
    file: Path | None = None


class KeptBatches:
    """Batches by step, from the first that a replay may need to the last that has come.

    One thread may add while another takes and forgets. A batch is whatever nests tensors in tuples, lists and dicts; it
    must not be changed afterwards.
    """

    def __init__(self, folder: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        """`folder`: where a folder for the files of batches is made, such as the run's; None: the system's place for
        temporary files. It is made when it is needed, and deleted by `close`. No two may have one folder at a
        time."""
        self._folder, self._most_bytes = folder, most_bytes
        for left in folder.glob(f"{_PREFIX}*") if folder is not None else ():  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}
        self._spilling_to: Path | None = None
        self._is_closed = False
        self.spilled = 0
        """How many batches were written to files so far."""

    def __enter__(self) -> KeptBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add(self, step: int, batch: Any) -> None:
        """Keep the batch of a step, the one after the last that is kept. Others may have to be written to files."""
        leaves, structure = tree_flatten(batch)
        size = sum(leaf.nbytes for leaf in leaves if _can_be_spilled(leaf))
        with self._lock:
            assert not self._kept or step == max(self._kept) + 1, "batches are kept in order"
            self._kept[step] = _Kept(leaves, structure, size)
        self._spill()

    def __contains__(self, step: int) -> bool:
        with self._lock:
            return step in self._kept

    def at(self, step: int) -> Any:
        """Return the batch of a step that is kept."""
        with self._lock:
            kept = self._kept[step]
            leaves, file = list(kept.leaves), kept.file
        if file is not None:
            tensors = _read(file)
            leaves = [tensors.get(str(place), leaf) for place, leaf in enumerate(leaves)]
        return tree_unflatten(leaves, kept.structure)

    def from_step(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield each step from this one on, with its batch, as far as they are kept."""
        while step in self:
            yield step, self.at(step)
            step += 1

    def forget_before(self, step: int) -> None:
        """Drop the batches of earlier steps, and their files: no replay will need them."""
        with self._lock:
            dropped = [self._kept.pop(old) for old in sorted(self._kept) if old < step]
        for kept in dropped:
            if kept.file is not None:
                kept.file.unlink(missing_ok=True)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps whose batches are kept."""
        with self._lock:
            return tuple(sorted(self._kept))

    @property
    def bytes_in_memory(self) -> int:
        with self._lock:
            return sum(kept.bytes for kept in self._kept.values())

    def close(self) -> None:
        """Forget everything and delete the files."""
        with self._lock:
            self._is_closed = True
            self._kept.clear()
            folder, self._spilling_to = self._spilling_to, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _spill(self) -> None:
        """Write the oldest batches in memory to files, until the others fit; the newest is about to be used, and
        stays."""
        while (chosen := self._to_spill()) is not None:
            step, kept = chosen
            tensors = {
                str(place): leaf.detach().clone(memory_format=torch.contiguous_format)
                for place, leaf in enumerate(kept.leaves)
                if _can_be_spilled(leaf)
            }
            file = self._file_of(step)
            try:
                save_file(tensors, file)
            except OSError as error:
                raise write_failed(file, error, what="a batch that is kept for replay") from error
            except Exception as error:  # safetensors puts the system's errors into one of its own
                raise write_failed(
                    file, OSError(0, str(error)[:300]), what="a batch that is kept for replay"
                ) from error
            with self._lock:
                is_wanted = self._kept.get(step) is kept and not self._is_closed
                if is_wanted:
                    kept.leaves = [None if str(place) in tensors else leaf for place, leaf in enumerate(kept.leaves)]
                    kept.bytes -= sum(tensor.nbytes for tensor in tensors.values())
                    kept.file = file
                    self.spilled += 1
            if not is_wanted:
                file.unlink(missing_ok=True)

    def _to_spill(self) -> tuple[int, _Kept] | None:
        with self._lock:
            if self._is_closed or sum(kept.bytes for kept in self._kept.values()) <= self._most_bytes:
                return None
            newest = max(self._kept)
            for step, kept in sorted(self._kept.items()):
                if step < newest and kept.file is None and any(map(_can_be_spilled, kept.leaves)):
                    return step, kept
        return None

    def _file_of(self, step: int) -> Path:
        if self._spilling_to is None:
            try:
                if self._folder is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                self._spilling_to = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._folder))
            except OSError as error:
                raise write_failed(self._folder or "a temporary folder", error) from error
        return self._spilling_to / f"step-{step:06d}.safetensors"


def _can_be_spilled(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.dtype in _SPILLED


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except ManyhandsError:
        raise
    except Exception as error:
        raise BadFile(
            f"{file}: a batch that was kept there to be run again cannot be read: {str(error)[:300]}.",
            hint="Resume from the last checkpoint; what this run had kept of its batches is gone.",
        ) from error
    return tensors
