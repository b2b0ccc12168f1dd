"""The result of a simulation: when everything happened, and what it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.schedule.actions import Action

Track = Literal["compute", "send", "receive"]


@dataclass(frozen=True)
class Span:
    """Something that lasted from `start` to `end` on one track of a device."""

    device: str
    track: Track
    start: float
    end: float
    kind: str
    what: object
    """The action, message or reduction; it is formatted only when printed."""
    peer: str = ""

    @property
    def text(self) -> str:
        link = {"send": f"to {self.peer}: ", "receive": f"from {self.peer}: "}.get(self.track, "")
        return f"{link}{self.what}"


@dataclass
class DeviceResult:
    """One device's totals over the run."""

    device: str
    busy_seconds: float = 0.0
    transfer_seconds: float = 0.0
    finished_seconds: float = 0.0
    bytes_sent: float = 0.0
    bytes_received: float = 0.0
    peak_bytes: float = 0.0
    memory_bytes: float = 0.0
    most_micro_batches_held: int = 0
    joules: float = 0.0


@dataclass
class Simulation:
    """The outcome of one round (a mini-batch) of training, or of a stream of inferences."""

    seconds: float
    samples: int
    devices: dict[str, DeviceResult]
    bytes_between: dict[tuple[str, str], float]
    spans: list[Span]
    log: dict[str, list[Action]]
    """Every device's actions in the order they were taken: for an event-driven order, the list."""
    actions: int
    warnings: list[str] = field(default_factory=list)
    is_energy_known: bool = True
    """Whether the watts of every device are known; if not, the joules cover only some devices, or none."""

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else float("inf")

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes_between.values())

    @property
    def joules(self) -> float:
        return sum(device.joules for device in self.devices.values())

    @property
    def joules_per_sample(self) -> float:
        return self.joules / self.samples

    def idle_part(self, device: str) -> float:
        """Return the fraction of the run in which a device computed nothing: the bubble."""
        return 1.0 - self.devices[device].busy_seconds / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return numbers only, for --json; null means unknown."""
        return {
            "simulated": True,
            "seconds": self.seconds,
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "bytes": self.total_bytes,
            "joules": self.joules if self.is_energy_known else None,
            "joules_per_sample": self.joules_per_sample if self.is_energy_known else None,
            "actions": self.actions,
            "devices": {
                name: {
                    "busy_seconds": device.busy_seconds,
                    "idle_part": self.idle_part(name),
                    "bytes_sent": device.bytes_sent,
                    "bytes_received": device.bytes_received,
                    "peak_bytes": device.peak_bytes,
                    "memory_bytes": device.memory_bytes,
                    "most_micro_batches_held": device.most_micro_batches_held,
                    "joules": device.joules,
                }
                for name, device in self.devices.items()
            },
            "links": [
                {"from": source, "to": target, "bytes": count} for (source, target), count in self.bytes_between.items()
            ],
            "warnings": self.warnings,
        }
