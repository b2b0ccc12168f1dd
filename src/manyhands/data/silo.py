"""A silo: the samples that one device has, and that no other device sees. Samples with equal ids are the same.

    .npz    id (whole numbers or text, each once), and arrays named as the network's inputs, or target: a row for each

Digests of the ids show which samples all silos have. They hide an id only from those who cannot guess it.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from manyhands.data.packed import check_room, check_texts, reading, sizes_of
from manyhands.facts.errors import BadData, BadFile

IDS = "id"
TARGET = "target"
DIGEST_BYTES = 16
MOST_SAMPLES = 2_000_000
MOST_ARRAYS = 64
LARGEST_SILO_BYTES = 32 * 10**9
LONGEST_ID = 200
_KINDS = "fiub"
_HOW = "Write it with numpy.savez(path, id=ids, left=..., right=..., target=...)."


@dataclass(frozen=True)
class SiloContent:
    """The content of a device's silo, as far as the coordinator has it."""

    names: frozenset[str]
    rows: torch.Tensor
    """Sample, in the agreed order -> its row in that silo."""


class Silo:
    """Arrays by name, with one row for each sample."""

    def __init__(self, ids: numpy.ndarray, arrays: Mapping[str, torch.Tensor], where: str = "The silo") -> None:
        self.ids, self.arrays, self.where = ids, dict(arrays), where

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def read(cls, path: str | Path) -> Silo:
        """Read a file, and check it: numbers only, nothing is unpickled."""
        path = Path(path)
        content = _read(path)
        ids = content.pop(IDS)
        _check_ids(path, ids)
        if not content:
            raise BadData(f"{path}: holds ids and nothing else.", hint=_HOW)
        for name, array in content.items():
            if array.dtype.kind not in _KINDS:
                raise BadData(f"{path}: {name} holds {array.dtype}; arrays of a silo are numbers.", hint=_HOW)
            if array.ndim == 0 or len(array) != len(ids):
                raise BadData(
                    f"{path}: {name} has the shape {array.shape}; there are {len(ids)} ids, and a row for each.",
                    hint=_HOW,
                )
        return cls(ids, {name: _tensor(path, name, array) for name, array in content.items()}, str(path))

    def digests(self) -> bytes:
        """Return the digests of the ids, one after another."""
        return digests_of(self.ids.tolist())

    def take(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows of an array."""
        if name not in self.arrays:
            raise BadData(f"{self.where} has no {name}; it has {', '.join(self.arrays)}.")
        check_rows(self.where, rows, len(self))
        return self.arrays[name][rows]


def check_rows(where: str, rows: torch.Tensor, count: int) -> None:
    """Refuse numbers of rows, received from elsewhere, that are not those of existing samples."""
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        strange = int(rows.max()) if int(rows.max()) >= count else int(rows.min())
        raise BadData(f"{where} was asked for sample {strange}; it has {count}, from 0.")


def digests_of(ids: Sequence[Any]) -> bytes:
    """Return the digests of ids, one after another; 7 and '7' are one sample."""
    return b"".join(hashlib.blake2b(str(sample_id).encode(), digest_size=DIGEST_BYTES).digest() for sample_id in ids)


def agreed(digests_by_name: Mapping[str, bytes]) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the samples that all silos have, in the first one's order: a fingerprint of them, and the row of each in
    every silo.

    `digests_by_name`: device -> the digests of its ids.
    """
    tables: dict[str, dict[bytes, int]] = {}
    for name, digests in digests_by_name.items():
        if len(digests) % DIGEST_BYTES or len(digests) > MOST_SAMPLES * DIGEST_BYTES:
            raise BadData(f"{name} tells {len(digests)} bytes of ids; each has {DIGEST_BYTES}, of {MOST_SAMPLES:,}.")
        places = range(0, len(digests), DIGEST_BYTES)
        tables[name] = {digests[place : place + DIGEST_BYTES]: row for row, place in enumerate(places)}
        if len(tables[name]) < len(places):
            raise BadData(f"{name} has {len(places) - len(tables[name])} of its ids twice.")
    first, *others = tables.values()
    common = [digest for digest in first if all(digest in other for other in others)]
    if not common:
        counts = ", ".join(f"{name} {len(table):,}" for name, table in tables.items())
        raise BadData(
            f"There is no sample that all have; ids: {counts}.", hint="Ids are compared as text: 007 is not 7."
        )
    rows = {name: torch.tensor([table[digest] for digest in common]) for name, table in tables.items()}
    return hashlib.blake2b(b"".join(common), digest_size=DIGEST_BYTES).hexdigest(), rows


def write_silo(path: Path, ids: Sequence[int] | Sequence[str], arrays: Mapping[str, numpy.ndarray]) -> None:
    """Write a file that `Silo.read` reads."""
    everything: dict[str, Any] = {IDS: numpy.asarray(ids), **arrays}
    with open(path, "xb") as file:
        numpy.savez(file, **everything)


def _read(path: Path) -> dict[str, numpy.ndarray]:
    with reading(path, hint=_HOW):
        if not path.is_file():
            raise BadFile(f"{path}: there is no such file.", hint=_HOW)
        if not zipfile.is_zipfile(path):
            raise BadFile(f"{path}: is not a .npz file.", hint=_HOW)
        sizes = sizes_of(path)
        if IDS not in sizes:
            raise BadData(f"{path}: has no {IDS}; it holds {', '.join(sorted(sizes)[:20]) or 'no arrays'}.", hint=_HOW)
        total = sum(sizes.values())
        if len(sizes) > MOST_ARRAYS:
            raise BadData(f"{path}: {len(sizes)} arrays; at most {MOST_ARRAYS} are read.")
        check_room(path, total, LARGEST_SILO_BYTES)
        with numpy.load(path, allow_pickle=False) as opened:
            arrays: dict[str, Any] = {key: opened[key] for key in sizes}
    for key, array in arrays.items():
        if not isinstance(array, numpy.ndarray):
            raise BadFile(f"{path}: {key} is not an array.", hint=_HOW)
    return arrays


def _check_ids(path: Path, ids: numpy.ndarray) -> None:
    if ids.ndim != 1 or not 0 < len(ids) <= MOST_SAMPLES:
        raise BadData(f"{path}: {IDS} has the shape {ids.shape}; it must be one axis of 1 to {MOST_SAMPLES:,} ids.")
    is_text = ids.dtype.kind == "U" and ids.dtype.itemsize <= 4 * LONGEST_ID
    if ids.dtype.kind not in "iu" and not is_text:
        raise BadData(
            f"{path}: {IDS} holds {ids.dtype}; ids are whole numbers, or text of at most {LONGEST_ID} characters."
        )
    if is_text:
        check_texts(path, IDS, ids)
    kinds, counts = numpy.unique(ids, return_counts=True)
    if len(kinds) < len(ids):
        twice = kinds[int(counts.argmax())]
        raise BadData(f"{path}: the id {str(twice)[:60]} is there {counts.max()} times; each sample has its own.")


def _tensor(path: Path, name: str, array: numpy.ndarray) -> torch.Tensor:
    if array.dtype.kind == "f" and not numpy.isfinite(array).all():
        raise BadData(
            f"{path}: {name} has a NaN or infinite value.", hint="Leave such samples out, or use numpy.nan_to_num."
        )
    plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if plain.dtype.kind == "u" and plain.dtype.itemsize > 1:
        plain = plain.astype(numpy.int64)
    try:
        return torch.from_numpy(numpy.ascontiguousarray(plain))
    except TypeError as error:
        raise BadData(f"{path}: {name} holds {array.dtype}, which torch does not take.") from error
