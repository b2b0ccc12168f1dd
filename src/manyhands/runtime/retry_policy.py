"""The effort that a job makes to go on when devices are lost: with how few, how long it waits, how often it tries."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.facts.errors import BadValue


@dataclass(frozen=True)
class RetryPolicy:
    """The limits within which a job tries to go on when devices are lost."""

    replan: str = "auto"
    """"light" (incremental: shares, tiles and cuts move), "heavy" (full re-planning), or "auto"."""
    min_devices: int = 1
    """The floor: with fewer the job waits for others to join, then ends. The number that a job begins with is not set
    here: it is that of the devices that had joined when it was planned."""
    max_devices: int | None = None
    """Most devices that are used; None: all that join."""
    wait_seconds: float = 0.0
    """Seconds that a job below the floor waits for others; 0: none can join."""
    attempts: int = 5
    """Losses in a row, with no step done between them, after which the job gives up."""

    def __post_init__(self) -> None:
        if self.min_devices < 1:
            raise BadValue(f"min_devices is {self.min_devices}; it must be at least 1.")
        if self.max_devices is not None and self.max_devices < self.min_devices:
            raise BadValue(
                f"max_devices is {self.max_devices}; it must be at least min_devices, which is {self.min_devices}."
            )

    def begins_with(self, count: int) -> None:
        """Refuse a job that would be below its floor before any device has left."""
        if count < self.min_devices:
            raise BadValue(
                f"min_devices is {self.min_devices}; the job would begin with {count} device(s).",
                hint=f"Give it {self.min_devices} devices, or write min_devices={count}.",
            )
