"""Follows a run by its folder: its present state, its losses and its events, live or long over."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.files.documents import read_document
from manyhands.files.plain import open_plain
from manyhands.observe.live import LIVE_FILE, OVER, Live, LiveDevice, LiveStage, read_live
from manyhands.observe.recent import recent_runs

RUNS = Path("runs")
FRESH_SECONDS = 10.0
"""A run that has written nothing for this long is not live, whatever its file holds."""
BLOCK_BYTES = 8_000_000
"""The bytes that are read at once, and the longest line that is accepted."""
_ENDINGS = {"finished": "ended", "failed": "failed", "stopped": "stopped"}


@dataclass
class View:
    """A run as it is known at one look. Lists grow from look to look."""

    folder: Path
    live: Live = field(default_factory=Live)
    plan: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    metrics: dict[str, list[float | None]] = field(default_factory=dict)
    """Column -> a value of each step."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The events, each with its `number`, from 0."""
    is_live: bool = False
    """Whether the process that runs it exists and writes."""


class RunWatch:
    """Follows one folder. Each look reads only what was appended since the last."""

    def __init__(self, folder: str | Path, *, with_metrics: bool = True) -> None:
        """Follow a folder. `with_metrics`: every step's numbers are kept, about 200 bytes each, for as long as it is
        followed."""
        self.folder, self._with_metrics = Path(folder), with_metrics
        self._view = View(self.folder)
        self._metrics = _Tail(self.folder / "metrics.csv")
        self._events = _Tail(self.folder / "events.jsonl")
        self._read_at: dict[str, tuple[int, int]] = {}

    def look(self) -> View:
        """Return the present view. A file that is missing, half-written or broken is treated as if it did not exist."""
        view = self._view
        if self._with_metrics:
            self._look_at_metrics(view)
        self._look_at_events(view)
        for name in ("plan", "cluster"):
            if self._has_changed(f"{name}.yaml"):
                document = _document(self.folder / f"{name}.yaml")
                setattr(view, name, document if document is not None else getattr(view, name))
        live = read_live(self.folder)
        view.is_live = live is not None and _is_live(live)
        view.live = live if live is not None else self._guessed(view)
        if not view.is_live and view.live.state not in OVER:
            view.live = msgspec.structs.replace(view.live, state=self._ending(view))
        return view

    def _has_changed(self, name: str) -> bool:
        try:
            status = os.stat(self.folder / name)
        except OSError:
            return False
        stamp = (status.st_mtime_ns, status.st_size)
        if self._read_at.get(name) == stamp:
            return False
        self._read_at[name] = stamp
        return True

    def _look_at_metrics(self, view: View) -> None:
        for is_new, lines in self._metrics.more():
            if is_new:
                view.metrics = {}
            for row in _rows(lines):
                if not view.metrics:
                    view.metrics = {column: [] for column in row}
                elif len(row) == len(view.metrics):
                    for column, value in zip(view.metrics.values(), row, strict=True):
                        column.append(_number(value))

    def _look_at_events(self, view: View) -> None:
        for is_new, lines in self._events.more():
            if is_new:
                view.events = []
            for line in lines:
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    view.events.append({**event, "number": len(view.events)})

    def _ending(self, view: View) -> Any:
        """Return the state in which the run ended, by its last events; a process that vanished without an event
        failed."""
        if not view.events:
            return "preparing"
        for event in reversed(view.events):
            if event["event"] in _ENDINGS:
                return _ENDINGS[event["event"]]
            if event["event"] == "started":
                break
        return "failed"

    def _guessed(self, view: View) -> Live:
        """Return the state of a run that wrote no live.json, from its other files."""
        config = _document(self.folder / "config.yaml") or {}
        steps, losses = view.metrics.get("step", []), view.metrics.get("loss", [])
        rates = [rate for rate in view.metrics.get("samples_per_second", []) if rate]
        first = next((event for event in view.events if event["event"] == "started"), {})
        plan = view.plan or {}
        stages = _stages(plan.get("stages"))
        names = dict.fromkeys(name for stage in stages for name in stage.devices)
        return Live(
            state=self._ending(view), model=str(first.get("model", "")), step=_whole(steps[-1]) + 1 if steps else 0,
            steps=_whole(config.get("steps")), loss=losses[-1] if losses else None,
            samples_per_second=rates[-1] if rates else None, stages=stages,
            devices=tuple(LiveDevice(name) for name in names),
        )  # fmt: skip


