"""The control messages between coordinator and workers: see `control` for which side sends which when.

Tags and encoded field names are the wire format: they stay when a class or a field is renamed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.executor.log import DeviceLog
from manyhands.executor.projections import SumRecord
from manyhands.facts.gpu_math import GpuMath
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
    """Whether its name was given by hand; if not, the coordinator may give it another."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    name: str
    heartbeat_timeout_seconds: float = msgspec.field(name="silence_seconds")
    """A side that sends nothing for this long has failed."""
    links: dict[str, Shape] = {}
    """Peer -> the link to it that the worker is to imitate, where no network emulates it."""
    up_bytes_per_second: float | None = None
    heartbeat_seconds: float = msgspec.field(default=0.5, name="beat_seconds")
    """How often a worker sends a heartbeat."""
    secret: str = ""
    """The key of data connections among workers and coordinator."""
    coordinator: str = ""
    """The host name of the coordinator's device."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """A refusal by the coordinator, or by a worker that listens. Every version can read it: fields may be added, with
    defaults, but none removed."""

    reason: str
    hint: str
    name: str = ""
    """The name under which the worker may join."""
    again_seconds: float = 0.0
    """Seconds after which it may join; 0: not known."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    generation: int
    job: DeviceJob | None
    """None: this worker only sends the state it has."""
    peers: dict[str, Address]
    gives: dict[str, tuple[str, ...]] = {}
    """Peer -> the tensors that this worker sends it when the run starts."""
    since: int = 0
    """The generation with which the job began: copies of earlier jobs are forgotten."""
    is_aside: bool = False
    """Whether this is a measurement: the worker keeps the state of the job that is under way, and none of this."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    generation: int


class Start(msgspec.Struct, frozen=True, tag="start"):
    generation: int
    first_step: int
    last_step: int
    snapshots: tuple[int, ...]
    """Steps after which this device keeps a copy of its state and offers it."""
    backup_every: int = 0
    """Steps between two copies that are kept against losses; 0: none are kept."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A worker has completed a round."""

    generation: int
    step: int
    """Its last step."""
    seconds: float
    losses: tuple[float, ...] = ()
    """This device's part of each step's loss, where it computes one."""
    staleness: tuple[int, ...] = ()
    """Updates between each step's forward pass and its own update, where a stage runs ahead (order replay)."""
    arrivals: tuple[Arrival, ...] = ()
    sent: dict[str, int] = {}
    """Bytes sent to each device in this generation so far, without copies of state."""
    seen: Seen | None = None
    """What the device did in the round, where the round is watched."""
    sums: tuple[SumRecord, ...] = ()
    """The device's records of the sums of gradients of this round, to be compared with those of the others."""
    grad_norms: tuple[float | None, ...] = ()
    """The norm of all gradients of each update, where the plan's devices exchange it; None: it is not finite."""
    not_finite_from: str = ""
    """The device that this round's first numbers which were not finite came from: another, or this one itself."""


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A worker has completed one step of a round with several."""

    generation: int
    step: int


class EndAt(msgspec.Struct, frozen=True, tag="end-at"):
    """The generation ends before this step: no more steps are fed, and the round under way is shorter."""

    generation: int
    step: int


class Reshape(msgspec.Struct, frozen=True, tag="reshape"):
    """From now on the worker imitates these links to these peers."""

    links: dict[str, Shape]


class State(msgspec.Struct, frozen=True, tag="state"):
    generation: int
    step: int
    """Steps completed when the copy was made."""
    tensors: tuple[TensorEntry, ...] | None
    """None: the same as last time. Empty: the device has no weights, so its state has no tensors."""
    scalars: dict[str, Any]
    checksums: tuple[Checksum, ...] = ()
    """The checksum of each tensor when the copy was made."""
    has_changed: bool = False
    """Whether the copy was offered before and has changed since."""


class SendState(msgspec.Struct, frozen=True, tag="send"):
    generation: int
    step: int
    to: str
    attempt: int = 0
    """How often the copy was sent before. If it was, it is checked first: see `State.has_changed`."""


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """A copy of another worker's state is about to be sent to this worker."""

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
    """A copy has arrived. It is kept only if its checksums are those that were announced."""

    generation: int
    source: str
    step: int
    checksum: Checksum = 0
    """The checksum of the checksums of the tensors that arrived, see `checksums.combined`."""
    attempt: int = 0


class Retain(msgspec.Struct, frozen=True, tag="retain"):
    """Copies of steps other than these are no longer needed."""

    first: int
    last: int
    is_between_kept: bool = True


class Survey(msgspec.Struct, frozen=True, tag="survey"):
    generation: int
    since: int
    """The generation with which the job began."""


class Holding(msgspec.Struct, frozen=True, tag="holding"):
    """All state that a worker holds, by steps completed."""

    generation: int
    steps: dict[int, tuple[TensorEntry, ...]]
    scalars: dict[int, dict[str, Any]]
    checksums: dict[int, dict[str, Checksum]] = {}
    """Checksums of tensors that are copies, from when the copies were made."""


class Corrupt(msgspec.Struct, frozen=True, tag="corrupt"):
    """State that a worker was to start with has changed since it was kept; `source`: the device that kept it."""

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
    """None: the worker finds the fastest first."""
    optimizer: dict[str, Any] | None
    """The optimiser whose step is timed too."""
    training: bool = True
    """False: forward only, in evaluation mode."""
    is_quick: bool = False
    """Whether `seconds` is a limit: what there is no time to measure is estimated."""
    alone: bool = False
    """Whether time for which other work of this machine pauses the process does not count."""
    gpu_math: GpuMath = GpuMath()
    """The settings of the kernels, where this device is a GPU."""


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    generation: int
    profile: DeviceProfile
    memory_bytes_per_second: float
    """The rate measured with the optimiser's step, or with a copy where there is none."""


class ProbeLinks(msgspec.Struct, frozen=True, tag="probe-links"):
    generation: int
    devices: tuple[str, ...]
    peers: dict[str, Address]
    sizes: dict[str, int] = {}
    """For two devices, the bytes that each sends to the other, once and in turn; empty: everything is measured."""
    is_quick: bool = False
    """Whether everything is measured with few repeats."""


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    generation: int
    delay_seconds: float
    bytes_per_second: float
    lost_seconds_per_byte: float
    links: dict[str, Link] = {}
    """The link to each of the other devices, measured on its own."""


class AskClock(msgspec.Struct, frozen=True, tag="ask-clock"):
    ticket: int


class Clock(msgspec.Struct, frozen=True, tag="clock"):
    ticket: int
    seconds: float
    """A monotonic clock, whose origin is arbitrary."""
    wall_seconds: float = 0.0
    """Seconds since 1970 by the machine's clock; 0: not reported."""


class ProbePeers(msgspec.Struct, frozen=True, tag="knock"):
    """Connect to each of these once and report whether a member answers there: see `member_probes`."""

    generation: int
    peers: dict[str, Address]
    limit_seconds: float


class PeersProbed(msgspec.Struct, frozen=True, tag="knocked"):
    generation: int
    answers: dict[str, ProbeAnswer]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    generation: int
    diagnose_step: int = -1
    """First report in which layer of this stage the numbers of that step stopped being finite; -1: do not."""
    with_log: bool = False
    """First report the log: a stream has no last step."""


class Diagnosis(msgspec.Struct, frozen=True, tag="diagnosis"):
    generation: int
    layer: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    pass


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """The run goes on without this worker."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """The sender is alive. A worker adds what has arrived meanwhile, and how far it is in a run."""

    arrivals: tuple[Arrival, ...] = ()
    standing: Standing | None = None
