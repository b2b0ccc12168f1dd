"""Decides which workers may join and under which name, and builds the answers that they get."""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.version import __version__
from manyhands.runtime.control import PROTOCOL
from manyhands.runtime.control_messages import Hello, Refusal, Welcome
from manyhands.runtime.control_parts import Shape
from manyhands.runtime.inviting import Invitation
from manyhands.runtime.member import Member
from manyhands.transport.keys import KeyBook, Role, fingerprint
from manyhands.transport.transport import ControlChannel


def judged(
    hello: Hello,
    channel: ControlChannel,
    invitation: Invitation | None,
    members: Mapping[str, Member],
    allowed_names: Collection[str] | None,
    max_devices: int | None,
    book: KeyBook | None = None,
) -> Member | Refusal:
    """Return a worker that has sent its hello as a member, or the refusal that it gets.

    `allowed_names`: the names that may join, None: any. `max_devices`: how many workers may be members at a time.
    `book`: the keys that names belong to.
    """
    if hello.protocol != PROTOCOL or hello.version != __version__:
        return other_version(f"{hello.name:.64}", hello.version, hello.protocol)
    may_choose = allowed_names is None and invitation is None

    def is_anothers(name: str) -> bool:
        return book is not None and book.is_taken(pinned_name(name, invitation), channel.peer_key)

    if (name := name_for(hello, members, is_anothers) if may_choose else hello.name) != hello.name:
        if hello.name in members:
            return namesake(hello, members[hello.name], name)
        return Refusal(f"The name {hello.name:.64} belongs to another device's key.", "", name)
    if is_anothers(hello.name):
        return keys_name(pinned_name(hello.name, invitation), channel.peer_key)
    namesake_member = members.get(hello.name)
    if namesake_member is not None and not namesake_member.is_lost:
        taken_names = {member.name for member in members.values() if not member.is_lost}
        return namesake(hello, namesake_member, free=sorted(set(allowed_names or ()) - taken_names))
    if allowed_names is not None and hello.name not in allowed_names and invitation is None:
        names = ", ".join(sorted(allowed_names))
        return Refusal(
            f"This run has no device called {hello.name:.64}; it has {names:.400}.",
            "Join under one of these: manyhands worker --name NAME ...",
        )
    if hello.name == COORDINATOR:
        return Refusal(
            f"No worker may be called {COORDINATOR}.", "Give it another name: manyhands worker --name NAME ..."
        )
    alive_count = sum(not member.is_lost for member in members.values())
    if max_devices is not None and alive_count >= max_devices:
        return Refusal(
            f"{hello.name:.64} comes too late: {alive_count} workers have joined, and no more than {max_devices} may.",
            "Join when one has left, or start the job with more: --devices.",
        )
    try:
        device = device_of(hello)
    except BadValue as error:
        return Refusal(error.message, error.hint)
    if invitation is not None:  # the address that was dialled can be dialled again, whatever the worker calls its own
        address = channel.peer_host, invitation.port
    else:
        address = hello.host, hello.port
    return Member(hello.name, channel, address, device, hello.facts, hello.identity, invitation=invitation)


def other_version(worker: str, version: str, protocol: int) -> Refusal:
    """Return the refusal for a worker of another version; with the same version, it speaks another protocol."""
    if version != __version__:
        theirs, ours = f"manyhands {version:.20}", __version__
    else:
        theirs, ours = f"manyhands {version:.20} with protocol {protocol}", f"{__version__} with {PROTOCOL}"
    return Refusal(
        f"{worker} runs {theirs}; the coordinator runs {ours}.", f"On that device: pip install manyhands=={__version__}"
    )


def is_back(hello: Hello, member: Member) -> bool:
    """Return whether the sender of a hello is the same process as this member: its connection broke and it is back."""
    return bool(hello.identity.process) and hello.identity.process == member.identity.process


def keys_name(name: str, public: bytes) -> Refusal:
    """Return the refusal for a worker whose name belongs to another key: a device has joined under it before."""
    shown = f"the key {fingerprint(public)}" if public else "no key"
    return Refusal(
        f"A device called {name:.64} has joined before with another key; this one shows {shown}.",
        f"If it was set up anew, at the coordinator: manyhands devices forget {name:.64}. Then join with the token. If "
        "these are two devices: manyhands worker --name NAME",
    )


