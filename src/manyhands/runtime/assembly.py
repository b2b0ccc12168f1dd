"""Waits until the workers that a job needs have joined, and again where some of them are lost before it begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from manyhands.facts.errors import BadValue, TimedOut, WorkerLost
from manyhands.runtime.member import Member
from manyhands.runtime.membership import Membership
from manyhands.transport.security import is_loopback

JOIN_SECONDS = 120.0


class Assembly:
    """The members that a job waits for, and those that it begins with."""

    def __init__(
        self, membership: Membership, join_command: Callable[[], str], on_event: Callable[[str], None]
    ) -> None:
        """`join_command`: the command that a hint names for a device that has not joined."""
        self._membership, self._join_command, self._on_event = membership, join_command, on_event
        self.limit_seconds = JOIN_SECONDS
        """How long workers may take to join: the limit of the last wait."""
        self._awaited: list[str] | int = 0
        """The workers, or how many, that a job which has not begun yet waited for; 0: none."""

    def wait_for(self, names: Iterable[str] | int, limit_seconds: float = JOIN_SECONDS) -> None:
        """Wait until these workers, or this many, have joined."""
        awaited_names = list(names) if not isinstance(names, int) else []
        count = names if isinstance(names, int) else len(awaited_names)
        self._awaited, self.limit_seconds = awaited_names or count, limit_seconds
        membership, local = self._membership, self._membership.local
        end = time.monotonic() + limit_seconds
        with membership.change:
            while True:
                alive = [member.name for member in membership.alive()]
                missing = [name for name in awaited_names if name not in alive]
                if not missing and len(alive) >= count:
                    return
                for name in missing or list(local.processes):
                    if name not in alive and (ending := local.ending(name)):
                        raise WorkerLost(
                            f"Worker {name} {ending} before it joined.", hint=local.last_words(name)[-800:]
                        )
                seconds_left = end - time.monotonic()
                if seconds_left <= 0:
                    situation = (
                        f"waiting for {', '.join(missing)}" if missing else f"{len(alive)} of {count} have joined"
                    )
                    raise TimedOut(
                        f"Workers did not join within {limit_seconds:g} s: {situation}.",
                        hint=f"On each device: {self._join_command()}",
                    )
                membership.change.wait(min(seconds_left, 0.2))

    def wait_for_replacements(self) -> None:
        """Wait again, for as long, where some of those that `wait_for` waited for were lost before a job began.

        A device may be switched off, or its worker killed, while the job still reads its data. Others may join in its
        place until the same limit has passed; then the job begins with the workers that have joined. TimedOut where
        there are none. Call it as a job begins; from then on the job goes on without the workers it loses. Workers that
        were started on this machine are not replaced.
        """
        awaited, self._awaited = self._awaited, 0
        alive = [member.name for member in self._membership.alive()]
        count = awaited if isinstance(awaited, int) else len(awaited)
        missing = [name for name in awaited if name not in alive] if isinstance(awaited, list) else []
        if self._membership.local.processes or (not missing and len(alive) >= count):
            return
        missing_workers = ", ".join(missing) if missing else f"{count - len(alive)} worker(s)"
        self._on_event(
            f"Waiting for {missing_workers} in place of those that were lost: {len(alive)} of {count} are here."
        )
        try:
            self.wait_for(awaited, self.limit_seconds)
        except TimedOut:
            if not self._membership.alive():
                raise
            self._on_event(f"Beginning with {len(self._membership.alive())} of {count} workers: no more have joined.")
        finally:
            self._awaited = 0

    def members_for(self, names: Iterable[str]) -> dict[str, Member]:
        """Return the members that a job is about to use, by name. Events from before it began are dropped."""
        membership = self._membership
        while membership.next_event(0.0) is not None:
            pass
        members: dict[str, Member] = {}
        for name in names:
            member = membership.members.get(name)
            if member is None:
                raise WorkerLost(f"Worker {name} has not joined.", hint=f"{self._join_command()} --name {name}")
            if member.is_lost:
                reason = membership.local.ending(name, 1.0) or member.reason
                raise WorkerLost(f"Worker {name} was lost before this began: {reason}.", hint="Start it again.")
            members[name] = member
        loopback_names = [name for name, member in members.items() if is_loopback(member.address[0])]
        remote_names = [
            name for name, member in members.items() if name not in loopback_names and not member.is_invited
        ]
        if loopback_names and remote_names:
            raise BadValue(
                f"{', '.join(loopback_names)} joined by a loopback address, which {remote_names[0]} on another machine "
                "cannot reach.",
                hint="Join by this machine's own address: manyhands worker --join ADDRESS:PORT ...",
            )
        return members
