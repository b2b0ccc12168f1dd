"""A run's numbers for TensorBoard, in RUN/tensorboard/: written by torch's writer, beside metrics.csv and events.jsonl.

    tensorboard --logdir runs

loss, samples_per_second, seconds, staleness and grad_norm of every step; memory and share of computing of each device;
events, as text; the configuration, as hyper-parameters. A run that is resumed hides the steps that are run again.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manyhands.facts.extras import load
from manyhands.files.documents import file_mode, make_folder, write_failed
from manyhands.observe.live import read_live
from manyhands.observe.validation_log import COLUMNS

FOLDER = "tensorboard"
LOOK_SECONDS = 2.0
"""Seconds between two looks at the devices' memory."""


def need_tensorboard() -> None:
    """Raise if TensorBoard is missing: called before anything starts."""
    load("tensorboard", "A log for TensorBoard")


class TensorBoardLog:
    """A writer of one run's log."""

    def __init__(self, run: Path, steps_done: int = 0) -> None:
        """Open the log. `steps_done`: steps of the run that is resumed; entries logged after them are hidden."""
        need_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._run, self._step, self._looked = run, steps_done, -math.inf
        make_folder(run / FOLDER, is_private=True)
        self._writer: Any = SummaryWriter(str(run / FOLDER), purge_step=steps_done or None)
        for path in (run / FOLDER).iterdir():
            path.chmod(file_mode(path))

    def step(
        self, step: int, epoch: int, loss: float | None, seconds: float, samples: int, staleness: int | None,
        grad_norm: float | None = None,
    ) -> None:  # fmt: skip
        self._step = step
        values = {
            "loss": loss, "seconds": seconds, "epoch": epoch, "staleness": staleness,
            "grad_norm": grad_norm,
            "samples_per_second": samples / seconds if seconds else None,
        }  # fmt: skip
        with self._writing():
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name, value, step)
            self._look()

    def event(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write an event as text, at the step it happened after."""
        text = json.dumps(dict(facts), default=str)[:2000]
        with self._writing():
            self._writer.add_text("events", f"**{event}** `{text}`", self._step)
            for name in ("accuracy", "loss"):
                if event == "evaluated" and isinstance(facts.get(name), (int, float)):
                    self._writer.add_scalar(f"test/{name}", facts[name], self._step)

    def validated(self, row: Mapping[str, float]) -> None:
        """Write the results of a validation, at the last step before it."""
        with self._writing():
            for name, value in row.items():
                if name not in COLUMNS:
                    self._writer.add_scalar(f"validation/{name}", value, int(row["step"]) - 1)

    def decided(self, config: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        """Write the hyper-parameters, into this log and not into one of their own as add_hparams does."""
        from torch.utils.tensorboard.summary import hparams

        with self._writing():
            for summary in hparams(_flat(config), {"loss": 0.0}):  # type: ignore[no-untyped-call]
                self._writer.file_writer.add_summary(summary)
            self._writer.add_text("plan", f"```json\n{json.dumps(plan, indent=2, default=str)}\n```", self._step)

    def devices(self, peaks: Mapping[str, int]) -> None:
        """Write the most tensor bytes of each device, counted in one step."""
        with self._writing():
            for name, peak in peaks.items():
                if peak:
                    self._writer.add_scalar(f"memory/{name}/peak_tensor_bytes", peak, self._step)

    def close(self) -> None:
        with self._writing():
            try:
                self._look(is_last=True)
            finally:
                self._writer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert the system's errors that TensorBoard's writer raises, such as that of a full disk."""
        try:
            yield
        except OSError as error:
            raise write_failed(self._run / FOLDER, error, what="the log for TensorBoard") from error

    def _look(self, *, is_last: bool = False) -> None:
        """Write the memory that the devices hold, from the run's live state."""
        now = time.monotonic()
        if not is_last and now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        live = read_live(self._run)
        for device in live.devices if live is not None else ():
            values = {
                "resident_bytes": device.resident_bytes, "planned_bytes": device.planned_bytes,
                "budget_bytes": device.memory_bytes,
            }  # fmt: skip
            for name, value in values.items():
                if value and math.isfinite(value):
                    self._writer.add_scalar(f"memory/{device.name}/{name}", value, self._step)
            if device.busy is not None:
                self._writer.add_scalar(f"busy/{device.name}", device.busy, self._step)


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, str | float | bool]:
    """Return a configuration in one level: hyper-parameters are numbers and words."""
    flat: dict[str, str | float | bool] = {}
    for key, value in config.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}/")
        elif isinstance(value, (bool, int, float, str)):
            flat[name] = value
        elif value is not None:
            flat[name] = json.dumps(value, default=str)
    return flat
