"""The explanation of a plan, as data: its limits, the plans that lost, and what a changed cluster would give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyhands.explaining.bottleneck import Limit
from manyhands.facts.plan import Plan
from manyhands.facts.summary import Summarized
from manyhands.facts.units import format_seconds


@dataclass(frozen=True)
class RunnerUp:
    """A plan that lost, and why."""

    name: str
    seconds: float | None
    """Simulated seconds of a step (of a sample, for inference); None: it cannot run."""
    times: float | None
    """Ratio to the chosen plan: of seconds, or with another objective, of its score."""
    reason: str
    limits: tuple[Limit, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "limits": [limit.to_dict() for limit in self.limits]}


@dataclass(frozen=True)
class WhatIf:
    """The outcome of planning again for a changed cluster."""

    change: str
    seconds: float
    speed_up: float
    score: float
    """The quantity by which plans are compared: these seconds, or bytes, or joules a sample."""
    gain: float
    """The factor by which the score is smaller than now."""
    plan: Plan
    is_device: bool
    """Whether the change is one more device, rather than a faster network."""

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": self.plan.to_dict()}


@dataclass(frozen=True, repr=False)
class Explanation(Summarized):
    """The reasons for the chosen plan. `limits` add up to the step; `binding` is the one that matters most."""

    seconds: float
    binding: Limit | None
    limits: tuple[Limit, ...]
    runners_up: tuple[RunnerUp, ...]
    what_if: tuple[WhatIf, ...]
    """The best change of each sort first: one more device, a faster network."""
    searched: tuple[str, ...] = ()
    """The strategies used to plan the what-ifs."""
    skipped: tuple[str, ...] = ()
    """Changes that were not planned, because that would take long here."""
    full: tuple[Limit, ...] = ()
    """Devices whose memory is nearly full, and whether more memory would help."""

    def summary(self) -> dict[str, str]:
        facts = {"step": format_seconds(self.seconds)}
        if self.binding is not None:
            facts["limited by"] = self.binding.text
        return facts | {
            f"with {change.change}": f"{change.gain:.2f} times better" for change in self.best_changes
        }  # fmt: skip

    @property
    def best_changes(self) -> list[WhatIf]:
        """The best change by one more device, and by the network."""
        best: dict[bool, WhatIf] = {}
        for change in self.what_if:
            best.setdefault(change.is_device, change)
        return list(best.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "simulated": True,
            "seconds": self.seconds,
            "binding": self.binding.to_dict() if self.binding else None,
            "limits": [limit.to_dict() for limit in self.limits],
            "full": [limit.to_dict() for limit in self.full],
            "runners_up": [runner_up.to_dict() for runner_up in self.runners_up],
            "what_if": [change.to_dict() for change in self.what_if],
            "searched": list(self.searched),
            "skipped": list(self.skipped),
        }
