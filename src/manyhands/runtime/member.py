"""The record of a worker that has joined, and the events that a coordinator reports about it."""

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
    """Seconds to add to the worker's clock to get this process' clock."""
    wall_offset_seconds: float | None = None
    """Seconds to add to the worker's time of day to get this process'; None: not known."""
    is_lost: bool = False
    reason: str = ""
    """The reason why it is lost."""
    has_left: bool = False
    """It is lost because it left, and had announced it: this is no failure."""
    is_leaving: bool = False
    """It has announced that it will leave: as soon as others have the state that it holds, where they need it."""
    is_dismissed: bool = False
    """It was allowed to leave: nothing that it holds is needed."""
    is_evicted: bool = False
    """It is lost because the run evicted it: see `Coordinator.evict`."""
    standing: Standing | None = None
    """The worker's place in a run, as it last reported it."""
    is_at_work: bool = False
    """Whether that is still its place: its last heartbeat reported one."""
    moved_at: float = 0.0
    """When it last made progress, by this process' monotonic clock."""
    graph_digest: str = ""
    """Digest of the graph that it was sent last."""
    resident_dataset: str = ""
    """Key of the samples that were preloaded on it last: see `Feeder.resident_key`."""
    invitation: Invitation | None = None
    """The invitation, where the coordinator dialled it; None: it came by itself."""

    @property
    def is_invited(self) -> bool:
        return self.invitation is not None

    def stands(self, standing: Standing | None, now: float) -> None:
        """Record its place in a run; None: it takes part in none at the moment."""
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
    """The event that a worker is gone: its control connection broke, or its heartbeats stopped."""

    member: Member
    """The worker that is gone; another of the same name may have joined since."""

    @property
    def reason(self) -> str:
        return self.member.reason


@dataclass(frozen=True)
class MemberJoined:
    """The event that a worker has joined, or has come back."""

    member: Member


Event = tuple[str, Message | Lost | MemberJoined]
"""A worker's name, and its message or what became of it."""
