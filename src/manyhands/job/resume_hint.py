"""Adds to an error in the middle of a run where its checkpoint is, and what to type to go on or to begin again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.executor import checkpoint
from manyhands.executor.optimizers import with_lower_rate
from manyhands.facts.errors import BadFile, DataNotFinite, ManyhandsError, NotFinite
from manyhands.facts.optimizer import Optimizer
from manyhands.job.resuming import resume_command


@dataclass(frozen=True)
class Words:
    """A job as its user started it: a command (`document`: its options in config.yaml), or a call in Python."""

    command: str
    folder: Path
    document: Mapping[str, Any] | None

    @property
    def resume(self) -> str:
        """The command or call that goes on with the run."""
        if self.document is not None:
            return resume_command(self._words, self.folder, self.document)
        return f"{self._call}(..., resume='{self.folder}')"

    def another(self, optimizer: Optimizer, newest: Path) -> str:
        """Return the command or call of a new run with another optimiser, which starts from a checkpoint's weights if
        this kind of job accepts weights."""
        weights = (
            "" if self._is_train else f" --weights {newest}" if self.document is not None else f", weights='{newest}'"
        )
        if self.document is not None:
            return f"manyhands {self._words} ... --optimizer {optimizer.to_text()} --out {self.folder}-2{weights}"
        return f"{self._call}(..., optimizer=mh.{optimizer!r}, folder='{self.folder}-2'{weights})"

    @property
    def _is_train(self) -> bool:
        return self.command in ("train", "prepare")

    @property
    def _words(self) -> str:
        return "train" if self._is_train else f"{self.command} train"

    @property
    def _call(self) -> str:
        return f"mh.{self.command}" if self._is_train else f"mh.{self.command}_train"


def point_to_checkpoint(error: ManyhandsError, words: Words, optimizer: Optimizer) -> None:
    """Add to the error's hint where the newest checkpoint is, and how to continue from it. A run is deterministic: one
    whose numbers were not finite would, unchanged, reach the same numbers again."""
    newest = None
    with contextlib.suppress(BadFile):
        newest = checkpoint.latest(words.folder)
    if newest is None:
        return
    lines = [error.hint, f"Checkpoint: {newest}"]
    if isinstance(error, NotFinite):
        lines[-1] += " (from before it; unchanged, the run comes to the same numbers again)"
        if not isinstance(error, DataNotFinite):
            lines.append(
                f"With a lower learning rate it is a new run: {words.another(with_lower_rate(optimizer), newest)}"
            )
        lines.append(f"Once the data is fixed, go on with: {words.resume}")
    else:
        lines.append(f"Go on with: {words.resume}")
    error.hint = "\n".join(lines).strip()
