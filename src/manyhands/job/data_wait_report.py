"""Says when data is what limits a run: while it goes on, and after the last step."""

from __future__ import annotations

from manyhands.data.waits import DataWaits
from manyhands.job.callbacks import Say
from manyhands.runtime.record import RunRecord


class DataWaitReport:
    """The waits of a run for data, in its folder, on its progress line and for the user."""

    def __init__(self, record: RunRecord, say: Say | None, first_steps: int) -> None:
        """`first_steps`: steps that are not counted."""
        self._record, self._say = record, say
        self._waits = DataWaits(first_steps)

    @property
    def share(self) -> float:
        """The part of the time of the steps that was waiting for data."""
        return self._waits.share

    def add(self, seconds: float, waited_seconds: float) -> None:
        """Count how long a step waited for its batch, and say so once if that is what limits the run."""
        self._waits.add(seconds, waited_seconds)
        if self._record.living is not None:
            self._record.living.waited_for_data(self._waits.recent_share)
        self._note(self._waits.news())

    def end(self) -> None:
        """Say how much of the time was waiting, if it was much."""
        self._note(self._waits.summary())

    def _note(self, text: str) -> None:
        if text:
            self._record.event("note", text=text)
            if self._say is not None:
                self._say(text)
