"""The state of a run, as other processes see it while it goes on: `live.json` and `round.json` in its folder.

The coordinator replaces live.json about once a second, and round.json whenever a round was recorded. Terminal, page and
`status` read them, from any process, and need nothing else: the folder of a past run still has them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.files.documents import read_text
from manyhands.files.plain import open_descriptor

LIVE_FILE = "live.json"
ROUND_FILE = "round.json"
RunState = Literal["preparing", "waiting", "running", "ended", "stopped", "failed"]
OVER = ("ended", "stopped", "failed")
"""States after which nothing more happens."""
MOST_LINKS = 400
"""The most links in live.json: those over which most was sent."""


class LiveSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that a device did in a round; seconds from the round's start."""

    device: str
    track: str
    start: float
    end: float
    kind: str
    text: str = ""
    stage: int = -1


class LiveRound(msgspec.Struct, frozen=True):
    """One round as measured, beside the simulated one."""

    step: int = 0
    seconds: float = 0.0
    predicted_seconds: float = 0.0
    measured: tuple[LiveSpan, ...] = ()
    predicted: tuple[LiveSpan, ...] = ()


class LiveDevice(msgspec.Struct, frozen=True):
    name: str
    kind: str = ""
    state: str = "here"
    """here (it has a part in the plan), idle (it has none), leaving, left, lost"""
    reason: str = ""
    """The reason why it is lost."""
    memory_bytes: float = 0.0
    """The memory that the plan may use of it."""
    planned_bytes: float = 0.0
    """The most tensor bytes that the plan predicts."""
    resident_bytes: int = 0
    """The process's memory when it was last measured; 0: not yet."""
    peak_bytes: int = 0
    """The most tensor bytes, counted in one step; 0: not yet."""
    busy: float | None = None
    """The fraction of the last recorded round in which it computed."""
    host: str = ""
    compute: str = "cpu"
    stages: tuple[int, ...] = ()
    pid: int = 0
    """Its process, where the run itself started it; 0: it was started elsewhere, or has ended."""


class LiveLink(msgspec.Struct, frozen=True):
    """The link from one device to another, where the plan sends something."""

    source: str
    target: str
    bytes_per_second: float | None = None
    """The rate that the plan was made with; None: no limit."""
    delay_seconds: float = 0.0
    measured_bytes_per_second: float | None = None
    """The rate of the last messages that were large enough to be timed; None: none was."""
    sent_bytes: int = 0


class LiveStage(msgspec.Struct, frozen=True):
    number: int
    first: int
    last: int
    """Layers [first, last)."""
    share: str = ""
    devices: tuple[str, ...] = ()
    seconds: float | None = None
    """Computing seconds of its slowest device in the last recorded round."""
    predicted_seconds: float = 0.0
    samples_per_second: float | None = None


class Live(msgspec.Struct, frozen=True):
    state: RunState = "preparing"
    text: str = ""
    """What the run is doing, for people."""
    command: str = "train"
    model: str = ""
    pid: int = 0
    host: str = ""
    started: float = 0.0
    updated: float = 0.0
    """Both times are seconds since 1970."""
    dashboard: str = ""
    """The address of the page, if there is one."""
    first_step: int = 0
    step: int = 0
    """Steps done."""
    steps: int = 0
    """All steps of the run."""
    epoch: int = 0
    batch_size: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    """The norm of the last step's gradients, where they are clipped by it."""
    seconds: float | None = None
    """Seconds of a step: the median of the last ones."""
    predicted_seconds: float | None = None
    """Simulated seconds of a step."""
    samples_per_second: float | None = None
    remaining_seconds: float | None = None
    generation: int = 0
    """The number of times the run was planned anew."""
    devices: tuple[LiveDevice, ...] = ()
    links: tuple[LiveLink, ...] = ()
    stages: tuple[LiveStage, ...] = ()
    round: LiveRound | None = None
    data_wait: float = 0.0
    """The part of the last steps' time in which the devices waited for batches."""

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def write_live(folder: Path, live: Live) -> None:
    """Replace live.json; the round has a file of its own, which changes less often."""
    _replace(folder / LIVE_FILE, msgspec.json.encode(msgspec.structs.replace(live, round=None)))


def write_round(folder: Path, live_round: LiveRound) -> None:
    _replace(folder / ROUND_FILE, msgspec.json.encode(live_round))


def read_live(folder: Path) -> Live | None:
    """Return the state of a run; None: there is none, or it cannot be read now."""
    live = _read(folder / LIVE_FILE, Live)
    if live is None:
        return None
    return msgspec.structs.replace(live, round=_read(folder / ROUND_FILE, LiveRound))


Document = TypeVar("Document", Live, LiveRound)


def _read(path: Path, kind: type[Document]) -> Document | None:
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(read_text(path), type=kind)  # with a type nothing else is built on the way
    except (ManyhandsError, msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _replace(path: Path, content: bytes) -> None:
    """Replace a file in one go, for readers; not made to survive a power cut, which would cost a disk write each
    second. Errors such as a full disk are ignored here and reported by the files that matter."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError, BadFile):
        handle = open_descriptor(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, follows_links=False)
        try:
            try:
                is_whole = os.write(handle, content) == len(content)
            finally:
                os.close(handle)
            if is_whole:
                os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)  # there is still one where the disk is full