def pinned_name(name: str, invitation: Invitation | None) -> str:
    """Return the name under which a worker's key is remembered.

    Workers that listen are all called `server` unless they are named: the address at which they were dialled
    distinguishes them, as with ssh.
    """
    return name if invitation is None else f"{name}@{invitation.host}:{invitation.port}"


def pinned(book: KeyBook, public: bytes, name: str) -> bool:
    """Remember this worker by its key, and return whether the key is new.

    Where the key cannot be kept, the token will be needed again.
    """
    try:
        return book.join(public, name, Role.WORKER)
    except (BadFile, BadValue):
        return False


def name_for(
    hello: Hello, members: Mapping[str, Member], is_anothers: Callable[[str], bool] = lambda name: False
) -> str:
    """Return the name that a worker gets here.

    A name given by hand stays. A host name gets a number if another machine uses it, or used it and may come back.
    A worker that has been here before keeps the name it had.
    """
    if hello.is_named:
        return hello.name
    process, machine = hello.identity.process, hello.identity.machine
    before = [member.name for member in members.values() if process and member.identity.process == process]
    if before and hello.name not in before and members[before[-1]].is_lost:
        return before[-1]

    def is_free(name: str) -> bool:
        member = members.get(name)
        is_away = member is None or (member.is_lost and member.identity.machine in ("", machine))
        return is_away and not is_anothers(name)

    numbered = (f"{hello.name:.60}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([hello.name], numbered) if is_free(name))


def namesake(hello: Hello, member: Member, name: str = "", free: Sequence[str] = ()) -> Refusal:
    """Return the refusal for a worker whose name another worker has, with the fix.

    `name`: the name under which it may join instead, empty: none. `free`: names that this run still waits for.
    """
    history = "has joined already" if not member.is_lost else "was here before"
    reason = f"A worker called {hello.name:.64} {history}, from {member.channel.peer_host}"
    identity, member_identity = hello.identity, member.identity
    if identity.machine and identity.machine == member_identity.machine:
        why, fix = ", the same machine.", "Give each worker of a machine a name: manyhands worker --name NAME"
    elif identity.system and identity.system == member_identity.system:
        why = ", another machine with the same system: its SD card or disk is a copy."
        fix = (
            "On one of the two, for good: sudo hostnamectl set-hostname NAME; sudo rm -f /etc/machine-id "
            "/var/lib/dbus/machine-id; sudo systemd-machine-id-setup; sudo reboot. Or: manyhands worker --name NAME"
        )
    else:
        why = "."
        fix = "Give one of the two another: sudo hostnamectl set-hostname NAME, or manyhands worker --name NAME"
    if free:
        fix = f"Join under a name that is still free ({', '.join(free):.400}): manyhands worker --name NAME\n{fix}"
    return Refusal(reason + why, fix, name)


def welcomed(
    name: str, heartbeat_timeout_seconds: float, heartbeat_seconds: float, shaping: Cluster | None, secret: str = ""
) -> Welcome:
    """Return the welcome for a worker that may join.

    `shaping`: the cluster whose links it is to imitate. `secret`: the key of data connections.
    """
    coordinator = _printable(socket.gethostname())
    if shaping is None:
        return Welcome(
            name, heartbeat_timeout_seconds, heartbeat_seconds=heartbeat_seconds, secret=secret, coordinator=coordinator
        )
    device = shaping.device(name)
    # each slot is a process and gets an equal part of the port's rate
    slots = sum(peer.host_name == device.host_name for peer in shaping.devices)
    links = {}
    for other in shaping.devices:
        if other.host_name != device.host_name:
            link = shaping.link_between(name, other.name)
            rate = shaping.bytes_per_second_between(name, other.name) / slots
            links[other.name] = Shape(rate if math.isfinite(rate) else None, link.delay_seconds)
    up = device.up_bytes_per_second / slots
    rate_up = up if math.isfinite(up) else None
    return Welcome(name, heartbeat_timeout_seconds, links, rate_up, heartbeat_seconds, secret, coordinator)


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in name)[:64] or "coordinator"


def device_of(hello: Hello) -> Device:
    """Return a worker as a device of a cluster. BadValue where its facts describe none."""
    facts = hello.facts
    return Device(
        name=hello.name, kind="local", gflops=10.0, memory_bytes=facts.memory_bytes, cores=facts.cores,
        compute=facts.compute, source="Said by the worker itself.",
    )  # fmt: skip
