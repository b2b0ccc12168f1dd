"""Records that control messages are made of: fixed fields, as JSON. Their encoded names are part of the protocol."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.runtime.confinement import Confinement
from manyhands.schedule.glimpse import Glimpse

Checksum = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor inside a message of several."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SiloFacts(msgspec.Struct, frozen=True):
    """What a worker reports of its own data."""

    samples: int
    arrays: tuple[TensorEntry, ...]
    """The shape is that of one sample."""


class Facts(msgspec.Struct, frozen=True):
    """What a worker reports of its machine."""

    machine: str
    cores: int
    threads: int
    memory_bytes: int
    torch: str
    compute: str = "cpu"
    pid: int = 0
    slowdown: float = 1.0
    """How many times slower than its machine it computes."""
    silo: SiloFacts | None = None
    confinement: Confinement | None = None
    """How its process is confined; None: it does not report it."""


class DeviceJob(msgspec.Struct, frozen=True):
    """Everything a device needs to take its part in a run; its weights follow as data."""

    graph: dict[str, Any] | None
    """None: the one it was given before, of this digest."""
    network: Network | None
    digest: str
    plan: Plan
    optimizer: dict[str, Any] | None
    seed: int
    kernels: dict[str, Kernel]
    stored: dict[str, Kernel]
    """Kernels by which weights are laid out in memory: alike on all devices that add up gradients."""
    state: tuple[TensorEntry, ...]
    """What the device starts with."""
    sources: dict[str, tuple[str, ...]]
    """Who sends it which tensors; under its own name those it has."""
    checksums: dict[str, dict[str, Checksum]]
    """Who sends it -> tensor -> checksum, where it is known."""
    scalars: dict[str, Any]
    steps_done: int
    with_targets: bool
    trace_first: int
    trace_last: int
    memory_step: int
    wait_limit_seconds: float
    watch_every: int = 0
    """One round in so many is looked at while the run goes on; 0: none."""
    held: tuple[str, ...] = ()
    """Inputs and targets that the device has, in its silo or preloaded there: it is sent the numbers of its rows."""
    preload_samples: int = msgspec.field(default=0, name="laid")
    """Samples that are preloaded at the device before the first step; 0: what it has is in its silo."""
    resident_dataset: str = msgspec.field(default="", name="shelf")
    """What that is, in a word; it comes with the weights, unless the device has it from before."""
    is_preloaded: bool = msgspec.field(default=False, name="is_laid")


class Shape(msgspec.Struct, frozen=True):
    """A link to be imitated by the sender. None: no limit."""

    bytes_per_second: float | None
    delay_seconds: float


class Arrival(msgspec.Struct, frozen=True):
    """A message that came from another device: how long its bytes took, and how long ago the last one came."""

    source: str
    bytes: int
    seconds: float
    ago: float


class Seen(msgspec.Struct, frozen=True):
    """What a device did in a round, for those who look on, and what it holds."""

    spans: tuple[Glimpse, ...]
    """By the device's clock."""
    resident_bytes: int
    peak_bytes: int


class Standing(msgspec.Struct, frozen=True):
    """How far a worker is in its generation, and for whom it waits. A heartbeat says that a process runs; this says
    whether it gets anywhere."""

    generation: int
    step: int
    """The round that it works on."""
    moved: int
    """Rises with each action that is done and each part of a message that arrives."""
    is_busy: bool
    """It computes; else it waits for messages."""
    waits_for: tuple[str, ...] = ()
    """The devices whose messages or connections it waits for."""
    is_connecting: bool = False
    silent: dict[str, float] = {}
    """Connected peer -> seconds without a byte from it, heartbeats of the connection included."""
    refused: dict[str, int] = {}
    """Peer -> messages from it that do not follow the plan."""
