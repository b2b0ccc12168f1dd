"""The callbacks that come with manyhands: EarlyStopping, BestCheckpoint, CSV, TensorBoard."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.facts.errors import BadFile, BadValue
from manyhands.files.documents import make_folder, write_failed, write_text_atomic
from manyhands.job.callback import Callback, CallbackContext
from manyhands.job.callback_list import is_better
from manyhands.job.metrics import ACCURACY, LOSS
from manyhands.job.watch import BEST
from manyhands.observe.append import Metrics

_MODES = {LOSS: "min", ACCURACY: "max"}


class _Monitoring(Callback):
    """A callback that goes by whether a metric is the best so far."""

    def __init__(self, monitor: str, mode: str | None, min_delta: float = 0.0) -> None:
        mode = _MODES.get(monitor) if mode is None else mode
        if mode not in ("min", "max"):
            which = "not given" if mode is None else repr(mode)
            raise BadValue(
                f"The mode of {self.name} is {which}; it must be 'min' or 'max'.",
                hint=f"Write mode='max' if a higher {monitor} is better.",
            )
        if not (isinstance(min_delta, (int, float)) and min_delta >= 0 and math.isfinite(min_delta)):
            raise BadValue(f"min_delta is {min_delta!r}; it must be a number of at least 0.")
        self.monitor, self.mode, self.min_delta = monitor, mode, float(min_delta)
        self.best: float | None = None
        """The best value so far."""

    def _is_better(self, context: CallbackContext) -> bool:
        """Return whether the last validation was the best so far, and remember its value then."""
        value = context.metrics[self.monitor]
        if not is_better(value, self.best, self.mode, self.min_delta):
            return False
        self.best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "mode": self.mode, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        was = state["monitor"], state["mode"]
        if was != (self.monitor, self.mode):
            raise BadValue(f"it went by {was[0]} ({was[1]}), and now goes by {self.monitor} ({self.mode}).")
        best = state["best"]
        self.best = None if best is None else float(best)


class EarlyStopping(_Monitoring):
    """Stops a run whose metric has not become better for `patience` validations in a row.

    `monitor`: the metric of the validations. `mode`: "min" or "max", whichever is better; may be left out for loss and
    accuracy. `min_delta`: by how much it must be better than the best so far.
    """

    def __init__(self, monitor: str = LOSS, patience: int = 3, mode: str | None = None, min_delta: float = 0.0) -> None:
        super().__init__(monitor, mode, min_delta)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise BadValue(f"patience is {patience!r}; it must be a whole number of validations of at least 1.")
        self.patience, self.waited = patience, 0

    def on_validation(self, context: CallbackContext) -> None:
        self.waited = 0 if self._is_better(context) else self.waited + 1
        if self.waited >= self.patience:
            best = "a number" if self.best is None else f"better than {self.best:.6g}"
            context.stop(f"{self.monitor} has not been {best} for {self.waited} validation(s)")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.waited = int(state["waited"])


class BestCheckpoint(_Monitoring):
    """Keeps the checkpoint with the best validation in RUN/best, which is `result.best_checkpoint`.

    `monitor` and `mode` are as in EarlyStopping.
    """

    def __init__(self, monitor: str = LOSS, mode: str | None = None) -> None:
        super().__init__(monitor, mode)

    def on_validation(self, context: CallbackContext) -> None:
        if self._is_better(context):
            context.checkpoint(BEST)


class CSV(Callback):
    """Writes steps and validations into one file: a row for each step, and one with the metrics for each validation.

    A resumed run goes on in the file, without the rows of steps that are run again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: Metrics | None = None

    def on_start(self, context: CallbackContext) -> None:
        columns = ("step", "epoch", "loss", "seconds", "learning_rate", *(f"val_{n}" for n in context.metric_names))
        make_folder(self.path.absolute().parent)
        if self.path.exists():
            self._forget_after(context.step)
        self._file = Metrics(self.path, columns)

    def _forget_after(self, step: int) -> None:
        try:
            with open(self.path, newline="") as file:
                header, *rows = list(csv.reader(file)) or [[]]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise BadFile(f"{self.path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        kept = [row for row in rows if row and row[0].isdecimal() and int(row[0]) <= step]
        if header and step < 0 and rows:
            raise BadFile(f"{self.path}: holds another run already.", hint="Give another file.")
        if header:
            write_text_atomic(self.path, "".join(",".join(row) + "\n" for row in (header, *kept)))

    def on_step(self, context: CallbackContext) -> None:
        if self._file is not None:
            self._file.write(
                step=context.step, epoch=context.epoch, loss=context.loss, seconds=context.seconds,
                learning_rate=context.learning_rate,
            )  # fmt: skip

    def on_validation(self, context: CallbackContext) -> None:
        if self._file is not None:
            columns = set(context.metric_names)
            metrics = {f"val_{name}": value for name, value in context.metrics.items() if name in columns}
            self._file.write(step=context.step, epoch=context.epoch, **metrics)

    def on_end(self, context: CallbackContext) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                raise write_failed(self.path, error) from error


class TensorBoard(Callback):
    """Writes a log for TensorBoard into RUN/tensorboard; the same as `tensorboard=True`, and `--tensorboard`.

    The run's own record writes it: it has what callbacks are not told, such as the devices' memory.
    """
