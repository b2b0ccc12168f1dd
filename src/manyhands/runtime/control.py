"""The control protocol between coordinator and workers: messages as JSON, one kind each. Data, never code.

worker                        coordinator
Hello            ──────▶
                 ◀──────      Welcome or Refusal
                 ◀──────      Prepare (graph, plan, peers, which device has which weights)
Ready            ──────▶
                 ◀──────      Start; the weights follow as data, from the devices that have them
Progress ...     ──────▶
State            ──────▶      a copy of a worker's state is at hand
                 ◀──────      Hold: another worker makes room for it
Holds            ──────▶
                 ◀──────      SendState: it may be sent, to that worker or to the coordinator
Held             ──────▶      it has arrived, with these checksums
                 ◀──────      Retain: which copies are still wanted
Done             ──────▶
                 ◀──────      Stop: back to waiting, copies are kept
                 ◀──────      Survey: which state does the worker hold?
Holding          ──────▶
Corrupt          ──────▶      state it was to start with has changed since it was kept
Leaving          ──────▶      it was asked to leave: it hands over its state first
                 ◀──────      Leave: end the process
                 ◀──────      Evict: the run goes on without this worker, which made no progress
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from manyhands.facts.errors import Refused
from manyhands.facts.plan import received_share
from manyhands.facts.units import format_bytes
from manyhands.files.json_memory import decoded_bytes
from manyhands.runtime.control_messages import (
    AskClock,
    AskIds,
    Clock,
    Corrupt,
    Diagnosis,
    Done,
    EndAt,
    Evict,
    Failed,
    Heartbeat,
    Held,
    Hello,
    Hold,
    Holding,
    Holds,
    Ids,
    Leave,
    Leaving,
    Measure,
    Measured,
    PeersProbed,
    Prepare,
    Probed,
    ProbeLinks,
    ProbePeers,
    Progress,
    Ready,
    Refusal,
    Reshape,
    Retain,
    SendState,
    Start,
    State,
    Stepped,
    Stop,
    Survey,
    Welcome,
)

PROTOCOL = 13

FromWorker = (
    Hello | Refusal | Ready | Progress | Stepped | State | Holds | Held | Holding | Ids | Leaving | Failed | Done
    | Measured | Probed | Clock | PeersProbed | Diagnosis | Heartbeat | Corrupt
)  # fmt: skip
"""The messages that a worker sends. It sends a refusal when it listens and a second coordinator invites it."""
FromCoordinator = (
    Welcome | Refusal | Prepare | Start | EndAt | Reshape | SendState | Hold | Retain | Survey | AskIds | Measure
    | ProbeLinks | AskClock | ProbePeers | Stop | Leave | Evict | Heartbeat
)  # fmt: skip
Message = FromWorker | FromCoordinator

LARGEST_HELLO_BYTES = 16 * 1024
"""The limit of a worker's first message: what it reports of itself, with some sixty bytes for each array of a silo."""
MOST_FROM_WORKER_BYTES = 128 * 2**20
"""How much memory one message of a worker may take once decoded, as counted: a list of 130,000 tensors."""
MOST_FROM_COORDINATOR_BYTES = 300 * 2**20
"""The same for the coordinator: a graph of 20,000 operators with its network, which are 290 MiB as counted."""

_encoder = msgspec.json.Encoder()
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_coordinator: msgspec.json.Decoder[FromCoordinator] = msgspec.json.Decoder(
    FromCoordinator, dec_hook=received_share
)
_T = TypeVar("_T")


class _Anybody(msgspec.Struct):
    """A hello of any version."""

    version: str
    protocol: int


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_from_worker(data: bytes) -> FromWorker:
    """Return a worker's message. Refused where the data is no message: that is the worker's fault."""
    return _decoded(data, _from_worker, MOST_FROM_WORKER_BYTES)


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """Return the coordinator's message. Refused where the data is no message: that is the coordinator's fault."""
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
    """Return the version and protocol of a hello that cannot be read; None where it is no hello at all."""
    try:
        hello = msgspec.json.decode(data, type=_Anybody)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return hello.version, hello.protocol
