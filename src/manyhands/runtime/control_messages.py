"""The control messages between coordinator and workers: see `control` for who sends which when.

Tags and encoded field names are the wire format: they stay when a class or a field is renamed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.executor.log import DeviceLog
from manyhands.executor.projections import SumRecord
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.profile import DeviceProfile, Kernel
from manyhands.runtime.control_parts import Arrival, Checksum, DeviceJob, Facts, Seen, Shape, Standing, TensorEntry
from manyhands.runtime.identity import Identity
from manyhands.runtime.reachability import ProbeAnswer
from manyhands.transport.endpoint import Address


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: str
    protocol: int
    name: str
    host: str
    port: int
    facts: Facts
    identity: Identity = Identity()
    is_named: bool = True
    """Its name was given by hand; else it may be called otherwise."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    name: str
    heartbeat_timeout_seconds: float = msgspec.field(name="silence_seconds")
    """A side that sends nothing for so long has failed."""
    links: dict[str, Shape] = {}
    """Peers -> what is to pass for the link to them, where no network plays it."""
    up_bytes_per_second: float | None = None
    heartbeat_seconds: float = msgspec.field(default=0.5, name="beat_seconds")
    """How often a worker sends a heartbeat."""
    secret: str = ""
    """By which workers and coordinator make data connections."""
    coordinator: str = ""
    """What the coordinator's device is called."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Every version can read it: fields may come, with defaults, and none may go."""

    reason: str
    hint: str
    name: str = ""
    """Under this name it may join."""
    again_seconds: float = 0.0
    """After so long it may; 0: not known."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    generation: int
    job: DeviceJob | None
    """None: this worker only gives away what it has."""
    peers: dict[str, Address]
    gives: dict[str, tuple[str, ...]] = {}
    """Peer -> the tensors it is sent when the run starts."""
    since: int = 0
    """The generation its job began with: copies of what others came to are forgotten."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    generation: int


class Start(msgspec.Struct, frozen=True, tag="start"):
    generation: int
    first_step: int
    last_step: int
    snapshots: tuple[int, ...]
    """Steps after which this device keeps a copy of its state and offers it."""
    backup_every: int = 0
    """So many steps lie between two copies that are kept against losses; 0: none are."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A round is done."""

    generation: int
    step: int
    """Its last step."""
    seconds: float
    losses: tuple[float, ...] = ()
    """This device's part of each step's, where it computes one."""
    staleness: tuple[int, ...] = ()
    """Updates between the forward pass of each step and its own, where a stage runs ahead (order replay)."""
    arrivals: tuple[Arrival, ...] = ()
    sent: dict[str, int] = {}
    """Bytes sent to each device in this generation so far, without copies of state."""
    seen: Seen | None = None
    """Of a round that was looked at."""
    sums: tuple[SumRecord, ...] = ()
    """What the device saw of the sums of gradients of this round, to be compared with what the others saw."""
    not_finite_from: str = ""
    """The device that the first numbers of this round came from that were not finite: another, or this one itself."""


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """One step of a round with several is done here."""

    generation: int
    step: int


class EndAt(msgspec.Struct, frozen=True, tag="end-at"):
    """The generation ends before this step: no more is fed. The round under way is shorter."""

    generation: int
    step: int


class Reshape(msgspec.Struct, frozen=True, tag="reshape"):
    """From now on the links to these peers are imitated so."""

    links: dict[str, Shape]


class State(msgspec.Struct, frozen=True, tag="state"):
    generation: int
    step: int
    """Steps done when it was taken."""
    tensors: tuple[TensorEntry, ...] | None
    """None: the same as the last time. Empty: the device has no weights, so its state has no tensors."""
    scalars: dict[str, Any]
    checksums: tuple[Checksum, ...] = ()
    """Of each tensor when the copy was made."""
    has_changed: bool = False
    """The copy was offered before, and is another now."""


class SendState(msgspec.Struct, frozen=True, tag="send"):
    generation: int
    step: int
    to: str
    attempt: int = 0
    """How often it was sent before. It is then looked at first: see `State.has_changed`."""


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """A copy of another worker's state is about to come."""

    generation: int
    source: str
    step: int
    tensors: tuple[TensorEntry, ...]
    scalars: dict[str, Any]
    checksums: tuple[Checksum, ...] = ()
    attempt: int = 0


