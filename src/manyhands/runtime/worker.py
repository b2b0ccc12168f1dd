"""A worker: joins a coordinator, takes part in its runs, and leaves when told or when the coordinator is gone.

Three threads: one listens to the coordinator and can interrupt the others at any moment, the main one works, the
transport's moves bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping

import torch

from manyhands.data.silo import Silo
from manyhands.executor.process_groups import Hosts
from manyhands.facts.errors import ManyhandsError, WorkerLost
from manyhands.graph.accelerators import check_gpu
from manyhands.runtime import link_probe
from manyhands.runtime.assignment import Assignment, Stopped
from manyhands.runtime.control import Message, decode_from_coordinator, encode
from manyhands.runtime.control_messages import (
    AskClock,
    AskIds,
    Clock,
    Diagnosis,
    Done,
    EndAt,
    Evict,
    Failed,
    Heartbeat,
    Hold,
    Holding,
    Ids,
    Leave,
    Leaving,
    Measure,
    PeersProbed,
    Prepare,
    ProbeLinks,
    ProbePeers,
    Ready,
    Reshape,
    Retain,
    SendState,
    Start,
    Stepped,
    Stop,
    Survey,
)
from manyhands.runtime.control_parts import Standing
from manyhands.runtime.handshake import hello_of, pin_coordinator, welcome_from
from manyhands.runtime.joining import Joining, listening_host, reach
from manyhands.runtime.keeping import Keeping
from manyhands.runtime.link_shaping import LinkShaping
from manyhands.runtime.member_probes import MemberProbes
from manyhands.runtime.mishaps import as_error
from manyhands.runtime.part_builder import PartBuilder
from manyhands.runtime.peer_connections import completed, connect, form_groups
from manyhands.runtime.processes import keep_memory
from manyhands.runtime.round_reports import RoundReports
from manyhands.runtime.state_exchange import StateExchange, state_of
from manyhands.runtime.timing_here import measured
from manyhands.runtime.worker_status import arrivals_at, standing_of
from manyhands.schedule.backup import is_due
from manyhands.transport.endpoint import Address
from manyhands.transport.security import LaterSecurity
from manyhands.transport.transport import ControlConnection, TcpTransport, Transport

GRACE_SECONDS = 10.0
"""Seconds that the main thread may go on in one torch call after the coordinator has gone."""
SWITCH_SECONDS = 2e-4
"""Seconds that the transport's thread waits for Python: the default, 5 ms, is many times a message's own time."""


class Worker:
    """One device of a cluster, for as long as its coordinator lives."""

    def __init__(
        self, joining: Joining, transport: Transport | None = None, reached: ControlConnection | None = None
    ) -> None:
        """`reached`: the connection of a coordinator that has come here (see `inviting`); None: this worker dials."""
        self.joining = joining
        self.owns_process = transport is None
        """Whether the process is this worker's alone; else other workers are in it too, and it is never ended."""
        self.transport = transport or TcpTransport()
        self.silo = Silo.read(joining.silo) if joining.silo else None
        sys.setswitchinterval(SWITCH_SECONDS)
        keep_memory()
        if joining.threads:
            torch.set_num_threads(joining.threads)
        if joining.compute != "cpu":
            check_gpu(joining.compute)
        name = joining.name or socket.gethostname()
        reached = reached or reach(joining, name, self.transport)
        self.channel = reached.channel
        self._credentials = reached.security.credentials
        self._peers = LaterSecurity("", reached.security.encrypted, reached.security.timeout_factor)
        """The security of connections to other workers: the coordinator sends the secret when it welcomes this one."""
        host = listening_host(joining, reached)
        self.endpoint = self.transport.endpoint(
            name, self._peers, host=host, port=joining.data_port, listener=reached.listener
        )
        self.probes = MemberProbes(name, self._peers, host)
        self.commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.prepared: Assignment | None = None
        self.keeping = Keeping(self.endpoint)
        self.builder = PartBuilder(
            self.endpoint, joining, self.silo, Hosts(self.channel.local_host, self.channel.peer_host)
        )
        self.exchange = StateExchange(self.endpoint, self.keeping, lambda message: self._send(message))
        self.probing: ProbeLinks | None = None
        self.is_under_way = False
        """Whether a job of this worker has not ended: between two generations, too, others need the state it holds."""
        self.stopped = -1
        """The last generation that was stopped."""
        self.leaving = False
        self._main_thread = threading.get_ident()
        self._at_work: int | None = None
        """The generation that the main thread works for now; None: none."""
        self._ended = threading.Event()
        self.gone: ManyhandsError | None = None
        self.heartbeat_timeout_seconds = 0.0
        """A coordinator that sends nothing for this long, not even a heartbeat, is gone."""
        self.heartbeat_seconds = 0.0
        self.shaping = LinkShaping(self.endpoint)
        self.on_joined: Callable[[], None] = lambda: None
        self.is_new_to_each_other = False
        """Whether the coordinator's key was not known before."""

    def run(self) -> None:
        """Join, then work until told to leave. Raises where the coordinator refuses or is lost."""
        self._main_thread = threading.get_ident()
        try:
            self._join()
            threading.Thread(target=self._listen, name="control", daemon=True).start()
            while not isinstance(command := self.commands.get(), Leave):
                self._obey(command)
            if self.gone is not None and not self.leaving:
                raise self.gone
            with contextlib.suppress(ManyhandsError):  # the coordinator may have gone first
                self._send(Leaving())  # so that it is not taken for lost
        finally:
            self._drop()
            self.endpoint.close()
            self.channel.close()
            self._ended.set()

    @property
    def is_needed(self) -> bool:
        """Whether others may need the state that this worker holds."""
        return self.prepared is not None or self.is_under_way

    def ask_to_leave(self) -> None:
        """Leave as soon as others have the state held here; at once where nothing is under way.

        Not to be called by a signal's handler.
        """
        if not self.is_needed:
            self.leaving = True
            self.commands.put(Leave())
        else:
            with contextlib.suppress(ManyhandsError):  # the control thread notices by itself
                self._send(Leaving())

    # Talking

    def _send(self, message: Message) -> None:
        self.channel.send(encode(message))

    def _join(self) -> None:
        self._send(hello_of(self.joining, self.channel, self.endpoint, self.silo))
        answer = welcome_from(self.joining, self.channel)
        self.is_new_to_each_other = pin_coordinator(self._credentials, self.channel, answer.coordinator)
        self._peers.settle(answer.secret)
        self.heartbeat_seconds = answer.heartbeat_seconds
        self.heartbeat_timeout_seconds = answer.heartbeat_timeout_seconds
        self.shaping.up_bytes_per_second = answer.up_bytes_per_second or math.inf
        if answer.links:
            self.shaping.shape(answer.links)
        self.endpoint.silence_seconds = min(self.endpoint.silence_seconds, answer.heartbeat_timeout_seconds * 2 / 3)
        self.on_joined()

    def _standing(self) -> Standing | None:
        generation, prepared = self._at_work, self.prepared
        executor = prepared.executor if prepared is not None else None
        return standing_of(self.endpoint, generation, executor, self._main_thread)

    def _listen(self) -> None:
        """Pass commands on, stop at once what must stop, and send heartbeats: the control thread."""
        received_at = time.monotonic()
        try:
            while True:
                data = self.channel.receive(self.heartbeat_seconds)
                self._send(Heartbeat(arrivals_at(self.endpoint), self._standing()))
                self.exchange.report_copies()  # here too: no round may be fed before they are known to have come
                if self.joining.parent and os.getppid() != self.joining.parent:
                    raise WorkerLost("The process that started this worker is gone.")
                if data is None:
                    if time.monotonic() - received_at > self.heartbeat_timeout_seconds:
                        raise WorkerLost(f"The coordinator has sent nothing for {self.heartbeat_timeout_seconds:g} s.")
                    continue
                received_at = time.monotonic()
                self._handle(decode_from_coordinator(data))
        except Exception as error:
            self.gone = error if isinstance(error, ManyhandsError) else WorkerLost(f"Control ended: {error!r}")
            self.endpoint.mailbox.interrupt(self.gone)
            self.commands.put(Leave())
            if not self._ended.wait(GRACE_SECONDS) and self.owns_process:
                os._exit(WorkerLost.exit_code)  # the main thread is stuck in a call that nothing interrupts

    def _handle(self, message: Message) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, AskClock):
            self._send(Clock(message.ticket, time.monotonic(), time.time()))
        elif isinstance(message, SendState):
            self.exchange.send_copy(self.prepared, message)
        elif isinstance(message, Hold):
            self.exchange.make_room(self.prepared, message)
        elif isinstance(message, EndAt):
            prepared = self.prepared
            if prepared is not None and prepared.generation == message.generation and prepared.executor is not None:
                prepared.executor.end_at(message.step)
        elif isinstance(message, Retain):
            self.keeping.retain(
                message.first, message.last, is_between_kept=message.is_between_kept
            )  # not what this generation gives: it is at `first`
        elif isinstance(message, Reshape):
            self.shaping.shape(message.links)
        elif isinstance(message, Evict):
            raise WorkerLost(f"The run goes on without this worker: {message.reason}.")
        else:
            if isinstance(message, (Stop, Leave)):
                self.stopped = getattr(message, "generation", self.stopped)
                self.leaving = isinstance(message, Leave)
                self.endpoint.mailbox.interrupt(Stopped("stopped by the coordinator"))
            self.commands.put(message)

    # Working

    def _obey(self, command: Message) -> None:
        generation = getattr(command, "generation", -1)
        if not isinstance(command, Stop) and generation <= self.stopped:
            return
        self._at_work = generation if isinstance(command, (Prepare, Start)) else None
        try:
            if isinstance(command, Prepare):
                self._prepare(command)
            elif isinstance(command, Start) and self.probing is not None:
                self._probe(self.probing)
            elif isinstance(command, Start):
                self._train(command)
            elif isinstance(command, Measure):
                self._send(measured(command, self.endpoint.name, self.joining))
            elif isinstance(command, ProbeLinks):
                self._prepare_probe(command)
            elif isinstance(command, ProbePeers):
                self._send(
                    PeersProbed(generation, self.probes.run(self._reachable(command.peers), command.limit_seconds))
                )
            elif isinstance(command, AskIds):
                self._send(Ids(generation, self.silo.digests() if self.silo is not None else b""))
            elif isinstance(command, Survey):
                self.keeping.begin(command.since)
                self._send(Holding(generation, *self.keeping.listing()))
            elif isinstance(command, Stop):
                if command.diagnose_step >= 0 and self.prepared is not None and self.prepared.executor is not None:
                    self._send(Diagnosis(generation, self.prepared.executor.diagnose(command.diagnose_step)))
                if command.with_log and self.prepared is not None and self.prepared.executor is not None:
                    self._send(Done(generation, self.prepared.executor.log))
                self._drop()
        except Stopped:
            pass
        except Exception as error:
            mishap = as_error(error, self.endpoint.name)
            if mishap is not error:
                with contextlib.suppress(OSError):  # its log may be on a full disk
                    print("".join(traceback.format_exception(error)), file=sys.stderr)
            self._report(generation, type(mishap).__name__, mishap.message, mishap.hint)
        finally:
            self._at_work = None

    def _report(self, generation: int, kind: str, message: str, hint: str) -> None:
        executor = self.prepared.executor if self.prepared is not None else None
        with contextlib.suppress(ManyhandsError):
            self._send(Failed(generation, kind, message, hint, executor.step if executor is not None else -1))

    def _drop(self) -> None:
        """End a generation. The state it has reached is kept, unless it is in the middle of a step."""
        self.probing = None
        if self.prepared is None:
            return
        prepared, self.prepared = self.prepared, None
        self.endpoint.mailbox.interrupt(Stopped("the run has ended"))
        self.keeping.expect_nobody()
        executor = prepared.executor
        if executor is None:
            return
        executor.close()
        is_kept = executor.plan.is_training and not prepared.command.is_aside
        if is_kept and executor.settled_step is not None:
            self.keeping.keep(executor.settled_step, *state_of(executor, copy=False))

    def _prepare(self, command: Prepare) -> None:
        """Build this device's part and connect to the others; weights come with the start."""
        self._drop()
        if not command.is_aside:
            self.keeping.begin(command.since)
        if command.job is None:
            self.endpoint.mailbox.open(command.generation, {})
            self.prepared = Assignment(command, None)
        else:
            if not command.is_aside:
                self.is_under_way = command.job.plan.is_training
            kept = self.keeping.at(command.job.steps_done) if not command.is_aside else {}
            executor = self.builder.build(command.generation, command.job, kept)
            self.prepared = Assignment(command, executor)
            self.exchange.make_room_for_start(self.prepared, executor)
        self._connect(command)
        if self.prepared.executor is not None and (collectives := self.prepared.executor.options.collectives):
            form_groups(
                collectives.groups, self.joining.timeout_factor, lambda: self._check_stopped(command.generation)
            )
        self._send(Ready(command.generation))

    def _connect(self, command: Prepare | ProbeLinks) -> None:
        connect(
            self.endpoint, self._reachable(command.peers), self.joining.timeout_factor,
            lambda: self._check_stopped(command.generation),
        )  # fmt: skip

    def _reachable(self, peers: Mapping[str, Address]) -> dict[str, Address]:
        return completed(peers, (self.channel.peer_host, self.joining.port))

    def _check_stopped(self, generation: int) -> None:
        if self.leaving or self.gone is not None or self.stopped >= generation:
            raise Stopped("stopped by the coordinator")

    def _train(self, command: Start) -> None:
        prepared = self.prepared
        if prepared is None or prepared.generation != command.generation:
            return
        self.exchange.give(prepared, command.first_step)
        executor = prepared.executor
        if executor is None:
            return
        self.exchange.load(prepared, executor, command)
        executor.rest()
        stride = executor.plan.steps_per_round
        if stride > 1:
            executor.on_update = lambda step: self._send(Stepped(command.generation, step))
        reports = RoundReports(executor, command.generation, self.endpoint, lambda report: self._send(report))
        for step in range(command.first_step, command.last_step, stride):
            steps_done = min(step + stride, command.last_step)
            if executor.last_step is not None and executor.last_step <= step:
                break  # it is to be stopped
            result = executor.round(step, steps_done - step)
            assert executor.settled_step is not None, "a round has ended"
            steps_done = executor.settled_step
            if steps_done == step:
                break  # nothing was fed: to be stopped
            is_kept = steps_done in command.snapshots or is_due(step, steps_done, command.backup_every)
            reports.add(result, steps_done, at_once=is_kept)  # before a copy of the state is offered
            if is_kept:
                self.exchange.keep(prepared, steps_done, *state_of(executor, copy=True))
            self.exchange.report_copies()
        else:
            reports.finish()
            if executor.last_step is None or executor.last_step >= command.last_step:
                self._send(Done(command.generation, executor.log))
                if not prepared.command.is_aside:
                    self.is_under_way = False
            return
        reports.finish()

    def _prepare_probe(self, command: ProbeLinks) -> None:
        """Connect to the devices that take part; the probe begins when all are ready."""
        self._drop()
        self.endpoint.mailbox.open(command.generation, link_probe.expected(command, self.endpoint.name))
        self._connect(command)
        self.probing = command
        self._send(Ready(command.generation))

    def _probe(self, command: ProbeLinks) -> None:
        self.probing = None
        self._send(link_probe.run(command, self.endpoint))
