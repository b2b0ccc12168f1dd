"""A run's numbers for MLflow: pip install 'manyhands[mlflow]'."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from manyhands.facts.extras import load
from manyhands.job.callback import Callback, CallbackContext


class MLflow(Callback):
    """Logs loss, seconds and learning rate of every step, and every validation, to MLflow.

    `tracking_uri`: where, like "http://host:5000" or "sqlite:///mlflow.db"; None: as MLflow is configured. A resumed
    run goes on with the same run there. Without the package `mh.MLflow()` raises an error that says how to install it.
    """

    def __init__(
        self, experiment: str = "manyhands", *, run_name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        mlflow = load("mlflow", "A log for MLflow")
        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._experiment, self._run_name = experiment, run_name
        self._id: str | None = None

    def on_start(self, context: CallbackContext) -> None:
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return
        present = self._client.get_experiment_by_name(self._experiment)
        experiment = present.experiment_id if present is not None else self._client.create_experiment(self._experiment)
        run = self._client.create_run(experiment, run_name=self._run_name or context.folder.name)
        self._id = str(run.info.run_id)
        self._client.log_param(self._id, "steps", context.steps)
        self._client.log_param(self._id, "folder", str(context.folder))

    def on_step(self, context: CallbackContext) -> None:
        self._log(context, {"loss": context.loss, "seconds": context.seconds, "learning_rate": context.learning_rate})

    def on_validation(self, context: CallbackContext) -> None:
        self._log(context, {f"validation/{name}": value for name, value in context.metrics.items()})

    def _log(self, context: CallbackContext, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None and not math.isnan(value):
                self._client.log_metric(self._id, name, value, step=context.step)

    def on_end(self, context: CallbackContext) -> None:
        if self._id is not None:
            self._client.set_terminated(self._id, status="FINISHED" if context.error is None else "FAILED")

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._id} if self._id is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = str(state["run_id"])
