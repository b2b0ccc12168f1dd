"""Records that control messages are made of: fixed fields, as JSON. Their encoded names are part of the protocol."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from manyhands.facts.clipping import Clipping
from manyhands.facts.collective_terms import CollectiveTerms
from manyhands.facts.gpu_math import GpuMath
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
    """A worker's report of its own data."""

    samples: int
    arrays: tuple[TensorEntry, ...]
    """The shape is that of one sample."""


class Facts(msgspec.Struct, frozen=True):
    """A worker's report of its machine."""

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
    """The confinement of its process; None: not reported."""
    backends: tuple[str, ...] = ()
    """The backends of torch.distributed that it has."""
    is_relay: bool = False
    """Whether it offers to relay the connections of others, before the coordinator does."""
    gpu: str = ""
    """A key in common with the workers that can open its memory on the GPU (executor/gpu_peers.py); empty: none can."""


class LengthGraph(msgspec.Struct, frozen=True):
    """The job's graph at another length of its samples."""

    length: int
    graph: dict[str, Any]
    network: Network


class DeviceJob(msgspec.Struct, frozen=True):
    """Everything a device needs to take its part in a run; its weights follow as data."""

    graph: dict[str, Any] | None
    """None: the graph that it was given before, which has this digest."""
    network: Network | None
    digest: str
    plan: Plan
    optimizer: dict[str, Any] | None
    seed: int
    kernels: dict[str, Kernel]
    stored: dict[str, Kernel]
    """Kernels by which weights are laid out in memory: alike on all devices that add up gradients."""
    state: tuple[TensorEntry, ...]
    """The tensors that the device starts with."""
    sources: dict[str, tuple[str, ...]]
    """Source -> the tensors that it sends this device; under the device's own name, those it has already."""
    checksums: dict[str, dict[str, Checksum]]
    """Source -> tensor -> checksum, where it is known."""
    scalars: dict[str, Any]
    steps_done: int
    with_targets: bool
    trace_first: int
    trace_last: int
    memory_step: int
    wait_limit_seconds: float
    watch_every: int = 0
    """One round in this many is watched while the run goes on; 0: none."""
    held: tuple[str, ...] = ()
    """Inputs and targets that the device has, in its silo or preloaded: it is sent only the numbers of its rows."""
    preload_samples: int = msgspec.field(default=0, name="laid")
    """Samples that are preloaded at the device before the first step; 0: its samples are in its silo."""
    resident_dataset: str = msgspec.field(default="", name="shelf")
    """A key that identifies the preloaded samples; they come with the weights, unless the device already has them."""
    is_preloaded: bool = msgspec.field(default=False, name="is_laid")
    longest: int = 0
    """The length of samples in `graph`; 0: all batches have one shape."""
    shorter: tuple[LengthGraph, ...] = ()
    """The graphs of other lengths, ascending; empty also where the device was given them before, with this digest."""
    clipping: Clipping | None = None
    """The limits of gradients; None: there are none."""
    scales_loss: bool = False
    """Whether the loss is scaled, and steps whose gradients are not finite are skipped."""
    ema: float | None = None
    """The decay of an average of the weights; None: there is none."""
    step_lengths: bytes = b""
    """For each step from the first of the generation to its last, which length its batch has: 0 is the shortest."""
    gpu_math: GpuMath = GpuMath()
    """The settings of the kernels, where this device is a GPU."""
    is_scheduled: bool = False
    """Whether the coordinator sends the optimizer's learning rates, and what else schedules change, with every step."""
    collectives: CollectiveTerms | None = None
    """How the devices form process groups for their sums; None: messages carry these."""
    gpu_peers: tuple[str, ...] = ()
    """The other devices of the job that compute on the same GPU: tensors for them stay there."""


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
    """A device's spans of a watched round, and the memory it uses."""

    spans: tuple[Glimpse, ...]
    """The spans of the round, by the device's clock."""
    resident_bytes: int
    peak_bytes: int


class Standing(msgspec.Struct, frozen=True):
    """A worker's progress in its generation, and the devices it waits for. A heartbeat says that a process runs; this
    says whether it makes progress."""

    generation: int
    step: int
    """The round that it is working on."""
    moved: int
    """Rises with each action that is done and each part of a message that arrives."""
    is_busy: bool
    """Whether it computes; otherwise it waits for messages."""
    waits_for: tuple[str, ...] = ()
    """The devices whose messages or connections it waits for."""
    is_connecting: bool = False
    silent: dict[str, float] = {}
    """Connected peer -> seconds without a byte from it, heartbeats of the connection included."""
    refused: dict[str, int] = {}
    """Peer -> messages from it that do not follow the plan."""
