"""Those who have joined, and who may."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from manyhands.engine.transport import ControlChannel
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.cluster import Cluster, Device
from manyhands.facts.errors import BadValue
from manyhands.facts.version import __version__
from manyhands.runtime.control import PROTOCOL, Facts, Hello, Refusal, Said, Shape, Welcome
from manyhands.runtime.inviting import Invitation


@dataclass(eq=False)
class Member:
    """A worker that has joined."""

    name: str
    channel: ControlChannel
    address: tuple[str, int]
    device: Device
    facts: Facts
    clock_offset_seconds: float = 0.0
    """Add to the worker's clock to get this process'."""
    is_lost: bool = False
    reason: str = ""
    """Why it is lost."""
    is_leaving: bool = False
    """It was asked to go, and waits until others have what it has."""
    graph_digest: str = ""
    """Of the graph that it was given last."""
    invitation: Invitation | None = None
    """Of one that was dialled; None: it came by itself."""

    @property
    def is_invited(self) -> bool:
        return self.invitation is not None


@dataclass(frozen=True)
class Lost:
    """A worker is gone: its control connection broke, or it has been silent too long."""

    member: Member
    """Another of the same name may have joined since."""

    @property
    def reason(self) -> str:
        return self.member.reason


@dataclass(frozen=True)
class Joined:
    """A worker has come, or has come back."""

    member: Member


Event = tuple[str, Said | Lost | Joined]
"""Which worker, and what it said or what became of it."""


def judged(
    hello: Hello,
    channel: ControlChannel,
    invitation: Invitation | None,
    members: Mapping[str, Member],
    wanted: Collection[str] | None,
    most: int | None,
) -> Member | Refusal:
    """Whether a worker that has said who it is may join; `wanted`: under one of these names; `most`: so many may."""
    if hello.protocol != PROTOCOL or hello.version != __version__:
        return Refusal(
            f"{hello.name:.64} runs manyhands {hello.version:.20}; the coordinator runs {__version__}.",
            f"On that device: pip install manyhands=={__version__}",
        )
    known = members.get(hello.name)
    if known is not None and not known.is_lost:
        return Refusal(
            f"A worker called {hello.name:.64} has joined already, from {known.channel.peer_host}.",
            "Give each its own: manyhands worker --name NAME ...",
        )
    if wanted is not None and hello.name not in wanted and invitation is None:
        names = ", ".join(sorted(wanted))
        return Refusal(
            f"This run has no device called {hello.name:.64}; it has {names:.400}.",
            "Join under one of these: manyhands worker --name NAME ...",
        )
    if hello.name == COORDINATOR:
        return Refusal(f"No worker may be called {COORDINATOR}.", "Give it another: manyhands worker --name NAME ...")
    here = sum(not member.is_lost for member in members.values())
    if most is not None and here >= most:
        return Refusal(
            f"{hello.name:.64} comes too late: {here} workers have joined, and no more than {most} may.",
            "Join when one has left, or start the job with more: --devices.",
        )
    try:
        device = device_of(hello)
    except BadValue as error:
        return Refusal(error.message, error.hint)
    if invitation is not None:  # what was dialled can be dialled again, whatever it is called at its own end
        address = channel.peer_host, invitation.port
    else:
        address = hello.host, hello.port
    return Member(hello.name, channel, address, device, hello.facts, invitation=invitation)


def welcomed(name: str, silence_seconds: float, beat_seconds: float, shaping: Cluster | None) -> Welcome:
    """What a worker is told that may join; `shaping`: links it is to imitate."""
    if shaping is None:
        return Welcome(name, silence_seconds, beat_seconds=beat_seconds)
    own = shaping.device(name)
    slots = sum(one.host_name == own.host_name for one in shaping.devices)  # each a process: a part of the port
    links = {}
    for other in shaping.devices:
        if other.host_name != own.host_name:
            link = shaping.link_between(name, other.name)
            rate = shaping.bytes_per_second_between(name, other.name) / slots
            links[other.name] = Shape(rate if math.isfinite(rate) else None, link.delay_seconds)
    up = own.up_bytes_per_second / slots
    return Welcome(name, silence_seconds, links, up if math.isfinite(up) else None, beat_seconds)


def device_of(hello: Hello) -> Device:
    """A worker as a device of a cluster; what cannot be one is refused."""
    facts = hello.facts
    return Device(
        name=hello.name, kind="local", gflops=10.0, memory_bytes=facts.memory_bytes, cores=facts.cores,
        compute=facts.compute, source="Said by the worker itself.",
    )  # fmt: skip
