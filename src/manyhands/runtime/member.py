"""One worker that has joined, and the events that a coordinator reports of it."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.facts.device import Device
from manyhands.runtime.control import Message
from manyhands.runtime.control_parts import Facts, Standing
from manyhands.runtime.identity import Identity
from manyhands.runtime.inviting import Invitation
from manyhands.transport.transport import ControlChannel


@dataclass(eq=False)
class Member:
    """A worker that has joined."""

    name: str
    channel: ControlChannel
    address: tuple[str, int]
    device: Device
    facts: Facts
    identity: Identity
    clock_offset_seconds: float = 0.0
    """Add to the worker's clock to get this process'."""
    wall_offset_seconds: float | None = None
    """The same of the time of day; None: not known."""
    is_lost: bool = False
    reason: str = ""
    """Why it is lost."""
    has_left: bool = False
    """It is lost because it went, and had reported it: no failure."""
    is_leaving: bool = False
    """It has reported that it goes: as soon as others have what it has, where they need it."""
    is_dismissed: bool = False
    """It was told that it may go: nothing that it has is needed."""
    is_evicted: bool = False
    """It is lost because the run put it out: see `Coordinator.evict`."""
    standing: Standing | None = None
    """Where it last reported that it stands in a run."""
    is_at_work: bool = False
    """It stands there still."""
    moved_at: float = 0.0
    """When it last got any further, by this process' monotonic clock."""
    graph_digest: str = ""
    """Of the graph that it was given last."""
    resident_dataset: str = ""
    """The samples that were preloaded at it last: see `Feeder.resident_key`."""
    invitation: Invitation | None = None
    """Of one that was dialled; None: it came by itself."""

    @property
    def is_invited(self) -> bool:
        return self.invitation is not None

    def stands(self, standing: Standing | None, now: float) -> None:
        """Take where it stands in a run; None: it takes part in none at the moment."""
        before, was_at_work = self.standing, self.is_at_work
        self.is_at_work = standing is not None
        if standing is None:
            return
        if (
            before is None
            or not was_at_work
            or (before.generation, before.moved) != (standing.generation, standing.moved)
        ):
            self.moved_at = now
        self.standing = standing


@dataclass(frozen=True)
class Lost:
    """A worker is gone: its control connection broke, or its heartbeats stopped."""

    member: Member
    """Another of the same name may have joined since."""

    @property
    def reason(self) -> str:
        return self.member.reason


@dataclass(frozen=True)
class MemberJoined:
    """A worker has come, or has come back."""

    member: Member


Event = tuple[str, Message | Lost | MemberJoined]
"""Which worker, and what it said or what became of it."""
