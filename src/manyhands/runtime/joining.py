"""The settings with which a worker joins, and the facts that it reports of its machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from manyhands.data.silo import Silo
from manyhands.executor.gpu_peers import gpu_key
from manyhands.executor.process_groups import available_backends
from manyhands.facts.errors import BadValue
from manyhands.graph import accelerators
from manyhands.profiler.this_machine import identify
from manyhands.runtime import state
from manyhands.runtime.addresses import Advertised
from manyhands.runtime.confinement import Confinement
from manyhands.runtime.control_parts import Facts, SiloFacts
from manyhands.runtime.device_book import worker_credentials
from manyhands.runtime.identity import interface_address
from manyhands.transport.keys import Credentials
from manyhands.transport.security import is_loopback
from manyhands.transport.transport import ControlConnection, Transport, reach_either


@dataclass
class Joining:
    """The address, name and credentials with which a worker joins, and its settings."""

    host: str
    port: int
    token: str = field(repr=False)
    name: str = ""
    compute: str = "cpu"
    threads: int = 0
    limit_seconds: float = 60.0
    encrypted: bool | None = None
    """Whether connections are encrypted; None: unless the coordinator is on this very machine."""
    timeout_factor: float = 1.0
    """The factor by which every wait is longer than usual."""
    parent: int = 0
    """The process whose end ends this one too; 0: none."""
    slowdown: float = 1.0
    """The factor by which all computation is slowed down."""
    silo: str = ""
    """The file with samples that only this worker has; empty: none."""
    is_named: bool = True
    """Whether the name, if any, was given by hand: then the coordinator does not choose another."""
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    """An id that distinguishes this worker from others of its name; it stays the same when the worker reconnects."""
    confinement: Confinement | None = None
    """The confinement of this process; None: the worker is not a process of its own."""
    data_port: int = 0
    """The port at which other devices connect to this one; 0: any that is free."""
    advertised: Advertised | None = None
    """Where other devices reach this one; None: at the address from which it reaches the coordinator."""
    grace_seconds: float = 0.0
    """Seconds to hand over what it holds when it is asked to leave; 0: as long as that takes."""
    interface: str = ""
    """The interface on whose address the worker listens for other workers; empty: the one that leads to the
    coordinator."""
    is_relay: bool = False
    """Whether it offers to relay the connections of others, before the coordinator does."""
    credentials: Callable[[], Credentials | None] = worker_credentials
    """Returns this device's key and the devices it knows; called for connections beyond loopback."""


def reach(joining: Joining, name: str, transport: Transport) -> ControlConnection:
    """Return a connection to the coordinator, which may not have started yet."""
    return reach_either(
        transport, name, (joining.host, joining.port), joining.token, joining.limit_seconds,
        encrypted=joining.encrypted, timeout_factor=joining.timeout_factor, credentials=joining.credentials,
    )  # fmt: skip


def listening_host(joining: Joining, reached: ControlConnection) -> str:
    """Return the address at which a worker listens for other devices: that of the interface named, where one is.

    BadValue where that would carry plain data beyond this machine: a coordinator on loopback does not encrypt.
    """
    local_host = reached.channel.local_host
    host, advertised = local_host, joining.advertised
    if advertised is not None:
        host = advertised.listening_host(local_host)
        _check_encrypted(reached, "--advertise", advertised.host, advertised.host)
    if joining.interface:
        host = interface_address(joining.interface, local_host)
        _check_encrypted(reached, "--interface", joining.interface, host)
    return host


def _check_encrypted(reached: ControlConnection, option: str, value: str, host: str) -> None:
    if not reached.security.encrypted and not is_loopback(host):
        raise BadValue(
            f"{option} {value}: the coordinator is for this machine only, where nothing is encrypted.",
            hint=f"Start it for others too: --listen 0.0.0.0:7077. Or leave out {option}.",
        )


def facts_of(joining: Joining, silo: Silo | None) -> Facts:
    """Return the facts that a worker reports of its machine."""
    machine = identify()
    return Facts(
        machine=machine.text, cores=machine.cores, threads=torch.get_num_threads(), torch=str(torch.__version__),
        memory_bytes=_memory_bytes(joining.compute), compute=joining.compute, pid=os.getpid(),
        slowdown=joining.slowdown, silo=_silo_facts(silo), confinement=joining.confinement,
        backends=available_backends(), is_relay=joining.is_relay, gpu=gpu_key(joining.compute),
    )  # fmt: skip


def _silo_facts(silo: Silo | None) -> SiloFacts | None:
    if silo is None:
        return None
    listed = state.entries(silo.arrays)
    return SiloFacts(len(silo), tuple(msgspec.structs.replace(entry, shape=entry.shape[1:]) for entry in listed))


def _memory_bytes(compute: str) -> int:
    import psutil

    return accelerators.memory_bytes(torch.device(compute)) or int(psutil.virtual_memory().total)
