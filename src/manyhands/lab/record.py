"""The records of labs that are up: one file each, written before anything is made, so that everything can be removed
again."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadFile, BadValue, LabError
from manyhands.facts.lab import LAB_NAME, Played, Seat
from manyhands.files.documents import read_document, write_document

FOLDER_VARIABLE = "MANYHANDS_LABS"
FOLDER = Path("/run/manyhands")


class Process(msgspec.Struct, frozen=True):
    """A process; the moment it began distinguishes it from a later one with the same number."""

    pid: int
    began: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _began(pid))

    @property
    def is_alive(self) -> bool:
        return self.pid > 0 and self.began > 0 and _began(self.pid) == self.began


def _began(pid: int) -> int:
    """Return when a process began, in the kernel's ticks; 0 where there is none, or it is a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return 0 if words[0] in ("Z", "X") else int(words[19])


class LabRecord(msgspec.Struct, frozen=True):
    """The record of a lab that is up."""

    name: str
    source: str
    """The preset or file that the lab was made from."""
    played: Played
    uses_switch: bool
    owner: Process | None = None
    """The process that brought it up for itself: the lab goes down with it."""
    keeper: Process | None = None
    """The lab supervisor."""


def lab_name(text: str) -> str:
    """Return a lab's name, that of its preset or file; in namespaces a '-' separates it from its devices."""
    name = text.lower().replace("-", "_")
    if not LAB_NAME.fullmatch(name):
        raise BadValue(f"'{text:.80}' cannot name a lab.", hint="Use 1 to 32 letters, digits, '_' and '.'.")
    return name


def folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)


def _path(name: str) -> Path:
    return folder() / f"{name}.json"


def log_path(name: str) -> Path:
    """Return the file with the lab supervisor's messages."""
    return folder() / f"{name}.log"


def names() -> list[str]:
    """Return the labs that were brought up and not taken down."""
    with contextlib.suppress(OSError):
        return sorted(path.stem for path in folder().glob("*.json") if LAB_NAME.fullmatch(path.stem))
    return []


def claim(record: LabRecord) -> bool:
    """Write the record unless the name is taken; return whether it was written. Of two at once, one succeeds."""
    folder().mkdir(parents=True, exist_ok=True)
    mine = folder() / f".{secrets.token_hex(8)}.json"
    write_document(mine, _document(record))
    try:
        os.link(mine, _path(record.name))
    except FileExistsError:
        return False
    finally:
        mine.unlink()
    return True


def save(record: LabRecord) -> None:
    write_document(_path(record.name), _document(record))


def _document(record: LabRecord) -> dict[str, object]:
    played = record.played
    document: dict[str, object] = msgspec.to_builtins(msgspec.structs.asdict(record) | {"played": None})
    document["played"] = {
        "scale": played.scale, "slots": played.slots, "network": played.network.to_dict(),
        "seats": msgspec.to_builtins(played.seats), "traces": [list(pair) for pair in played.traces],
    }  # fmt: skip
    return document


def load(name: str) -> LabRecord:
    """Return the lab of that name. LabError where there is none, or its file is damaged."""
    path = _path(name)
    if not path.exists():
        up = names()
        hint = f"These are up: {', '.join(up)}." if up else "None is up: manyhands lab up PRESET"
        raise LabError(f"There is no lab called '{name}'.", hint=hint)
    try:
        raw = read_document(path)
        assert isinstance(raw, dict)
        played = raw["played"]
        read = Played(
            played["scale"], played["slots"], Cluster.from_dict(played["network"]),
            msgspec.convert(played["seats"], tuple[Seat, ...]), tuple((a, b) for a, b in played["traces"]),
        )  # fmt: skip
        keeper, owner = (msgspec.convert(raw[key], Process | None) for key in ("keeper", "owner"))
        return LabRecord(raw["name"], raw["source"], read, raw["uses_switch"], owner, keeper)
    except (BadFile, BadValue, AssertionError, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise LabError(f"{path}: does not describe a lab: {error}", hint=f"manyhands lab down {name}") from error


def forget(name: str) -> None:
    for path in (_path(name), log_path(name)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
