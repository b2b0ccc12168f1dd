"""The part of the time of steps in which the devices waited for data, and the words for it."""

from __future__ import annotations

from collections import deque

MOST_SHARE = 0.1
"""A run whose devices wait for more of the time than this says so."""
_RECENT_STEPS = 20
_LEAST_STEPS = 10


class DataWaits:
    """The waits of a run for batches that were not loaded yet, step by step."""

    def __init__(self, first_steps: int) -> None:
        """`first_steps`: steps that are not counted, since a run begins with waiting."""
        self._not_counted = first_steps
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_STEPS)
        self._seconds = self._waited = 0.0
        self._is_said = False

    def add(self, seconds: float, waited_seconds: float) -> None:
        """Count a step that took so many seconds, in which all devices waited for its batch for some of them."""
        if self._not_counted:
            self._not_counted -= 1
            return
        waited_seconds = min(waited_seconds, seconds)
        self._recent.append((seconds, waited_seconds))
        self._seconds += seconds
        self._waited += waited_seconds

    @property
    def share(self) -> float:
        """The part of the time of all steps that was waiting."""
        return self._waited / self._seconds if self._seconds else 0.0

    @property
    def recent_share(self) -> float:
        """The part of the time of the last steps that was waiting."""
        seconds = sum(taken for taken, _ in self._recent)
        return sum(waited for _, waited in self._recent) / seconds if seconds else 0.0

    def news(self) -> str:
        """Return, once, that data is the bottleneck, as soon as that is seen; else nothing."""
        if self._is_said or len(self._recent) < _LEAST_STEPS or self.recent_share <= MOST_SHARE:
            return ""
        self._is_said = True
        return f"Data is the bottleneck: the devices wait for it {self.recent_share:.0%} of the time. {_HINT}"

    def summary(self) -> str:
        """Return what there is to say after the last step; empty: nothing."""
        if self.share <= MOST_SHARE:
            return ""
        return f"The devices waited for data {self.share:.0%} of the time. {_HINT}"


_HINT = "A DataLoader with num_workers=... loads with more processes; pictures of the size that is trained load faster."
