"""The progress of a run's devices, in steps and in rounds of several steps."""

from __future__ import annotations

from collections.abc import Iterable


class StepProgress:
    """The steps that each device of a run is done with; the first step of the run begins the first round."""

    def __init__(self, names: Iterable[str], first: int, last_step: int, stride: int) -> None:
        """`stride`: steps of a round. `last_step`: steps done when the run is over."""
        self.first, self.last_step, self.stride = first, last_step, stride
        self.done = dict.fromkeys(names, first - 1)
        """Device -> the last step of the last round that it has ended."""
        self.updated = dict(self.done)
        """Device -> the last step that it is done with, in the middle of a round too."""

    def round_of(self, step: int) -> int:
        """Return the first step of the round that a step is in."""
        return self.first + (step - self.first) // self.stride * self.stride

    def round_end(self, step: int) -> int:
        """Return the steps done when a step's round has ended."""
        return min(self.round_of(step) + self.stride, self.last_step)

    @property
    def steps_done(self) -> int:
        """Steps of the rounds that all devices have ended."""
        return min(self.done.values()) + 1

    @property
    def steps_updated(self) -> int:
        """Steps that all devices are done with, those of the round under way too."""
        return min(self.updated.values()) + 1

    def last_ones(self) -> set[str]:
        """Return the devices that have done the fewest steps."""
        least = min(self.done.values())
        return {name for name, step in self.done.items() if step == least}
