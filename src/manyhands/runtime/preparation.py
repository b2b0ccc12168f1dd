"""Gets the devices of a run ready: each builds its part, and all connect to each other."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from manyhands.graph.document import to_document
from manyhands.runtime.attempt import Attempt
from manyhands.runtime.collective_store import store_of
from manyhands.runtime.control import Message
from manyhands.runtime.control_messages import PeersProbed, Prepare, Ready
from manyhands.runtime.control_parts import LengthGraph
from manyhands.runtime.handout import GraphDocument
from manyhands.runtime.order import Order
from manyhands.runtime.part_builder import keeps_dataset
from manyhands.runtime.route_probing import ANSWER_LIMIT_SECONDS, ask_for_routes, note_routes, report_relays

if TYPE_CHECKING:
    from manyhands.runtime.run import Run

CONNECT_SECONDS = 30.0
BATCHES_UNDER_WAY = 2
"""Batches for which memory is shared with a GPU's process: one that it reads, and one that follows."""


def _shorter_graphs(order: Order) -> tuple[LengthGraph, ...]:
    if order.lengths is None:
        return ()
    graphs = ((length, graph) for length, graph in order.lengths.graphs.items() if graph is not order.graph)
    return tuple(LengthGraph(length, to_document(graph), graph.network) for length, graph in graphs)


def _learn_routes(run: Run) -> None:
    """Find out which devices reach each other, where that is in doubt."""
    coordinator = run.coordinator
    missing = set(ask_for_routes(coordinator, run.participants, run.generation))

    def handle(name: str, message: Message) -> None:
        if isinstance(message, PeersProbed):
            note_routes(coordinator, name, message)
            missing.discard(name)

    if missing:
        limit_seconds = ANSWER_LIMIT_SECONDS * coordinator.security.timeout_factor
        run.follow(lambda: not missing, handle, "to say whom it reaches", limit_seconds, lambda: missing)
    report_relays(coordinator, run.participants)


def _gpu_peers(run: Run, name: str) -> tuple[str, ...]:
    """Return the other devices of a run that compute on the same GPU as one of them."""
    gpu = run.members[name].facts.gpu
    return tuple(other for other in run.names if gpu and other != name and run.members[other].facts.gpu == gpu)


def prepare(run: Run) -> None:
    """Hand out the parts of a run, and return when all its devices are ready."""
    _learn_routes(run)
    run.coordinator.endpoint.mailbox.open(run.generation, run.expected(), run.first, run.stride)
    document = to_document(run.order.graph)
    shorter = _shorter_graphs(run.order)
    digest = hashlib.sha256(msgspec.json.encode([document, shorter] if shorter else document)).hexdigest()
    run.store = store_of(run)
    for name in run.participants:
        peers = run.coordinator.addresses(run.participants, name)
        job = None
        if name in run.names:
            job = run.handout.job(
                name, run.members[name], run.order, run.feed, GraphDocument(document, shorter, digest),
                run.worker_wait_seconds, run.coordinator.gpu_math,
                run.store.terms if run.store is not None else None, _gpu_peers(run, name),
            )  # fmt: skip
        if job is not None and not (job.resident_dataset and job.is_preloaded) and not keeps_dataset(job):
            # it drops the dataset it has; the new one is complete after its first round
            run.members[name].resident_dataset = ""
        if job is not None and run.members[name].facts.compute != "cpu":  # it computes faster than a connection feeds
            run.coordinator.endpoint.make_room(name, BATCHES_UNDER_WAY * run.feed.feeder.bytes_of(name))
        gives = run.handout.gives.get(name, {})
        run.coordinator.send(name, Prepare(run.generation, job, peers, gives, run.since, run.order.is_aside))
    timeout_factor = run.coordinator.security.timeout_factor
    is_connected = threading.Event()

    def connect() -> None:
        run.coordinator.connect(run.participants, CONNECT_SECONDS * timeout_factor)
        is_connected.set()
        run.coordinator.wake()  # no message may be left that would wake it

    connecting = Attempt(connect, "coordinator connect")
    ready: set[str] = set()

    def handle(name: str, message: Message) -> None:
        if isinstance(message, Ready):
            ready.add(name)
            if name in run.names:
                run.members[name].graph_digest = digest

    def is_ready() -> bool:
        return (is_connected.is_set() or connecting.is_over()) and len(ready) == len(run.participants)

    began = time.monotonic()
    limit_seconds = run.usual.prepare_limit_seconds * timeout_factor
    run.follow(is_ready, handle, "to get ready", limit_seconds, lambda: set(run.participants) - ready)
    run.times.prepare_seconds = time.monotonic() - began
    if run.order.trace_steps or run.order.watch_every:
        run.coordinator.clock_sync.synchronize(run.names)
