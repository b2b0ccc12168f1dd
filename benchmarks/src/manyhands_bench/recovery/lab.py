"""ASTEROID's experiment of section 5.5 in the lab: EfficientNet-B1 on environment D, each device killed in turn.

light    our incremental re-planning: only what a device lacks is sent to it
heavy    the paper's heavy rescheduling: all state is gathered on the most powerful device that is left, planned again,
         and all of it given out again (`gathering_job`); our own full re-planning sends each device what it lacks

Devices are unequal and their links slow, so that bytes take time. Every trip is stored as it ends, and the same folder
goes on where it was interrupted, with the same plan.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from manyhands.facts.cluster import LabCluster, preset
from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.files.documents import read_document, write_document
from manyhands.lab.removal import missing
from manyhands.runtime.elastic_job import ElasticJob
from manyhands.session.opening import open_session
from manyhands.session.session import Session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.pipeline.ours import plan_text
from manyhands_bench.pipeline.torch_setting import TorchSetting
from manyhands_bench.recovery.gathering_job import GatheringJob
from manyhands_bench.recovery.plots import Passage, draw_passages
from manyhands_bench.recovery.site import Site, Strike, Trip

ENVIRONMENT = "env-d"
STORED = "recovery-lab.json"
WAYS = ("light", "heavy")
OPTIMIZER = Optimizer("SGD", lr=1e-4)
"""Without momentum: weights alone travel, as in the paper."""
DRAWN = "nano-1"
"""The device whose loss is drawn, the first of those that share a stage: the paper's device B."""


SETTING = TorchSetting("efficientnet-b1-32", (3, 32, 32), 16, 4)


@dataclass(frozen=True)
class LabExtent:
    """The amount of measuring."""

    setting: TorchSetting = SETTING
    repeats: int = 1
    struck: int | None = None
    """The number of devices that are struck, from the first on; None: all."""
    scale: float | None = None
    """How many times slower than in real time; None: what the machine's cores allow at least."""
    steps: int = 13
    backup_every: int = 4
    """Rounds between two copies. A device is killed when the first copies after the beginning are where they belong:
    at the beginning the coordinator has everything, too."""
    measure_seconds: float = 0.0
    """0: plans are made from the catalogue, whose ratios of speeds are those of the lab."""


QUICK_LAB = LabExtent(
    TorchSetting("tiny", (1, 16, 16), 32, 2), repeats=1, struck=1, steps=60, backup_every=2, measure_seconds=0.0
)


class LabTrip(msgspec.Struct, frozen=True):
    """One run through the loss of a device, in the lab's time."""

    device: str
    how: str
    repeat: int
    recovery_seconds: float
    """From the kill to the end of the next round that was completed, less what such a round takes: devices that lack
    nothing begin it before the others have their weights."""
    replan_seconds: float
    """Those in which the plan was made; planning is not slowed down, it runs beside the lab."""
    gather_seconds: float
    gathered_bytes: int
    bytes_moved: int
    """All bytes of state that were sent, the gathered ones among them."""
    seconds_before: float
    """A round before the loss, and one after it by the new plan: medians."""
    seconds_after: float
    rounds_lost: int
    rounds_again: int
    plan: str
    rounds: list[float]
    """The end of each round that had not ended before, in seconds after the kill."""


class StoredTrips(msgspec.Struct):
    """The trips that were made so far, and the plan that all of them begin with."""

    setting: str
    scale: float
    plan: dict[str, Any]
    devices: list[str]
    bytes_per_second: float
    trips: list[LabTrip] = []

    def missing(self, extent: LabExtent) -> list[tuple[int, str, str]]:
        """Return (repeat, device, how) of the trips that are still to be made; ways take turns in being first."""
        done = {(trip.repeat, trip.device, trip.how) for trip in self.trips}
        turns = []
        for repeat in range(extent.repeats):
            for place, device in enumerate(self.devices[: extent.struck]):
                ways = [WAYS[(place + repeat + turn) % len(WAYS)] for turn in range(len(WAYS))]
                turns += [(repeat, device, how) for how in ways]
        return [turn for turn in turns if turn not in done]

    def of(self, how: str, device: str = "") -> list[LabTrip]:
        return [trip for trip in self.trips if trip.how == how and device in ("", trip.device)]