class Holds(msgspec.Struct, frozen=True, tag="holds"):
    generation: int
    source: str
    step: int
    attempt: int = 0


class Held(msgspec.Struct, frozen=True, tag="held"):
    """A copy has come. It is kept only if its checksums are those that were announced."""

    generation: int
    source: str
    step: int
    checksum: Checksum = 0
    """Of the checksums of what has come, see `checksums.combined`."""
    attempt: int = 0


class Retain(msgspec.Struct, frozen=True, tag="retain"):
    """Copies of other steps than these are no longer wanted."""

    first: int
    last: int
    is_between_kept: bool = True


class Survey(msgspec.Struct, frozen=True, tag="survey"):
    generation: int
    since: int
    """The generation its job began with."""


class Holding(msgspec.Struct, frozen=True, tag="holding"):
    """All that a worker has, by steps done."""

    generation: int
    steps: dict[int, tuple[TensorEntry, ...]]
    scalars: dict[int, dict[str, Any]]
    checksums: dict[int, dict[str, Checksum]] = {}
    """Of tensors that are copies, from when they were made."""


class Corrupt(msgspec.Struct, frozen=True, tag="corrupt"):
    """State that a worker was to start with is not what it was when it was kept; `source`: who has kept it."""

    generation: int
    source: str
    tensor: str


class AskIds(msgspec.Struct, frozen=True, tag="ask-ids"):
    generation: int


class Ids(msgspec.Struct, frozen=True, tag="ids"):
    """Digests of the ids of a worker's samples, in the order of its rows."""

    generation: int
    digests: bytes


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    pass


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    generation: int
    kind: str
    message: str
    hint: str
    step: int = -1


class Done(msgspec.Struct, frozen=True, tag="done"):
    generation: int
    log: DeviceLog


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    generation: int
    graph: dict[str, Any]
    network: Network
    ladder: tuple[int, ...]
    seconds: float
    kernels: dict[str, Kernel] | None
    """None: the fastest are to be found first."""
    optimizer: dict[str, Any] | None
    """Whose step is timed too."""
    training: bool = True
    """False: forward only, in evaluation mode."""


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    generation: int
    profile: DeviceProfile
    memory_bytes_per_second: float
    """As the optimiser's step finds it, or else a copy."""


class ProbeLinks(msgspec.Struct, frozen=True, tag="probe-links"):
    generation: int
    devices: tuple[str, ...]
    peers: dict[str, Address]
    sizes: dict[str, int] = {}
    """Of two devices, the bytes that each sends to the other, once and in turn; empty: everything is measured."""


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    generation: int
    delay_seconds: float
    bytes_per_second: float
    lost_seconds_per_byte: float
    links: dict[str, Link] = {}
    """To each of the others, measured by itself."""


class AskClock(msgspec.Struct, frozen=True, tag="ask-clock"):
    ticket: int


class Clock(msgspec.Struct, frozen=True, tag="clock"):
    ticket: int
    seconds: float
    """Of a clock that only goes forward, from nobody knows when."""
    wall_seconds: float = 0.0
    """Since 1970, as the machine has it; 0: not said."""


class ProbePeers(msgspec.Struct, frozen=True, tag="knock"):
    """Connect to each of these once and say whether a member answers there: see `member_probes`."""

    generation: int
    peers: dict[str, Address]
    limit_seconds: float


class PeersProbed(msgspec.Struct, frozen=True, tag="knocked"):
    generation: int
    answers: dict[str, ProbeAnswer]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    generation: int
    diagnose_step: int = -1
    """Say first in which layer of this stage the numbers of that step stopped being numbers."""
    with_log: bool = False
    """Say first what was done: a stream has no last step."""


class Diagnosis(msgspec.Struct, frozen=True, tag="diagnosis"):
    generation: int
    layer: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    pass


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """The run goes on without this worker."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """The sender is alive. A worker adds what has come meanwhile, and where it stands in a run."""

    arrivals: tuple[Arrival, ...] = ()
    standing: Standing | None = None
