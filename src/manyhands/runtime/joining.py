"""Where and as whom a worker joins, and what it says of its machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from manyhands.data.silo import Silo
from manyhands.facts.errors import Refused
from manyhands.profiler.this_machine import identify
from manyhands.runtime import state
from manyhands.runtime.confinement import Confinement
from manyhands.runtime.control_parts import Facts, SiloFacts
from manyhands.runtime.device_book import worker_credentials
from manyhands.transport.keys import Credentials
from manyhands.transport.transport import ControlConnection, Transport, reach_either


@dataclass
class Joining:
    """Where and as whom a worker joins."""

    host: str
    port: int
    token: str = field(repr=False)
    name: str = ""
    compute: str = "cpu"
    threads: int = 0
    limit_seconds: float = 60.0
    encrypted: bool | None = None
    """None: unless the coordinator is on this very machine."""
    timeout_factor: float = 1.0
    """How many times longer than usual to wait for anybody."""
    parent: int = 0
    """A process without which this one ends too; 0: none."""
    slowdown: float = 1.0
    """How many times longer than it takes here everything that is computed is made to take."""
    silo: str = ""
    """A file of samples that only this worker has."""
    is_named: bool = True
    """The name, if any, was given by hand: the coordinator does not choose another."""
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells this worker from others of its name; the same when it comes back."""
    confinement: Confinement | None = None
    """How this process is confined; None: it is not a process of its own."""
    credentials: Callable[[], Credentials | None] = worker_credentials
    """This device's key and whom it knows; asked for beyond loopback."""


def reach(joining: Joining, name: str, transport: Transport) -> ControlConnection:
    """The coordinator, which may not be there yet."""
    return reach_either(
        transport, name, (joining.host, joining.port), joining.token, joining.limit_seconds,
        encrypted=joining.encrypted, patience=joining.timeout_factor, credentials=joining.credentials,
    )  # fmt: skip


def prepare_gpu(compute: str) -> None:
    """Refuse one that is not there; compute as the others do: the same bits every time, no numbers cut short."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(compute.partition(":")[2] or 0) >= count:
        raise Refused(f"--compute {compute} was asked for; torch sees {count} GPU(s) here.", hint="Use --compute cpu.")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def facts_of(joining: Joining, silo: Silo | None) -> Facts:
    """What a worker says of itself."""
    machine = identify()
    return Facts(
        machine=machine.text, cores=machine.cores, threads=torch.get_num_threads(), torch=str(torch.__version__),
        memory_bytes=_memory_bytes(joining.compute), compute=joining.compute, pid=os.getpid(),
        slowdown=joining.slowdown, silo=_silo_facts(silo), confinement=joining.confinement,
    )  # fmt: skip


def _silo_facts(silo: Silo | None) -> SiloFacts | None:
    if silo is None:
        return None
    listed = state.entries(silo.arrays)
    return SiloFacts(len(silo), tuple(msgspec.structs.replace(entry, shape=entry.shape[1:]) for entry in listed))


def _memory_bytes(compute: str) -> int:
    import psutil

    if compute.startswith("cuda"):
        return int(torch.cuda.get_device_properties(torch.device(compute)).total_memory)
    return int(psutil.virtual_memory().total)