def bench_lab(
    extent: LabExtent, site_for: Callable[[Session, TorchSetting, float], Site], out: Path | None,
    say: Progress,
) -> Figures:  # fmt: skip
    """Make the trips that are missing, and return the figures; the reason if there can be no lab."""
    if why := missing():
        return {"lab_skipped": why}
    cluster = LabCluster(
        msgspec.structs.replace(preset(ENVIRONMENT), name=f"rec{os.getpid()}"), scale=extent.scale
    )  # fmt: skip
    stored = _stored(out, extent)
    if stored is None or stored.missing(extent):
        with open_session(cluster, say=say) as session:
            say(f"lab: measuring {extent.setting.model}")
            site = site_for(session, extent.setting, extent.measure_seconds)
            if stored is None:
                rate = min(device.down_bytes_per_second for device in session.cluster.devices)
                stored = StoredTrips(
                    str(extent.setting), session.scale or 1.0, site.plan.to_dict(), list(session.cluster.names), rate
                )  # fmt: skip
            site = replace(site, plan=Plan.from_dict(stored.plan), backup_every=extent.backup_every)
            for repeat, device, how in stored.missing(extent):
                say(f"lab: {device} killed, {how}, {repeat + 1} of {extent.repeats}")
                stored.trips.append(_trip(site, extent, repeat, device, how))
                if out is not None:
                    out.mkdir(parents=True, exist_ok=True)
                    write_document(out / STORED, msgspec.to_builtins(stored))
                if stored.missing(extent):
                    site.bring_back([device])
    if out is not None:
        _draw(stored, extent, out)
    return figures_of(stored, extent)


def _stored(out: Path | None, extent: LabExtent) -> StoredTrips | None:
    """Return what an interrupted run has left in the folder; None: nothing."""
    path = None if out is None else out / STORED
    if path is None or not path.exists():
        return None
    stored = decode(read_document(path), StoredTrips, str(path))
    if stored.setting != str(extent.setting) or extent.scale not in (None, stored.scale):
        raise BadFile(
            f"{path}: holds trips of {stored.setting}, not of {extent.setting}.", hint="Name another folder with --out."
        )
    return stored


def _trip(site: Site, extent: LabExtent, repeat: int, device: str, how: str) -> LabTrip:
    strike = Strike(device, extent.backup_every, 0.0, after_copies=extent.backup_every)
    jobs: list[ElasticJob] = []
    trip = site.travel(
        extent.steps, how="light" if how == "light" else "heavy", strike=strike,
        job_type=GatheringJob if how == "heavy" else ElasticJob, on_job=jobs.append,
    )  # fmt: skip
    job = jobs[0]
    gathered = job.gathered if isinstance(job, GatheringJob) else None
    gathered_bytes, gather_seconds = (gathered.bytes, gathered.seconds) if gathered is not None else (0, 0.0)
    before, after = _rounds_of(trip)
    return LabTrip(
        device, how, repeat,
        recovery_seconds=max(0.0, trip.first_round_seconds - after),
        replan_seconds=trip.replan_seconds - gather_seconds,
        gather_seconds=gather_seconds,
        gathered_bytes=gathered_bytes,
        bytes_moved=int(trip.facts["bytes_moved"]) + gathered_bytes,
        seconds_before=before,
        seconds_after=after,
        rounds_lost=trip.rounds_lost(extent.steps),
        rounds_again=int(trip.facts["replayed"]),
        plan=plan_text(trip.outcome.plan).partition(";")[0] if trip.outcome.plan is not None else "",
        rounds=[moment - trip.struck_at for moment, _, _ in trip.steps],
    )  # fmt: skip


def _rounds_of(trip: Trip) -> tuple[float, float]:
    """Return the median seconds of a round before the kill, and after all lost rounds were run again."""
    moments = [moment for moment, _, _ in trip.steps]
    before = [b - a for a, b in pairwise(moment for moment in moments if moment <= trip.struck_at)]
    caught_up = trip.struck_at + trip.caught_up_seconds
    after = [b - a for a, b in pairwise(moment for moment in moments if moment >= caught_up)]
    return statistics.median(before[1:]), statistics.median(after)


def _draw(stored: StoredTrips, extent: LabExtent, out: Path) -> None:
    """Draw Fig. 17: the throughput when one device that shares a stage is killed."""
    first = {how: trips[0] for how in WAYS if (trips := stored.of(how, DRAWN))}
    passages = [
        Passage(how, tuple(trip.rounds), trip.recovery_seconds, extent.setting.samples) for how, trip in first.items()
    ]
    if passages:
        title = f"Fig. 17: {stored.setting}, {ENVIRONMENT}; {DRAWN} killed; {stored.scale:g} times slower"
        draw_passages(passages, out / "fig_17_lab.png", title)


