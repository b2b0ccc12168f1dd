"""A run's numbers for Weights & Biases: pip install 'manyhands[wandb]'."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from manyhands.facts.extras import load
from manyhands.job.callback import Callback, CallbackContext


class WandB(Callback):
    """Logs loss, seconds and learning rate of every step, and every validation, to Weights & Biases.

    `project` and `options` are those of wandb.init, such as name, entity, tags and mode="offline". A resumed run goes
    on with the same run there. Without the package `mh.WandB()` raises an error that says how to install it.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self._wandb = load("wandb", "A log for Weights & Biases")
        self._options = {"project": project, **options}
        self._run: Any = None
        self._id: str | None = None

    def on_start(self, context: CallbackContext) -> None:
        again = {"id": self._id, "resume": "allow"} if self._id is not None else {}
        where = {"dir": str(context.folder), "name": context.folder.name}
        self._run = self._wandb.init(**{**where, **self._options, **again})
        self._id = str(self._run.id)

    def on_step(self, context: CallbackContext) -> None:
        values = {
            "loss": context.loss, "seconds": context.seconds, "learning_rate": context.learning_rate,
            "epoch": context.epoch,
        }  # fmt: skip
        self._run.log({name: value for name, value in values.items() if value is not None}, step=context.step)

    def on_validation(self, context: CallbackContext) -> None:
        numbers = {f"validation/{name}": value for name, value in context.metrics.items() if not math.isnan(value)}
        self._run.log(numbers, step=context.step)

    def on_end(self, context: CallbackContext) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if context.error is None else 1)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id} if self._id is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = str(state["id"])
