"""What coordinator and workers say to each other: fixed records as JSON, one kind each. Data, never code.

worker                        coordinator
Hello            ──────▶
                 ◀──────      Welcome or Refusal
                 ◀──────      Prepare (graph, plan, peers, who has which weights)
Ready            ──────▶
                 ◀──────      Start; the weights follow as data, from whoever has them
Progress ...     ──────▶
State            ──────▶      a copy of a worker's state is at hand
                 ◀──────      Hold: another worker makes room for it
Holds            ──────▶
                 ◀──────      Send: it may travel, to that worker or to the coordinator
Held             ──────▶      it has arrived, with these checksums
                 ◀──────      Retain: which copies are still wanted
Done             ──────▶
                 ◀──────      Stop: back to waiting, copies are kept
                 ◀──────      Survey: what is there?
Holding          ──────▶
Corrupt          ──────▶      what it was to start with has changed since it was kept
Leaving          ──────▶      asked to go: it hands over first
                 ◀──────      Leave: end the process
                 ◀──────      Evict: the run goes on without this worker, which made no progress
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from manyhands.engine.endpoint import Address
from manyhands.executor.log import DeviceLog
from manyhands.executor.projections import SumRecord
from manyhands.facts.errors import Refused
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.profile import DeviceProfile, Kernel
from manyhands.facts.units import format_bytes
from manyhands.files.json_memory import decoded_bytes
from manyhands.runtime.confinement import Confinement
from manyhands.runtime.identity import Identity
from manyhands.runtime.knocking import Answer
from manyhands.schedule.glimpse import Glimpse

PROTOCOL = 11


Checksum = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor inside a message of several."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SiloFacts(msgspec.Struct, frozen=True):
    """What a worker says of its own data."""

    samples: int
    arrays: tuple[TensorEntry, ...]
    """The shape is that of one sample."""


class Facts(msgspec.Struct, frozen=True):
    """What a worker says of its machine."""

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
    """How its process is confined; None: it does not say."""


class Job(msgspec.Struct, frozen=True):
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
    """Inputs and targets that the device has, in its silo or laid out there: it is sent the numbers of its rows."""
    laid: int = 0
    """Samples that are laid out at the device before the first step; 0: what it has is in its silo."""
    shelf: str = ""
    """What that is, in a word; it comes with the weights, unless the device has it from before."""
    is_laid: bool = False


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


class Shape(msgspec.Struct, frozen=True):
    """A link to be imitated by the sender. None: no limit."""

    bytes_per_second: float | None
    delay_seconds: float


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    name: str
    silence_seconds: float
    """A side that has said nothing for so long is gone."""
    links: dict[str, Shape] = {}
    """Peers -> what is to pass for the link to them, where no network plays it."""
    up_bytes_per_second: float | None = None
    beat_seconds: float = 0.5
    """How often a worker says that it is alive."""
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
    job: Job | None
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


class Send(msgspec.Struct, frozen=True, tag="send"):
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


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """Connect to each of these once and say whether a member answers there: see `member_probes`."""

    generation: int
    peers: dict[str, Address]
    limit_seconds: float


class Knocked(msgspec.Struct, frozen=True, tag="knocked"):
    generation: int
    answers: dict[str, Answer]


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


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """The run goes on without this worker."""

    reason: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Alive. A worker says what has come meanwhile, and where it stands in a run."""

    arrivals: tuple[Arrival, ...] = ()
    standing: Standing | None = None


FromWorker = (
    Hello | Refusal | Ready | Progress | Stepped | State | Holds | Held | Holding | Ids | Leaving | Failed | Done
    | Measured | Probed | Clock | Knocked | Diagnosis | Beat | Corrupt
)  # fmt: skip
"""What a worker says. A refusal: of one that listens and is asked by a second coordinator."""
FromCoordinator = (
    Welcome | Refusal | Prepare | Start | EndAt | Reshape | Send | Hold | Retain | Survey | AskIds | Measure
    | ProbeLinks | AskClock | Knock | Stop | Leave | Evict | Beat
)  # fmt: skip
Said = FromWorker | FromCoordinator

LARGEST_HELLO_BYTES = 16 * 1024
"""Of a worker's first message: what it says of itself, with some sixty bytes for each array of a silo."""
MOST_FROM_WORKER_BYTES = 128 * 2**20
"""Of memory that one message of a worker may take once decoded, as counted: a list of 130,000 tensors."""
MOST_FROM_COORDINATOR_BYTES = 300 * 2**20
"""Of one of the coordinator: a graph of 20,000 operators with its network, which are 290 MiB as counted."""

_encoder = msgspec.json.Encoder()
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_coordinator: msgspec.json.Decoder[FromCoordinator] = msgspec.json.Decoder(FromCoordinator)
_T = TypeVar("_T")


class _Anybody(msgspec.Struct):
    """A hello of any version."""

    version: str
    protocol: int


def encode(message: Said) -> bytes:
    return _encoder.encode(message)


def decode_from_worker(data: bytes) -> FromWorker:
    """A worker's message; one that is none is the worker's fault, said so."""
    return _decoded(data, _from_worker, MOST_FROM_WORKER_BYTES)


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """The coordinator's message; one that is none is the coordinator's fault, said so."""
    return _decoded(data, _from_coordinator, MOST_FROM_COORDINATOR_BYTES)


def _decoded(data: bytes, decoder: msgspec.json.Decoder[_T], most_bytes: int) -> _T:
    if (needed := decoded_bytes(data)) > most_bytes:
        raise Refused(
            f"A control message of {format_bytes(len(data))} may take {format_bytes(needed)} decoded; at most "
            f"{format_bytes(most_bytes)} are read.",
            hint="Is the network very large? Cut it into fewer operators.",
        )
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(
            f"A control message cannot be read: {error!s:.300}.", hint="Is the same version of manyhands on both sides?"
        ) from error


def spoken(data: bytes) -> tuple[str, int] | None:
    """The version and protocol that somebody speaks whose hello cannot be read; None where it is no hello at all."""
    try:
        found = msgspec.json.decode(data, type=_Anybody)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return found.version, found.protocol
