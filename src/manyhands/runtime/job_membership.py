"""The members of a job that outlives them: those available, those that joined since it was planned, those leaving."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from manyhands.facts.errors import ManyhandsError, WorkerLost
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.member import Member
from manyhands.runtime.outcome import LogEvent
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.root_cause import lost

_POLL_SECONDS = 0.05


class JobMembership:
    """The members from a job's point of view."""

    def __init__(self, coordinator: Coordinator, retry_policy: RetryPolicy, log_event: LogEvent) -> None:
        self.coordinator, self.retry_policy, self.log_event = coordinator, retry_policy, log_event
        self._known: set[Member] = set()
        """The members that were available when the plan was made."""
        self._kept: set[Member] = set()
        """The members that want to leave and cannot yet, which has been logged."""

    def available(self) -> list[Member]:
        """Return the members that may compute, at most `max_devices`, those of the plan first."""
        members = [member for member in self.coordinator.alive() if not member.is_leaving]
        planned = [member for member in members if member in self._known]
        return [*planned, *(member for member in members if member not in self._known)][: self.retry_policy.max_devices]

    def know_all(self) -> None:
        """Note that a plan is made: the present members are not new from now on."""
        self._known = set(self.coordinator.alive())

    def is_leaving(self, names: Collection[str]) -> bool:
        """Return whether one of these members wants to leave."""
        return any(member.is_leaving and member.name in names for member in self.coordinator.alive())

    def has_changed(self, names: Collection[str]) -> bool:
        """Return whether a worker has joined since the plan was made, or one of these wants to leave and may."""
        if self.is_leaving(names):
            is_enough = len(self.available()) >= self.retry_policy.min_devices
            if not is_enough:
                self._log_kept(names)
            return is_enough
        return any(member not in self._known for member in self.available())

    def _log_kept(self, names: Collection[str]) -> None:
        """Log, once for each, the members that want to leave but without which too few would be left."""
        for member in self.coordinator.alive():
            if member.is_leaving and member.name in names and member not in self._kept:
                self._kept.add(member)
                count, floor = len(self.available()), self.retry_policy.min_devices
                text = f"{member.name} wants to leave; {count} device(s) would be left, at least {floor} needed"
                self.log_event("note", text=f"{text}: it goes when another joins, or by a second Ctrl-C.")

    def loss_among(self, names: Collection[str]) -> WorkerLost | None:
        """Return the error for the first of these members that was lost between two runs; None: nobody was."""
        for name in names:
            member = self.coordinator.members[name]
            if member.is_lost and not member.has_left:
                return lost(self.coordinator, name, "between two steps", member.reason)
        return None

    def log_change(self, names: Collection[str]) -> None:
        for member in self.coordinator.alive():
            if member.is_leaving and member.name in names:
                self.log_event("leaving", device=member.name)
            elif member not in self._known:
                self.log_event("joined", device=member.name)

    def dismiss(self, needed: Collection[str]) -> None:
        """Dismiss the members that were asked to leave and are not needed."""
        for member in self.coordinator.alive():
            if member.is_leaving and member.name not in needed and not member.is_dismissed:
                self.coordinator.dismiss(member.name)
                self.log_event("left", device=member.name)

    def wait_for_enough(self, error: ManyhandsError, check: Callable[[], None] = lambda: None) -> None:
        """Wait until there are at least `min_devices` members.

        WorkerLost, with the message of `error` for the cause, where too few are left at the end of the wait. `check` is
        called meanwhile, and may raise an error of its own.
        """
        if len(self.available()) >= self.retry_policy.min_devices:
            return
        wait_seconds = self.retry_policy.wait_seconds
        self.log_event(
            "waiting", workers=len(self.available()), least=self.retry_policy.min_devices, seconds=wait_seconds
        )
        end = time.monotonic() + wait_seconds
        while len(self.available()) < self.retry_policy.min_devices:
            check()
            if time.monotonic() > end:
                raise self._too_few(error)
            self.coordinator.next_event(_POLL_SECONDS)

    def _too_few(self, error: ManyhandsError) -> WorkerLost:
        count, floor, waited = len(self.available()), self.retry_policy.min_devices, self.retry_policy.wait_seconds
        join = f"On each device: {self.coordinator.join_command()}" if waited else ""
        in_vain = f", and no more have joined within {waited:g} s" if waited else ""
        message = f"{error.message} {count} device(s) left, at least {floor} needed{in_vain}."
        return WorkerLost(message, hint="\n".join(filter(None, (error.hint, join))))
