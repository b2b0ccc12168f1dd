"""The reports of a scenario's coordinator so far, read from its file as it grows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SAME_ROUND_SECONDS = 0.005
"""Steps that end so soon after each other belong to one round: a split's has several, which are reported together."""

SAME_LOSS_SECONDS = 1.0


class CompletedStep(NamedTuple):
    """A step that was completed and had not been before, by this coordinator."""

    at: float
    incarnation: int
    step: int


class Gone(NamedTuple):
    """A device that the coordinator no longer counts on."""

    at: float
    name: str


@dataclass
class Watched:
    """The state of a job as its coordinators report it: several, one after another, each resuming the job."""

    path: Path
    steps: list[CompletedStep] = field(default_factory=list)
    alive: dict[str, int] = field(default_factory=dict)
    """Device -> the serial number of its membership with the present coordinator."""
    gone: list[Gone] = field(default_factory=list)
    in_use: tuple[str, ...] = ()
    """The devices of the present plan."""
    plans: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    """The moment at which each was made, and its devices."""
    endings: dict[int, str] = field(default_factory=dict)
    """Coordinator -> the error it ended with."""
    incarnation: int = -1
    _read: int = 0

    def poll(self) -> None:
        """Read the reports that have arrived since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        kind, at, incarnation = line["what"], line["at"], line["incarnation"]
        if incarnation > self.incarnation:
            self.incarnation, self.alive = incarnation, {}
        if kind == "step":
            self.steps.append(CompletedStep(at, incarnation, line["step"]))
        elif kind == "planned":
            self.in_use = tuple(line["devices"])
            self.plans.append((at, self.in_use))
        elif kind == "ended":
            self.endings[incarnation] = line["error"]
        elif kind == "alive":
            now = {name: int(serial) for name, serial in line["devices"]}
            self._note_gone(at, [name for name, serial in self.alive.items() if now.get(name) != serial])
            self.alive = now
        elif kind == "event" and line["event"] == "lost":
            self._note_gone(at, line["facts"].get("devices", ()))

    def _note_gone(self, at: float, names: Iterable[str]) -> None:
        """Note each loss once, although the job reports it and the list of members shows it."""
        recent = {loss.name for loss in self.gone if loss.at > at - SAME_LOSS_SECONDS}
        self.gone += [Gone(at, name) for name in names if name not in recent]

    def steps_since(self, at: float, incarnation: int | None = None) -> list[CompletedStep]:
        return [
            step for step in self.steps if step.at > at and (incarnation is None or step.incarnation == incarnation)
        ]

    def gone_since(self, at: float, names: Collection[str]) -> Gone | None:
        """Return the first of these devices that was given up since then."""
        return next((loss for loss in self.gone if loss.at > at and loss.name in names), None)

    def recovered_at(self, struck_at: float, incarnation: int, victims: Collection[str]) -> float | None:
        """Return the moment at which training had recovered from a fault; None: it has not yet.

        If there is a new coordinator since the fault, that is its first round. If a victim is to be given up, it is the
        first new round after that, or after a plan that leaves it out. Otherwise it is the second new round: the first
        may have been nearly done when the fault struck.
        """
        if self.incarnation > incarnation:
            steps = self.steps_since(struck_at, self.incarnation)
            return steps[0].at if steps else None
        if victims:
            loss = self.gone_since(struck_at, victims)
            moments = [at for at, devices in self.plans if at > struck_at and not set(victims) <= set(devices)]
            given_up = min([*moments[:1], *([loss.at] if loss is not None else [])], default=None)
            steps = self.steps_since(given_up) if given_up is not None else []
            return steps[0].at if steps else None
        steps = self.steps_since(struck_at)
        return next((step.at for step in steps if step.at > steps[0].at + SAME_ROUND_SECONDS), None)