# Figures


def figures_of(stored: StoredTrips, extent: LabExtent) -> Figures:
    """Return what every way took, what it moved, and how fast the rounds were after it."""
    devices = [device for device in stored.devices if all(stored.of(how, device) for how in WAYS)]
    if not devices:
        return {"lab_skipped": "no device was killed in every way yet"}
    figures: Figures = {
        "lab_light_vs_heavy": _ratio(stored, devices, "heavy", lambda trip: trip.recovery_seconds),
        "lab_throughput_after": 1 / _ratio(stored, devices, "heavy", lambda trip: 1 / trip.seconds_after),
    }
    ratios = [_of_device(stored, d, "heavy", lambda trip: trip.recovery_seconds) for d in devices]
    figures |= {"lab_light_vs_heavy_least": min(ratios), "lab_light_vs_heavy_most": max(ratios)}
    for how in WAYS:
        trips = [trip for trip in stored.of(how) if trip.device in devices]
        seconds = [trip.recovery_seconds for trip in trips]
        figures |= {
            f"lab_recovery_seconds_{how}": statistics.median(seconds),
            f"lab_recovery_seconds_{how}_least": min(seconds),
            f"lab_recovery_seconds_{how}_most": max(seconds),
            f"lab_replan_seconds_{how}": statistics.median(trip.replan_seconds for trip in trips),
            f"lab_megabytes_moved_{how}": statistics.median(trip.bytes_moved for trip in trips) / 1e6,
            f"lab_round_seconds_after_{how}": statistics.median(trip.seconds_after for trip in trips),
        }
        for device in devices:
            key = device.replace("-", "_")
            of_device = stored.of(how, device)
            figures[f"lab_recovery_seconds_{how}_{key}"] = statistics.median(t.recovery_seconds for t in of_device)
            figures[f"lab_megabytes_moved_{how}_{key}"] = statistics.median(t.bytes_moved for t in of_device) / 1e6
            figures[f"lab_samples_per_second_{how}_{key}"] = extent.setting.samples / statistics.median(
                trip.seconds_after for trip in of_device
            )
    figures |= {
        "lab_megabytes_gathered": statistics.median(trip.gathered_bytes for trip in stored.of("heavy")) / 1e6,
        "lab_gather_seconds": statistics.median(trip.gather_seconds for trip in stored.of("heavy")),
        "lab_round_seconds": statistics.median(trip.seconds_before for trip in stored.trips),
        "lab_rounds_lost": sum(trip.rounds_lost for trip in stored.trips),
        "lab_rounds_again": statistics.median(trip.rounds_again for trip in stored.trips),
        "lab_trips": len(stored.trips),
        "lab_scale": stored.scale,
        "lab_setting": f"{stored.setting} on {ENVIRONMENT}, {stored.scale:g} times slower than in real time (ports of "
        f"{stored.bytes_per_second * 8 / 1e6:.3g} Mbit/s), all seconds in the lab's time but those of planning, which "
        f"is not slowed down; SGD without momentum, batch norm local; copies every {extent.backup_every} rounds; "
        f"{plan_text(Plan.from_dict(stored.plan))}; heavy: all state gathered on the most powerful device left, "
        "planned again, all of it given out again",
        "lab_each": "; ".join(_text(trip) for trip in stored.trips),
    }
    return figures


def _of_device(stored: StoredTrips, device: str, how: str, quantity: Callable[[LabTrip], float]) -> float:
    """Return the median of a way over that of light re-planning, for one device."""
    other, light = (statistics.median(map(quantity, stored.of(way, device))) for way in (how, "light"))
    return other / light


def _ratio(stored: StoredTrips, devices: Sequence[str], how: str, quantity: Callable[[LabTrip], float]) -> float:
    return statistics.median(_of_device(stored, device, how, quantity) for device in devices)


def _text(trip: LabTrip) -> str:
    gathered = f", {trip.gathered_bytes / 1e6:.2f} MB of it gathered in {trip.gather_seconds:.1f} s"
    return (
        f"{trip.device} {trip.how}: {trip.recovery_seconds:.1f} s, {trip.bytes_moved / 1e6:.2f} MB"
        f"{gathered if trip.gathered_bytes else ''}, then {trip.seconds_after:.2f} s a round by {trip.plan}"
    )
