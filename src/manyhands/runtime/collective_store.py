"""The coordinator's side of process groups: whether a run may use them, and the store by which devices find each other.

A store serves one generation, at an address of this machine that the system chooses, so no port can be in use. It holds
nothing but addresses. What devices then send each other through PyTorch's process groups is neither encrypted nor
authenticated: beyond loopback it is refused unless the network is trusted.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from manyhands.facts.collective_terms import CollectiveTerms
from manyhands.facts.collectives import GLOO, NCCL, TORCH
from manyhands.facts.errors import AddressTaken, BadValue, ManyhandsError, NotInstalled, Refused
from manyhands.runtime.member import Member
from manyhands.runtime.order import Order
from manyhands.schedule.actions import Reduce
from manyhands.schedule.policy import Schedule
from manyhands.transport.security import is_loopback

if TYPE_CHECKING:
    from manyhands.runtime.run import Run

STORE_SECONDS = 60.0
"""The longest that a device may wait for what another puts into the store."""


def needs_groups(order: Order, schedule: Schedule) -> bool:
    """Return whether a generation is to form process groups: it has sums, and the order wants them formed so."""
    return order.uses_groups and any(
        isinstance(action, Reduce) for device in schedule.plan.devices for action in schedule.every_action(device)
    )


def obstacle(members: Mapping[str, Member], *, trusts_network: bool) -> ManyhandsError | None:
    """Return why these devices cannot form process groups together; None where they can."""
    beyond = [f"{name} at {member.address[0]}" for name, member in members.items() if not _is_here(member)]
    if beyond and not trusts_network:
        return BadValue(
            f"Process groups of PyTorch are not encrypted, and {beyond[0]} is beyond this machine.",
            hint="Add --trusted-network where nobody else can listen, or leave out --collectives.",
        )
    if invited := [name for name, member in members.items() if member.is_invited]:
        return BadValue(
            f"Process groups of PyTorch need devices that connect to this machine; {invited[0]} was connected to.",
            hint="Leave out --collectives.",
        )
    versions = {name: member.facts.torch.partition("+")[0] for name, member in members.items()}
    if len(set(versions.values())) > 1:
        (first, one_version), *_ = versions.items()
        other = next(name for name in versions if versions[name] != one_version)
        return Refused(
            f"Process groups need the same PyTorch everywhere: {first} has {one_version}, {other} {versions[other]}.",
            hint="Install the same version on both, or leave out --collectives.",
        )
    for name, member in members.items():
        if GLOO not in member.facts.backends:
            return NotInstalled(
                f"The PyTorch of {name}, {member.facts.torch}, has no gloo.",
                hint="Install a build of PyTorch that has it, or leave out --collectives.",
            )
    return None


def store_of(run: Run) -> CollectiveStore | None:
    """Return the store of a run whose devices are to form process groups; None where messages carry all sums.

    Groups that were asked for and cannot be formed are refused before anything has begun. Where the devices change
    later, the job goes on with messages, and the record says why.
    """
    order, members = run.order, {name: run.members[name] for name in run.names}
    if not needs_groups(order, run.handout.schedule):
        return None
    error = obstacle(members, trusts_network=order.trusts_network)
    if error is None:
        try:
            return CollectiveStore(order, members, run.coordinator.address[0])
        except AddressTaken as taken:
            error = taken
    if order.collectives == TORCH and run.usual.prepare_seconds is None:
        raise error
    run.hooks.log_event("note", text=f"Built-in messages carry all sums from step {run.first} on: {error.message}")
    return None


class CollectiveStore:
    """A store of one generation, as long as its run lasts."""

    def __init__(self, order: Order, members: Mapping[str, Member], host: str) -> None:
        """Listen at `host`: an address of this machine, or where all are on this machine, its loopback address."""
        self._order, self._members = order, members
        is_local = all(_is_here(member) for member in members.values())
        self._store, self._port = store_at("127.0.0.1" if is_local else host)

    @property
    def terms(self) -> CollectiveTerms:
        """The terms by which the devices form their groups."""
        order = self._order
        return CollectiveTerms(
            order.collectives, self._port, order.trusts_network, tuple(_with_a_gpu_each(self._members))
        )


def _is_here(member: Member) -> bool:
    return is_loopback(member.address[0])


def _with_a_gpu_each(members: Mapping[str, Member]) -> list[str]:
    """Return the devices that have NCCL and a GPU that no other device uses: NCCL refuses two on one."""
    gpus = {
        name: (member.identity.machine, member.facts.compute.partition(":")[2] or "0")
        for name, member in members.items()
        if member.facts.compute.startswith("cuda")
    }
    used = list(gpus.values())
    return [name for name, gpu in gpus.items() if NCCL in members[name].facts.backends and used.count(gpu) == 1]


def store_at(host: str) -> tuple[Any, int]:
    """Return a store that listens at this address alone, and its port: PyTorch by itself would listen at every one."""
    from torch import distributed

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise AddressTaken(
            f"The store of the process groups cannot listen at {host}: {error}.", hint="Leave out --collectives."
        ) from error
    port: int = listener.getsockname()[1]
    library: Any = distributed
    store = library.TCPStore(
        host, port, None, True, timedelta(seconds=STORE_SECONDS), wait_for_workers=False,
        master_listen_fd=listener.detach(), use_libuv=False,
    )  # fmt: skip
    return store, port
