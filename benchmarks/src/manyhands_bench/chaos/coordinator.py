"""The coordinator of a scenario: `mh.train` or `mh.split_train`, reporting to the benchmark what happens.

Reports are lines of JSON in a file outside the run folder, so that a full disk there does not silence them. Each has
`time.monotonic`, which is the same clock in all processes of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.executor import checkpoint
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.job.base import Job
from manyhands.models.registry import loss_function
from manyhands.planner.simple import proportional
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.record import RunRecord
from manyhands.session import measuring
from manyhands.split.session import two
from manyhands.split.training import split_train
from manyhands.training.train import train
from manyhands_bench.chaos.reference import BATCH_SIZE, MICRO_BATCHES, OPTIMIZER, SEED, data, network
from manyhands_bench.chaos.worker import obey_at, shift_clock

STEPS = 1_000_000
"""More than any scenario lasts: it is stopped when its faults are over."""
LAYERS = 5
MEASURE_SECONDS = 0.05
JOIN_SECONDS = 60.0
_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class CoordinatorConfig:
    """The arguments of the coordinator process."""

    share: str
    devices: tuple[str, ...]
    host: str
    port: int
    token: str
    folder: str
    """The run folder; where it has a checkpoint, the run goes on from there."""
    reports: str
    control: str
    incarnation: int
    """The number of this coordinator among those of the job, from 0."""


class Reports:
    """The writer of the file that the benchmark reads; each call appends one report."""

    def __init__(self, path: str, incarnation: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._incarnation = incarnation

    def __call__(self, kind: str, **facts: Any) -> None:
        line = json.dumps(
            {"what": kind, "incarnation": self._incarnation, "at": time.monotonic(), **facts}, default=str
        )
        os.write(self._file, line.encode() + b"\n")


def run(config: CoordinatorConfig) -> None:
    """Train until a request to stop arrives."""
    report = Reports(config.reports, config.incarnation)
    obey_at(config.control, {"clock": shift_clock})
    measuring.MEASURE_SECONDS = MEASURE_SECONDS
    Job.write_pictures = lambda *_: None  # type: ignore[method-assign]
    _report_events(report)
    try:
        with Coordinator(config.host, config.port, config.token, announce=False) as coordinator:
            report("listens")
            coordinator.wait_for(config.devices, JOIN_SECONDS)
            with _alive(coordinator, report):
                _train(config, coordinator, report)
    except ManyhandsError as error:
        report("ended", error=f"{type(error).__name__}: {error.message} {error.hint}".strip())
        sys.exit(error.exit_code)
    except KeyboardInterrupt as stopped:
        report("stopped", text=str(stopped))


def _train(config: CoordinatorConfig, coordinator: Coordinator, report: Reports) -> None:
    folder = Path(config.folder)
    model, options = network(), _options(folder)

    def stepped(step: int, loss: float, seconds: float) -> None:
        report("step", step=step, loss=loss)

    def planned(planned_run: PlannedRun) -> None:
        report("planned", devices=list(planned_run.plan.devices))

    if config.share == "split":
        edge, server = config.devices
        split_train(
            model, data(), **options, cut=2, bits=32, k=0, cloud=two(coordinator, edge, server, threads=1),
            on_step=stepped, on_planned=planned,
        )  # fmt: skip
        return
    cluster = Cluster.local(1).with_devices("chaos", tuple(member.device for member in coordinator.alive()))
    plan = plan_for(config.share, tuple(sorted(cluster.names)))
    train(
        model, data(), **options, cluster=coordinator, plan=plan, on_step=stepped, on_planned=planned, backup_every=2,
    )  # fmt: skip


def _options(folder: Path) -> dict[str, Any]:
    goes_on = folder.is_dir() and checkpoint.latest(folder) is not None
    return {
        "loss": loss_function, "optimizer": OPTIMIZER, "batch_size": BATCH_SIZE, "steps": STEPS, "seed": SEED,
        "folder": folder, "resume": goes_on, "verify": False, "name": "chaos",
        "say": lambda text: print(text, file=sys.stderr, flush=True),
    }  # fmt: skip


def plan_for(share: str, names: tuple[str, ...]) -> Plan:
    """Return a plan that uses every device."""
    first, *others = names
    parts = MICRO_BATCHES[share]
    if share == "samples":
        stages: tuple[Stage, ...] = (Stage((0, LAYERS), names, _samples(len(names), parts)),)
    elif share == "tiles":
        stages = (Stage((0, LAYERS - 1), names, ByTiles((1.0,) * len(names))), Stage((LAYERS - 1, LAYERS), (first,)))
    elif share == "pipeline":
        last = others.pop()
        middle = Stage((1, 3), tuple(others), _samples(len(others), parts))
        stages = (Stage((0, 1), (first,)), middle, Stage((3, LAYERS), (last,)))
    else:
        last = others.pop()
        stages = (Stage((0, 2), (first, *others), ByTiles((1.0,) * (len(names) - 1))), Stage((2, LAYERS), (last,)))
    return Plan("chaos", BATCH_SIZE, stages, parts)


def _samples(devices: int, micro_batches: int) -> BySamples | Single:
    if devices == 1:
        return Single()
    return BySamples(tuple(proportional(BATCH_SIZE // micro_batches, [1.0] * devices)))


# What is reported


def _report_events(report: Reports) -> None:
    event = RunRecord.event

    def reported(record: RunRecord, name: str, /, **facts: Any) -> None:
        if name == "replanned":
            report("planned", devices=list(Plan.from_dict(facts["plan"]).devices), how=facts["how"])
        else:
            report("event", event=name, facts=facts)
        event(record, name, **facts)

    RunRecord.event = reported  # type: ignore[method-assign]


@contextlib.contextmanager
def _alive(coordinator: Coordinator, report: Reports) -> Iterator[None]:
    """Report every change of the members while in this context; a device that was evicted and came back is a new
    member."""
    closing = threading.Event()

    def look() -> None:
        serials: dict[int, int] = {}
        before: list[tuple[str, int]] | None = None
        past_members = []  # so that no two members have one id
        while not closing.is_set():
            members = coordinator.alive()
            past_members += [member for member in members if id(member) not in serials]
            now = sorted((member.name, serials.setdefault(id(member), len(serials))) for member in members)
            if now != before and not closing.is_set():
                report("alive", devices=now)
                before = now
            closing.wait(_LOOK_SECONDS)

    looking = threading.Thread(target=look, name="chaos alive", daemon=True)
    looking.start()
    try:
        yield
    finally:
        closing.set()
        looking.join()
