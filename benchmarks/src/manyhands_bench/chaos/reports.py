"""What the coordinator of a scenario has reported so far, read from its file as it grows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SAME_ROUND_SECONDS = 0.005
"""Steps that end so soon after each other are of one round: a split's has several, which are reported together."""

SAME_LOSS_SECONDS = 1.0


class CompletedStep(NamedTuple):
    """A step that was completed and had not been before, by this coordinator."""

    at: float
    life: int
    step: int


class Gone(NamedTuple):
    """A device that the coordinator no longer counts on."""

    at: float
    name: str


@dataclass
class Watched:
    """The state of a job as its coordinators report it. Several live one after another, each resuming the job."""

    path: Path
    steps: list[CompletedStep] = field(default_factory=list)
    alive: dict[str, int] = field(default_factory=dict)
    """Device -> the serial number of its membership, of the present coordinator."""
    gone: list[Gone] = field(default_factory=list)
    in_use: tuple[str, ...] = ()
    """The devices of the present plan."""
    plans: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    """When each was made, and its devices."""
    endings: dict[int, str] = field(default_factory=dict)
    """Coordinator -> the error it ended with."""
    life: int = -1
    _read: int = 0

    def poll(self) -> None:
        """Take in what was reported since."""
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
        what, at, life = line["what"], line["at"], line["life"]
        if life > self.life:
            self.life, self.alive = life, {}
        if what == "step":
            self.steps.append(CompletedStep(at, life, line["step"]))
        elif what == "planned":
            self.in_use = tuple(line["devices"])
            self.plans.append((at, self.in_use))
        elif what == "ended":
            self.endings[life] = line["error"]
        elif what == "alive":
            now = {name: int(serial) for name, serial in line["devices"]}
            self._note_gone(at, [name for name, serial in self.alive.items() if now.get(name) != serial])
            self.alive = now
        elif what == "event" and line["event"] == "lost":
            self._note_gone(at, line["facts"].get("devices", ()))

    def _note_gone(self, at: float, names: Iterable[str]) -> None:
        """Each loss once, though the job tells of it and the list of members shows it."""
        recent = {one.name for one in self.gone if one.at > at - SAME_LOSS_SECONDS}
        self.gone += [Gone(at, name) for name in names if name not in recent]

    def steps_since(self, at: float, life: int | None = None) -> list[CompletedStep]:
        return [one for one in self.steps if one.at > at and (life is None or one.life == life)]

    def gone_since(self, at: float, names: Collection[str]) -> Gone | None:
        """The first of these devices that was given up since."""
        return next((one for one in self.gone if one.at > at and one.name in names), None)

    def recovered_at(self, struck_at: float, life: int, victims: Collection[str]) -> float | None:
        """When training had recovered from a fault; None: it has not yet.

        A coordinator that is there since the fault: at its first round. Where a victim is to be given up: at the first
        new round after that, or after a plan that leaves it out. Else at the second new round: the first may have been
        nearly done when the fault struck.
        """
        if self.life > life:
            found = self.steps_since(struck_at, self.life)
            return found[0].at if found else None
        if victims:
            gone = self.gone_since(struck_at, victims)
            moments = [at for at, devices in self.plans if at > struck_at and not set(victims) <= set(devices)]
            given_up = min([*moments[:1], *([gone.at] if gone is not None else [])], default=None)
            found = self.steps_since(given_up) if given_up is not None else []
            return found[0].at if found else None
        found = self.steps_since(struck_at)
        return next((one.at for one in found if one.at > found[0].at + SAME_ROUND_SECONDS), None)
