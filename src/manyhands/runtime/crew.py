"""Those who take part in a job that outlives them: who is there, who has come since it was planned, who wants to go."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from manyhands.facts.errors import ManyhandsError
from manyhands.runtime.control import Leave
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.members import Member

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Endurance:
    """How hard a job tries to go on."""

    replan: str = "auto"
    """"light" (shares, tiles and cuts move), "heavy" (planned anew), or "auto"."""
    least: int = 1
    """With fewer workers it waits for more."""
    most: int | None = None
    """More are not used."""
    wait_seconds: float = 0.0
    """How long it waits for them."""
    attempts: int = 5
    """Losses in a row, with no step done between them, after which it gives up."""


class Tell(Protocol):
    """Told what happens: what, and facts that can be written down."""

    def __call__(self, event: str, /, **facts: Any) -> None: ...


class Crew:
    """Members as a job sees them."""

    def __init__(self, coordinator: Coordinator, endurance: Endurance, tell: Tell) -> None:
        self.coordinator, self.endurance, self.tell = coordinator, endurance, tell
        self._known: set[Member] = set()
        """Who was there when the plan was made."""
        self._dismissed: set[Member] = set()

    @property
    def least(self) -> int:
        return max(1, self.endurance.least)

    def available(self) -> list[Member]:
        """Those who may compute, at most so many."""
        members = [member for member in self.coordinator.alive() if not member.is_leaving]
        known = [member for member in members if member in self._known]
        return [*known, *(one for one in members if one not in self._known)][: self.endurance.most]

    def know_all(self) -> None:
        """A plan is made: whoever is there is not new from now on."""
        self._known = set(self.coordinator.alive())

    def is_leaving(self, names: Collection[str]) -> bool:
        """Whether one of these wants to go."""
        return any(member.is_leaving and member.name in names for member in self.coordinator.alive())

    def has_changed(self, names: Collection[str]) -> bool:
        """Whether somebody has come since the plan was made, or one of those that it names wants to go and may."""
        if self.is_leaving(names):
            return len(self.available()) >= self.least
        return any(member not in self._known for member in self.available())

    def tell_of_change(self, names: Collection[str]) -> None:
        for member in self.coordinator.alive():
            if member.is_leaving and member.name in names:
                self.tell("leaving", device=member.name)
            elif member not in self._known:
                self.tell("joined", device=member.name)

    def dismiss(self, needed: Collection[str]) -> None:
        """Those who were asked to go, and are not needed, go."""
        for member in self.coordinator.alive():
            if member.is_leaving and member.name not in needed and member not in self._dismissed:
                self._dismissed.add(member)
                self.coordinator.say(member.name, Leave())
                self.tell("left", device=member.name)

    def wait_for_enough(self, error: ManyhandsError, check: Callable[[], None] = lambda: None) -> None:
        """Raises `error` where too few are there at the end of the wait, or whatever `check` does meanwhile."""
        if len(self.available()) >= self.least:
            return
        wait_seconds = self.endurance.wait_seconds
        self.tell("waiting", workers=len(self.available()), least=self.least, seconds=wait_seconds)
        end = time.monotonic() + wait_seconds
        while len(self.available()) < self.least:
            check()
            if time.monotonic() > end:
                raise error
            self.coordinator.next_event(_POLL_SECONDS)
