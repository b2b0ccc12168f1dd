"""Calibrations that are kept: one file for each network, data set and batch size."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from typing import Any, Unpack

import msgspec
from torch.utils.data import Dataset

from manyhands.facts.calibration import VERSION, Calibration
from manyhands.facts.decode import converted
from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.facts.keywords import takes_settings
from manyhands.facts.network import Network
from manyhands.facts.optimizer import Optimizer
from manyhands.files.documents import cache_folder, read_document, write_document
from manyhands.graph.graph import Graph
from manyhands.split.calibration import CalibrationOptions, CalibrationSet, CalibrationSettings, Say, calibrate

_REFRESH = "Delete it, or calibrate again."


def calibration_path(network: Network, data: str, batch_size: int, folder: Path | None = None) -> Path:
    """Return the file of a calibration, named after what it depends on: the graph, the data, the batch size."""
    readable = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part)[:60].strip("-") for part in (network.name, data))
    digest = hashlib.sha256(f"{network.fingerprint}\n{network.granularity}\n{data}".encode()).hexdigest()[:12]
    return (folder or cache_folder() / "calibrations") / f"{readable}_{batch_size}_{digest}.json"


def find_calibration(network: Network, data: str, batch_size: int, *, folder: Path | None = None) -> Calibration | None:
    """Return the calibration that an earlier run stored; None: there is none. A damaged one is an error."""
    path = calibration_path(network, data, batch_size, folder)
    if not path.exists():
        return None
    raw = read_document(path)
    version = raw.get("version") if isinstance(raw, dict) else None
    if version is not None and version != VERSION:
        raise BadFile(f"{path}: has version {version}; this program reads version {VERSION}.", hint=_REFRESH)
    try:
        return converted(raw, Calibration)
    except msgspec.ValidationError as error:
        raise BadFile(f"{path}: is not a calibration: {error!s:.300}.", hint=_REFRESH) from error
    except ManyhandsError as error:
        raise BadFile(f"{path}: {error.message}", hint=_REFRESH) from error


@takes_settings(CalibrationSettings)
def calibrated(
    graph: Graph,
    train: Dataset[Any],
    test: Dataset[Any] | None,
    optimizer: Optimizer,
    *,
    batch_size: int,
    data: str,
    samples: int = 2048,
    folder: Path | None = None,
    say: Say | None = None,
    **options: Unpack[CalibrationOptions],
) -> Calibration:
    """Return the calibration stored for this network, data and batch size, or make one (with `calibrate`'s options) and
    store it.

    `test` is the data that trainings are scored on, a quarter as many samples; without it, they are scored on what they
    train on.
    """
    stored = find_calibration(graph.network, data, batch_size, folder=folder)
    if stored is not None:
        return stored
    seed = options.get("seed", 0)
    trained = CalibrationSet.of(graph, train, samples, seed)
    scored = trained if test is None else CalibrationSet.of(graph, test, samples // 4, seed)
    made = calibrate(graph, trained, scored, optimizer, batch_size=batch_size, data=data, say=say, **options)
    with contextlib.suppress(BadFile):  # what was found is worth more than its copy
        write_document(calibration_path(graph.network, data, batch_size, folder), msgspec.to_builtins(made))
    return made