class _Tail:
    """The lines that were appended to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place, self._rest, self._file = 0, b"", 0

    def more(self) -> Iterator[tuple[bool, list[str]]]:
        """Yield block by block whether the file is another, or shorter, than at the last look (what was read before is
        void then), and its new lines."""
        try:
            with open_plain(self.path) as file:
                status, is_new = os.fstat(file.fileno()), False
                if status.st_size < self._place or status.st_ino != self._file:
                    is_new = self._file != 0
                    self._place, self._rest, self._file = 0, b"", status.st_ino
                file.seek(self._place)
                while (content := file.read(BLOCK_BYTES)) or is_new:
                    self._place += len(content)
                    *lines, self._rest = (self._rest + content).split(b"\n")
                    self._rest = self._rest[-BLOCK_BYTES:]
                    yield is_new, [line.decode(errors="replace") for line in lines if line.strip()]
                    is_new = False
        except (OSError, BadFile):
            return


def _stages(raw: object) -> tuple[LiveStage, ...]:
    """Return the stages of a plan as it stands in a file, which may hold anything."""
    stages = []
    for number, stage in enumerate(raw if isinstance(raw, list) else ()):
        layers, devices = (stage.get("layers"), stage.get("devices")) if isinstance(stage, dict) else (None, None)
        if isinstance(layers, list) and len(layers) == 2 and all(isinstance(layer, int) for layer in layers):
            names = tuple(str(name) for name in devices) if isinstance(devices, list) else ()
            stages.append(LiveStage(number, layers[0], layers[1], devices=names))
    return tuple(stages)


def _rows(lines: list[str]) -> Iterator[list[str]]:
    """Yield the rows of a table that can be read."""
    for line in lines:
        try:
            yield from csv.reader([line])
        except csv.Error:
            continue


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(value: object) -> int:
    """Return a count as a whole number; 0 where the value is none."""
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 else 0


def _document(path: Path) -> dict[str, Any] | None:
    try:
        document = read_document(path)
    except ManyhandsError:
        return None
    return document if isinstance(document, dict) else None


def _is_live(live: Live) -> bool:
    """Return whether a run goes on; on another machine only the time of its last update can show that."""
    if live.is_over or time.time() - live.updated > FRESH_SECONDS:
        return False
    return live.host != socket.gethostname() or _exists(live.pid)


def _exists(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def is_run(folder: Path) -> bool:
    return (folder / LIVE_FILE).exists() or (folder / "events.jsonl").exists()


def runs_here(where: Path = RUNS) -> list[Path]:
    """Return the folders of runs below this one, the one that was written to last first."""
    try:
        folders = [folder for folder in where.iterdir() if folder.is_dir() and is_run(folder)]
    except OSError:
        return []
    return sorted(folders, key=_touched, reverse=True)


def known_runs() -> list[Path]:
    """Return the folders of runs in runs/ and of those that were started lately elsewhere, the one that was written to
    last first. Those below the present folder have relative names."""
    folders = {folder.resolve(): folder for folder in runs_here()}
    for folder in recent_runs():
        if is_run(folder):
            folders.setdefault(folder.resolve(), _shortest(folder))
    return sorted(folders.values(), key=_touched, reverse=True)


def _shortest(folder: Path) -> Path:
    with contextlib.suppress(ValueError, OSError):  # it is not below the present folder, or that one was removed
        return folder.relative_to(Path.cwd())
    return folder


def _touched(folder: Path) -> float:
    times = []
    for name in (LIVE_FILE, "events.jsonl"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def newest_live(folders: Iterable[Path]) -> Path | None:
    """Return the first of these runs that is in progress now."""
    for folder in folders:
        live = read_live(folder)
        if live is not None and _is_live(live):
            return folder
    return None
