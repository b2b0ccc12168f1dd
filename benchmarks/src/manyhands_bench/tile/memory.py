"""The memory of a tile: peak tensor bytes by part (the paper's Fig. 6.2), and resident bytes of a worker's process."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands.executor.log import DeviceLog
from manyhands.facts.plan import Plan
from manyhands.session.session import Session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.tile.setup import Grid, TiledNetwork, TileVariant, grid_text, square_grid, workers

TWO: Grid = (2, 1)
MANY: Grid = (6, 4)
QUICK_MANY: Grid = (2, 2)
PARTS = ("features", "deltas", "weights", "buffers")
_RESET_PEAK = "5"
"""The value that resets the peak of resident bytes when written to /proc/PID/clear_refs."""


def bench_memory(subject: TiledNetwork, quick: bool, say: Progress) -> Figures:
    """Compare the peak tensor bytes of one device with those of the largest tile, of two and of many."""
    many = QUICK_MANY if quick else MANY
    count = many[0] * many[1]
    logs: dict[int, DeviceLog] = {}
    with workers(count) as session:
        names = session.cluster.names
        plans = {
            1: subject.single(names[0]),
            2: subject.tiles(names[:2], TileVariant(TWO)),
            count: subject.tiles(names, TileVariant(many)),
        }
        for tiles, plan in plans.items():
            say(f"memory of {tiles} tile(s)")
            logs[tiles] = _fullest(subject.run(session, plan, 2, memory=True).logs)
    figures: Figures = {}
    for tiles in (2, count):
        figures[f"memory_ratio_{tiles}"] = logs[1].peak_bytes / logs[tiles].peak_bytes
        figures[f"memory_ratio_{tiles}_without_weights"] = _maps(logs[1]) / _maps(logs[tiles])
    for tiles, log in logs.items():
        figures[f"memory_bytes_{tiles}"] = log.peak_bytes
        figures |= {f"memory_{part}_bytes_{tiles}": log.peak_parts.get(part, 0) for part in PARTS}
    figures["memory_setting"] = (
        f"{subject}; most tensor bytes alive at once in one step of one device, of the fuller of two tiles "
        f"({grid_text(TWO)}) and of the fullest of {count} ({grid_text(many)}); weights include their gradients; "
        "one device's features, deltas and buffers are not told apart: autograd keeps them"
    )
    return figures


def _fullest(logs: Mapping[str, DeviceLog]) -> DeviceLog:
    return max(logs.values(), key=lambda log: log.peak_bytes)


def _maps(log: DeviceLog) -> int:
    """Return the peak bytes without weights and their gradients."""
    return log.peak_bytes - log.peak_parts.get("weights", 0)


def bench_resident(subject: TiledNetwork, repeats: int, steps: int, say: Progress) -> Figures:
    """Compare the peak resident memory of a worker above a bare import of torch: one device against a tile of two."""
    bare = bare_import_bytes()
    peaks: dict[str, list[int]] = {"one": [], "tile": []}
    idle: list[int] = []
    for repeat in range(repeats):
        say(f"resident memory, {repeat + 1} of {repeats}")
        for name, count in (("one", 1), ("tile", 2)):
            with workers(count, apart=True) as session:  # a process that has done nothing before
                names = session.cluster.names
                idle.append(max(_resident(session, "VmRSS").values()))
                plan = subject.single(names[0]) if count == 1 else subject.tiles(names, TileVariant(TWO))
                peaks[name].append(max(resident_peaks(subject, session, plan, steps).values()))
    single, tile = (statistics.median(peaks[name]) for name in ("one", "tile"))
    return {
        "rss_ratio_2": (single - bare) / (tile - bare),
        "rss_total_ratio_2": single / tile,
        "rss_one_bytes": single,
        "rss_tile_bytes": tile,
        "rss_bare_import_bytes": bare,
        "rss_idle_worker_bytes": statistics.median(idle),
        "rss_setting": f"{subject}; most resident bytes of a worker's process (VmHWM) over preparing and {steps} "
        f"steps, less those of a process that has imported torch; medians of {repeats} fresh processes",
    }


def bench_resident_tiles(subject: TiledNetwork, counts: Sequence[int], steps: int, say: Progress) -> Figures:
    """Measure the resident memory of the fullest tile's process, above a bare import of torch, by the number of tiles
    (Fig. 6.2). The most tiles come first: a process keeps what it has had, and fewer tiles need more."""
    bare = bare_import_bytes()
    figures: Figures = {"rss_bare_import_bytes": bare}
    with workers(max(counts), apart=True) as session:
        for count in sorted(counts, reverse=True):
            say(f"resident memory of {count} tile(s)")
            names = session.cluster.names[:count]
            plan = subject.single(names[0]) if count == 1 else subject.tiles(names, TileVariant(square_grid(count)))
            figures[f"rss_bytes_{count}_tiles"] = max(resident_peaks(subject, session, plan, steps).values()) - bare
    alone = float(figures["rss_bytes_1_tiles"])
    for count in counts:
        if count > 1:
            figures[f"rss_ratio_{count}_tiles"] = alone / float(figures[f"rss_bytes_{count}_tiles"])
    return figures


def resident_peaks(subject: TiledNetwork, session: Session, plan: Plan, steps: int) -> dict[str, int]:
    """Return for each worker the most bytes that its process had resident during a run."""
    for process in _processes(session).values():
        with contextlib.suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text(_RESET_PEAK)
    subject.run(session, plan, steps)
    return {name: bytes for name, bytes in _resident(session, "VmHWM").items() if name in plan.devices}


def _processes(session: Session) -> dict[str, int]:
    return {name: session.coordinator.members[name].facts.pid for name in session.cluster.names}


def _resident(session: Session, key: str) -> dict[str, int]:
    return {name: resident_bytes(process, key) for name, process in _processes(session).items()}


def resident_bytes(process: int | str, key: str) -> int:
    """Return a process's resident bytes now (VmRSS), or the most since the last reset (VmHWM)."""
    return _status_bytes(Path(f"/proc/{process}/status").read_text(), key)


def _status_bytes(text: str, key: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{key}:"))


def bare_import_bytes() -> int:
    """Return the resident memory of a process that has imported torch and done nothing."""
    code = "import torch; print(open('/proc/self/status').read())"
    status = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    return _status_bytes(status, "VmRSS")
