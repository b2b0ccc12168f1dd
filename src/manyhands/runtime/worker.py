"""A worker: joins a coordinator, takes part in its runs, and goes when told or when the coordinator is gone.

Three threads: one listens to the coordinator and can interrupt the others at any moment, the main one works, the
engine's moves bytes.
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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from manyhands.data.silo import Silo
from manyhands.engine.endpoint import Address
from manyhands.engine.keys import Role
from manyhands.engine.security import LaterSecurity
from manyhands.engine.shaping import STOPPED_BYTES_PER_SECOND
from manyhands.engine.transport import ControlConnection, TcpTransport, Transport
from manyhands.executor.executor import Executor, Setting
from manyhands.executor.log import DeviceLog
from manyhands.executor.messages import COORDINATOR, feed_parts
from manyhands.executor.optimizers import build
from manyhands.executor.shelf import SAMPLES, Shelf
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadData, BadFile, BadPlan, BadValue, ManyhandsError, Refused, TimedOut, WorkerLost
from manyhands.facts.link import Link
from manyhands.facts.network import WeightSpec
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan_check import resolve
from manyhands.facts.version import __version__
from manyhands.graph.check import check_weights
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import store_weights
from manyhands.graph.weights import Weights
from manyhands.runtime import pair_probe, probing, state
from manyhands.runtime.attempt import Attempt
from manyhands.runtime.checksums import checksum, checksums
from manyhands.runtime.control import (
    LARGEST_HELLO_BYTES,
    PROTOCOL,
    Arrival,
    AskClock,
    AskIds,
    Beat,
    Clock,
    Corrupt,
    Diagnosis,
    Done,
    EndAt,
    Evict,
    Failed,
    Hello,
    Hold,
    Holding,
    Holds,
    Ids,
    Job,
    Knock,
    Knocked,
    Leave,
    Leaving,
    Measure,
    Prepare,
    Probed,
    ProbeLinks,
    Progress,
    Ready,
    Refusal,
    Reshape,
    Retain,
    Said,
    Seen,
    Send,
    Shape,
    Standing,
    Start,
    State,
    Stepped,
    Stop,
    Survey,
    TensorEntry,
    Welcome,
    decode_from_coordinator,
    encode,
)
from manyhands.runtime.identity import own_identity
from manyhands.runtime.joining import Joining, facts_of, prepare_gpu, reach
from manyhands.runtime.keeping import STATE, Keeping, topic
from manyhands.runtime.member_probes import MemberProbes
from manyhands.runtime.mishaps import as_error
from manyhands.runtime.processes import keep_memory
from manyhands.runtime.quarantine import LONGEST_SECONDS
from manyhands.runtime.timing_here import graph_of, measured
from manyhands.schedule.backup import is_due
from manyhands.schedule.glimpse import thinned
from manyhands.schedule.policy import Schedule

GRACE_SECONDS = 10.0
"""How long the main thread may go on in one torch call after the coordinator has gone."""
CONNECT_SECONDS = 30.0
SWITCH_SECONDS = 2e-4
"""How long the engine's thread waits for Python: its default, 5 ms, is many times a message's own time."""


@dataclass
class _Prepared:
    """A generation that this worker takes part in."""

    command: Prepare
    executor: Executor | None
    """None: it only gives away what it has."""
    said: tuple[TensorEntry, ...] | None = None
    """What its state was last said to be made of; None: nothing was said yet. A device without weights says that it has
    no tensors, which is not the same."""
    offered: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The tensors of each copy that was offered, in the order they travel."""
    state_bytes: Counter[str] = field(default_factory=Counter)
    """Sent to each, of state."""

    @property
    def generation(self) -> int:
        return self.command.generation


class CalledOtherwise(Refused):
    """Another worker has this one's name; under the name given here it may join."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason, hint=refusal.hint)
        self.name = refusal.name


class Quarantined(Refused):
    """The run that this worker was evicted from; `again_seconds` from now it may join again."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason, hint=refusal.hint)
        self.again_seconds = min(refusal.again_seconds, LONGEST_SECONDS)


def _short(hello: Hello) -> Hello:
    """A hello that a coordinator will read; one that is too long is refused here, where somebody is told why."""
    size = len(encode(hello))
    if size > LARGEST_HELLO_BYTES:
        arrays = len(hello.facts.silo.arrays) if hello.facts.silo is not None else 0
        raise BadData(
            f"What this worker says of itself takes {size} bytes; a coordinator reads at most {LARGEST_HELLO_BYTES}.",
            hint=f"Its silo has {arrays} arrays: give it fewer, or shorter names.",
        )
    return hello


class Worker:
    """One device of a cluster, for as long as its coordinator lives."""

    def __init__(
        self, joining: Joining, transport: Transport | None = None, reached: ControlConnection | None = None
    ) -> None:
        """`reached`: a coordinator that has come here (see `inviting`), in place of one to go to."""
        self.joining = joining
        self.owns_process = transport is None
        """Else other workers are in it too: it is never ended."""
        self.transport = transport or TcpTransport()
        self.silo = Silo.read(joining.silo) if joining.silo else None
        self.shelf: Shelf | None = None
        """What was laid out here last."""
        sys.setswitchinterval(SWITCH_SECONDS)
        keep_memory()
        if joining.threads:
            torch.set_num_threads(joining.threads)
        if joining.compute != "cpu":
            prepare_gpu(joining.compute)
        name = joining.name or socket.gethostname()
        reached = reached or reach(joining, name, self.transport)
        self.channel = reached.channel
        self._credentials = reached.security.credentials
        self._peers = LaterSecurity("", reached.security.encrypted, reached.security.patience)
        """By which other workers are met: the coordinator tells the secret when it welcomes this one."""
        self.endpoint = self.transport.endpoint(
            name, self._peers, host=self.channel.local_host, listener=reached.listener
        )
        self.probes = MemberProbes(name, self._peers, self.channel.local_host)
        self.commands: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self.prepared: _Prepared | None = None
        self.keeping = Keeping(self.endpoint)
        self._graphs: dict[str, Graph] = {}
        """The last one, by its digest."""
        self.probing: ProbeLinks | None = None
        self.is_under_way = False
        """A job that this worker took part in has not ended: between two generations, too, others need what is here."""
        self.stopped = -1
        """The last generation that was stopped."""
        self.leaving = False
        self._main_thread = threading.get_ident()
        self._at_work: int | None = None
        """The generation that the main thread works for now."""
        self._ended = threading.Event()
        self.gone: ManyhandsError | None = None
        self.silence_seconds = 0.0
        """A coordinator that says nothing for so long is gone; it beats too."""
        self.beat_seconds = 0.0
        self.links: dict[str, Link] = {}
        """Peer -> the link to it that is imitated."""
        self.up_bytes_per_second = math.inf
        self.on_joined: Callable[[], None] = lambda: None
        self.is_new_to_each_other = False
        """The coordinator's key was not known before."""

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
            with contextlib.suppress(ManyhandsError):  # it may have gone first
                self._say(Leaving())  # so that it is not taken for lost
        finally:
            self._drop()
            self.endpoint.close()
            self.channel.close()
            self._ended.set()

    @property
    def is_needed(self) -> bool:
        """Whether others may need what is here."""
        return self.prepared is not None or self.is_under_way

    def ask_to_leave(self) -> None:
        """Go as soon as others have what is here; at once where nothing is under way. Not for a signal's handler."""
        if not self.is_needed:
            self.leaving = True
            self.commands.put(Leave())
        else:
            with contextlib.suppress(ManyhandsError):  # the control thread finds out itself
                self._say(Leaving())

    # Talking

    def _say(self, message: Said) -> None:
        self.channel.send(encode(message))

    def _join(self) -> None:
        host, port = self.endpoint.address
        own = self.joining
        identity = own_identity(own.process, self.channel.local_host)
        is_named = own.is_named and bool(own.name)
        facts = facts_of(own, self.silo)
        self._say(_short(Hello(__version__, PROTOCOL, self.endpoint.name, host, port, facts, identity, is_named)))
        answer = self._answer()
        if isinstance(answer, Refusal) and answer.name:
            raise CalledOtherwise(answer)
        if isinstance(answer, Refusal) and answer.again_seconds > 0:
            raise Quarantined(answer)
        if isinstance(answer, Refusal):
            raise Refused(answer.reason, hint=answer.hint)
        if not isinstance(answer, Welcome):
            raise WorkerLost(f"The coordinator at {self.joining.host}:{self.joining.port} did not answer.")
        self._remember(answer.coordinator)
        self._peers.settle(answer.secret)
        self.silence_seconds, self.beat_seconds = answer.silence_seconds, answer.beat_seconds
        self.up_bytes_per_second = answer.up_bytes_per_second or math.inf
        if answer.links:
            self._shape(answer.links)
        self.endpoint.silence_seconds = min(self.endpoint.silence_seconds, answer.silence_seconds * 2 / 3)
        self.on_joined()

    def _remember(self, coordinator: str) -> None:
        """From now on the coordinator's key is enough. Refused where its name is another key's."""
        if self._credentials is None or not self.channel.peer_key:
            return
        name = "".join(sign for sign in coordinator[:64] if sign.isprintable()) or "coordinator"
        try:
            self.is_new_to_each_other = self._credentials.book.join(self.channel.peer_key, name, Role.COORDINATOR)
        except (BadFile, BadValue):
            return  # it cannot be kept: the token will be asked for again

    def _answer(self) -> Said | None:
        """What the coordinator says to a hello; None: nothing."""
        data = self.channel.receive(self.joining.limit_seconds)
        try:
            return decode_from_coordinator(data) if data is not None else None
        except Refused as error:
            raise Refused(
                f"The coordinator at {self.joining.host}:{self.joining.port} says what manyhands {__version__} cannot "
                f"read: {error.message}",
                hint="Install the same version of manyhands on both.",
            ) from error

    def _shape(self, links: Mapping[str, Shape]) -> None:
        """From now on what leaves to these peers does so as over such links; to others as before."""
        for peer, shape in links.items():
            rate = math.inf if shape.bytes_per_second is None else shape.bytes_per_second
            self.links[peer] = Link(max(rate, STOPPED_BYTES_PER_SECOND), shape.delay_seconds)
        self.endpoint.shape(self.links, self.up_bytes_per_second)

    def _arrivals(self) -> tuple[Arrival, ...]:
        """How fast messages of other devices came, since this was last asked; from any thread."""
        timed, now = self.endpoint.mailbox.take_timed(), time.monotonic()
        return tuple(
            Arrival(one.source, one.bytes, one.seconds, now - one.ended_at)
            for one in timed
            if one.source != COORDINATOR
        )

    def _standing(self) -> Standing | None:
        """How far this worker is in the generation it takes part in; None where it takes part in none."""
        generation = self._at_work
        if generation is None:
            return None
        prepared, box = self.prepared, self.endpoint.mailbox
        executor = prepared.executor if prepared is not None else None
        missing = self.endpoint.missing_peers()
        return Standing(
            generation, step=executor.step if executor is not None else -1,
            moved=box.moved + (executor.actions_done if executor is not None else 0),
            is_busy=not missing and not box.is_waiting(self._main_thread), waits_for=tuple(missing or box.waited_for()),
            is_connecting=bool(missing), silent=self.endpoint.silent_peers(), refused=dict(box.refused_by),
        )  # fmt: skip

    def _listen(self) -> None:
        """The control thread: passes commands on, stops at once what must stop, and beats."""
        heard = time.monotonic()
        try:
            while True:
                data = self.channel.receive(self.beat_seconds)
                self._say(Beat(self._arrivals(), self._standing()))
                self._tell_of_copies()  # here too: no round may be fed before they are known to have come
                if self.joining.parent and os.getppid() != self.joining.parent:
                    raise WorkerLost("The process that started this worker is gone.")
                if data is None:
                    if time.monotonic() - heard > self.silence_seconds:
                        raise WorkerLost(f"The coordinator has said nothing for {self.silence_seconds:g} s.")
                    continue
                heard = time.monotonic()
                self._hear(decode_from_coordinator(data))
        except Exception as error:
            self.gone = error if isinstance(error, ManyhandsError) else WorkerLost(f"Control ended: {error!r}")
            self.endpoint.mailbox.interrupt(self.gone)
            self.commands.put(Leave())
            if not self._ended.wait(GRACE_SECONDS) and self.owns_process:
                os._exit(WorkerLost.exit_code)  # the main thread is stuck in a call that nothing interrupts

    def _hear(self, message: Said) -> None:
        if isinstance(message, Beat):
            return
        if isinstance(message, AskClock):
            self._say(Clock(message.ticket, time.monotonic(), time.time()))
        elif isinstance(message, Send):
            self._send_state(message)
        elif isinstance(message, Hold):
            self._make_room(message)
        elif isinstance(message, EndAt):
            prepared = self.prepared
            if prepared is not None and prepared.generation == message.generation and prepared.executor is not None:
                prepared.executor.end_at(message.step)
        elif isinstance(message, Retain):
            self.keeping.retain(
                message.first, message.last, is_between_kept=message.is_between_kept
            )  # not what this generation gives: it is at `first`
        elif isinstance(message, Reshape):
            self._shape(message.links)
        elif isinstance(message, Evict):
            raise WorkerLost(f"The run goes on without this worker: {message.reason}.")
        else:
            if isinstance(message, (Stop, Leave)):
                self.stopped = getattr(message, "generation", self.stopped)
                self.leaving = isinstance(message, Leave)
                self.endpoint.mailbox.interrupt(_Stopped("stopped by the coordinator"))
            self.commands.put(message)

    # Working

    def _obey(self, command: Said) -> None:
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
                self._say(measured(command, self.endpoint.name, self.joining))
            elif isinstance(command, ProbeLinks):
                self._prepare_probe(command)
            elif isinstance(command, Knock):
                self._say(Knocked(generation, self.probes.run(command.peers, command.limit_seconds)))
            elif isinstance(command, AskIds):
                self._say(Ids(generation, self.silo.digests() if self.silo is not None else b""))
            elif isinstance(command, Survey):
                self.keeping.begin(command.since)
                self._say(Holding(generation, *self.keeping.listing()))
            elif isinstance(command, Stop):
                if command.diagnose_step >= 0 and self.prepared is not None and self.prepared.executor is not None:
                    self._say(Diagnosis(generation, self.prepared.executor.diagnose(command.diagnose_step)))
                if command.with_log and self.prepared is not None and self.prepared.executor is not None:
                    self._say(Done(generation, _apart(self.prepared.executor.log, self.prepared.state_bytes)))
                self._drop()
        except _Stopped:
            pass
        except Exception as error:
            found = as_error(error, self.endpoint.name)
            if found is not error:
                with contextlib.suppress(OSError):  # its log may be on a full disk
                    print("".join(traceback.format_exception(error)), file=sys.stderr)
            self._report(generation, type(found).__name__, found.message, found.hint)
        finally:
            self._at_work = None

    def _report(self, generation: int, kind: str, message: str, hint: str) -> None:
        executor = self.prepared.executor if self.prepared is not None else None
        with contextlib.suppress(ManyhandsError):
            self._say(Failed(generation, kind, message, hint, executor.step if executor is not None else -1))

    def _drop(self) -> None:
        """End a generation. What state it has come to is kept, unless it is in the middle of a step."""
        self.probing = None
        if self.prepared is None:
            return
        prepared, self.prepared = self.prepared, None
        self.endpoint.mailbox.interrupt(_Stopped("the run has ended"))
        self.keeping.expect_nobody()
        executor = prepared.executor
        if executor is None:
            return
        executor.close()
        if executor.plan.is_training and executor.settled_step is not None:
            self.keeping.keep(executor.settled_step, *_state_of(executor, copy=False))

    def _prepare(self, command: Prepare) -> None:
        """Build this device's part and connect to the others; weights come with the start."""
        self._drop()
        self.keeping.begin(command.since)
        if command.job is None:
            self.endpoint.mailbox.open(command.generation, {})
            self.prepared = _Prepared(command, None)
        else:
            self._build(command, command.job)
        self._connect(command)
        self._say(Ready(command.generation))

    def _graph_of(self, job: Job) -> Graph:
        """The job's graph; it may be the one this worker was given before."""
        if job.graph is not None:
            self._graphs = {job.digest: graph_of(job.graph, job.network)}
        if job.digest not in self._graphs:
            raise BadPlan(f"The job's graph is {job.digest:.16}; this worker was given none of that digest.")
        return self._graphs[job.digest]

    def _build(self, command: Prepare, job: Job) -> None:
        self.is_under_way = job.plan.is_training
        graph = self._graph_of(job)
        network = graph.network
        plan = resolve(job.plan, network)
        if self.endpoint.name not in plan.devices:
            raise BadPlan(f"The plan does not name {self.endpoint.name}.")
        schedule = Schedule(plan, network)
        specs = {spec.name: spec for spec in graph.weights}
        tensors = state.empty(job.state)
        own = state.of(state.WEIGHT, tensors)
        work = schedule.lowering.work[self.endpoint.name]
        check_weights({name: _part(specs[name], work.weight_box(name)) for name in own if name in specs}, own)
        if graph.loss is not None:
            of_loss = state.of(state.LOSS, tensors)
            check_weights({spec.name: spec for spec in graph.loss.weights}, of_loss)
            graph.loss.state.update(of_loss)
        device = torch.device(self.joining.compute)
        weights = Weights({n: t.to(device).requires_grad_(specs[n].trainable) for n, t in own.items()}, device)
        store_weights(graph, weights, job.stored)
        stepper = None
        if job.optimizer is not None and plan.is_training:
            stepper = build(Optimizer.from_dict(job.optimizer), weights.trainable())
        setting = Setting(
            seed=job.seed, kernels=job.kernels, torch_device=self.joining.compute,
            trace_steps=range(job.trace_first, job.trace_last), memory_step=job.memory_step,
            watch_every=job.watch_every,
            with_targets=job.with_targets, slowdown=self.joining.slowdown, silo=self.silo, held=frozenset(job.held),
            shelf=self._shelf_for(graph, schedule, job),
        )  # fmt: skip
        self.endpoint.mailbox.limit_seconds = job.wait_limit_seconds
        self.endpoint.sent_bytes.clear()
        self.endpoint.mailbox.received_bytes.clear()
        executor = Executor(graph, schedule, self.endpoint, weights, stepper, setting)
        expected = executor.expected()
        self.endpoint.mailbox.open(command.generation, expected, job.steps_done, plan.steps_per_round)
        for source, names in job.sources.items():
            if source != self.endpoint.name:
                self.endpoint.mailbox.expect(source, STATE, state.byte_count(_listed(job, names)))
        if setting.shelf is not None and not job.is_laid:
            self.endpoint.mailbox.expect(COORDINATOR, SAMPLES, setting.shelf.bytes)
        self.prepared = _Prepared(command, executor)

    def _shelf_for(self, graph: Graph, schedule: Schedule, job: Job) -> Shelf | None:
        """Where the samples are that are laid out here: one that was filled before, or one to be filled."""
        kept, self.shelf = self.shelf, None
        if not job.shelf:
            return None
        if job.is_laid:
            if kept is None or kept.key != job.shelf or not kept.is_full:
                raise WorkerLost(f"{self.endpoint.name} was to have the samples; it has not.")
            self.shelf = kept
        else:
            own = feed_parts(graph, schedule.lowering, self.endpoint.name, targets=job.with_targets, held=job.held)
            self.shelf = Shelf(self.endpoint.name, own, job.laid, job.shelf)
        return self.shelf

    def _connect(self, command: Prepare | ProbeLinks) -> None:
        """To everybody else of the run; whoever never comes is not waited for once the run was stopped."""
        limit_seconds = CONNECT_SECONDS * self.joining.patience
        deadline = time.monotonic() + limit_seconds
        attempt = Attempt(lambda: self.endpoint.connect(command.peers, limit_seconds), "connect")
        try:
            while not attempt.is_over(0.1):
                self._check_stopped(command.generation)
        except ManyhandsError as error:
            if not error.is_before_proof:
                raise
            with contextlib.suppress(OSError):  # its log may be on a full disk
                print(error, file=sys.stderr)
            while time.monotonic() < deadline:
                self._check_stopped(command.generation)
                time.sleep(0.1)
            raise self._unreached(command.peers, limit_seconds) from error

    def _check_stopped(self, generation: int) -> None:
        if self.leaving or self.gone is not None or self.stopped >= generation:
            raise _Stopped("stopped by the coordinator")

    def _unreached(self, peers: Mapping[str, Address], limit_seconds: float) -> TimedOut:
        """What the coordinator is told where somebody did not prove that it knows the token, whatever it did instead
        and however soon: see `member_probes`. What the network said is in this worker's own log."""
        own = self.endpoint.name
        missing = [
            f"{name} at {address.host}:{address.port}"
            for name, address in peers.items()
            if address.is_dialled_by(own, name) and not self.endpoint.is_connected(name)
        ]
        return TimedOut(
            f"{own} could not connect to {', '.join(missing)} within {limit_seconds:g} s: no member answers there.",
            hint="Does a firewall let it through? manyhands doctor says who cannot reach whom; the log of "
            f"{own} says what the network answered.",
        )

    def _train(self, command: Start) -> None:
        prepared = self.prepared
        if prepared is None or prepared.generation != command.generation:
            return
        self._give(prepared, command.first_step)
        executor = prepared.executor
        if executor is None:
            return
        self._load_state(prepared, executor, command)
        executor.rest()
        stride = executor.plan.steps_per_round
        if stride > 1:
            executor.on_update = lambda step: self._say(Stepped(command.generation, step))
        for step in range(command.first_step, command.last_step, stride):
            done = min(step + stride, command.last_step)
            if executor.last_step is not None and executor.last_step <= step:
                return  # to be stopped
            result = executor.round(step, done - step)
            assert executor.settled_step is not None, "a round has ended"
            done = executor.settled_step
            if done == step:
                return  # nothing was fed: to be stopped
            self._say(  # before there is a copy of it
                Progress(
                    command.generation, done - 1, result.seconds, tuple(result.losses), tuple(result.staleness),
                    self._arrivals(), _sent(self.endpoint.sent_bytes, prepared.state_bytes), _seen(executor),
                    tuple(result.sums), result.not_finite_from,
                )
            )  # fmt: skip
            if done in command.snapshots or is_due(step, done, command.backup_every):
                self._keep(prepared, done, *_state_of(executor, copy=True))
            self._tell_of_copies()
        if executor.last_step is not None and executor.last_step < command.last_step:
            return
        self._say(Done(command.generation, _apart(executor.log, prepared.state_bytes)))
        self.is_under_way = False

    def _give(self, prepared: _Prepared, step: int) -> None:
        """Others start with what this worker has."""
        kept = self.keeping.at(step)
        for peer, names in prepared.command.gives.items():
            self._has(kept, names, step)
            self._send_tensors(prepared, peer, step, STATE, [kept[name] for name in names])

    def _has(self, kept: dict[str, torch.Tensor], names: Iterable[str], step: int) -> None:
        """Else another of its name had it: that one is lost, and everybody is asked again."""
        for name in names:
            if name not in kept:
                raise WorkerLost(f"{self.endpoint.name} was to have {name:.80} after step {step}; it has not.")

    def _load_state(self, prepared: _Prepared, executor: Executor, command: Start) -> None:
        """Weights and the optimiser's state, from here and from others. They are a copy to come back to, too."""
        job, step = prepared.command.job, command.first_step
        assert job is not None
        kept = self.keeping.at(step)
        tensors: dict[str, torch.Tensor] = {}
        for source, names in job.sources.items():
            if source == self.endpoint.name:
                self._has(kept, names, step)
                tensors |= {name: kept[name] for name in names}
                continue
            own = state.empty(_listed(job, names))
            self.endpoint.mailbox.receive(source, step, STATE, list(own.values()))
            tensors |= own
        self._check_sums(prepared.generation, job, tensors)
        with torch.no_grad():
            for name, tensor in state.of(state.WEIGHT, tensors).items():
                executor.weights.tensors[name].copy_(tensor)
            if executor.loss is not None:
                for name, tensor in state.of(state.LOSS, tensors).items():
                    executor.loss.piece.weights.tensors[name].copy_(tensor)
        shelf = executor.setting.shelf
        if shelf is not None and not job.is_laid:
            self.endpoint.mailbox.receive(COORDINATOR, step, SAMPLES, shelf.arrays)
            shelf.is_full = True
        if executor.stepper is not None and job.steps_done:
            executor.stepper.load(state.of(state.OPTIMIZER, tensors), job.scalars, job.steps_done)
        executor.settled_step = step
        if command.backup_every or step in command.snapshots:
            own = {name: tensor for name, tensor in tensors.items() if state.weight_of(name)}
            self._keep(prepared, step, own, job.scalars)

    def _check_sums(self, generation: int, job: Job, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse to start with state that is not what it was when it was kept, here or at another worker."""
        for source, sums in job.checksums.items():
            for name, wanted in sums.items():
                if name in tensors and checksum(tensors[name]) != wanted:
                    self._say(Corrupt(generation, source, name))
                    raise _Stopped("the coordinator looks for another copy")

    def _keep(self, prepared: _Prepared, step: int, tensors: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
        """Keep a copy and say that it is at hand; it travels when asked for, while training goes on."""
        sums = checksums(tensors.values())
        self.keeping.keep(step, tensors, scalars, sums)
        listed = state.entries(tensors)
        prepared.offered[step] = tuple(tensors)
        self._say(State(prepared.generation, step, None if listed == prepared.said else listed, scalars, sums))
        prepared.said = listed

    def _send_state(self, message: Send) -> None:
        prepared = self.prepared
        if prepared is None or prepared.generation != message.generation:
            return
        kept, names = self.keeping.at(message.step), prepared.offered.get(message.step)
        if names is None or not all(name in kept for name in names):  # of a device without weights: an empty message
            return
        if message.attempt:  # what came was not what was sent: is it still what was offered?
            known, sums = self.keeping.checksums_at(message.step), checksums(kept[name] for name in names)
            if sums != tuple(known.get(name, 0) for name in names):
                self._say(State(prepared.generation, message.step, None, {}, sums, has_changed=True))
                return
        name = topic(message.step, message.attempt)
        self._send_tensors(prepared, message.to, message.step, name, [kept[one] for one in names])

    def _tell_of_copies(self) -> None:
        """Say which copies of others have come."""
        for held in self.keeping.collect():
            self._say(held)

    def _send_tensors(
        self, prepared: _Prepared, to: str, step: int, name: str, tensors: Iterable[torch.Tensor]
    ) -> None:
        parts = [_sendable(tensor) for tensor in tensors]
        prepared.state_bytes[to] += sum(part.numel() * part.element_size() for part in parts)
        self.endpoint.send(to, step, name, parts)

    def _make_room(self, message: Hold) -> None:
        if self.prepared is not None and self.prepared.generation == message.generation:
            self.keeping.make_room(message)
            self._say(Holds(message.generation, message.source, message.step, message.attempt))

    def _prepare_probe(self, command: ProbeLinks) -> None:
        """Connect to those who take part; it begins when everybody is ready."""
        self._drop()
        look = pair_probe.expected(command.devices, self.endpoint.name, command.sizes) if command.sizes else None
        expected = look if look is not None else probing.expected(command.devices, self.endpoint.name)
        self.endpoint.mailbox.open(command.generation, expected)
        self._connect(command)
        self.probing = command
        self._say(Ready(command.generation))

    def _probe(self, command: ProbeLinks) -> None:
        self.probing = None
        if command.sizes:
            links = pair_probe.run(self.endpoint, command.devices, command.sizes)
            self._say(Probed(command.generation, 0.0, 0.0, 0.0, links))
            return
        found = probing.run(self.endpoint, command.devices)
        self._say(Probed(command.generation, *found.of(len(command.devices)), found.links))


def _part(spec: WeightSpec, box: Box | None) -> WeightSpec:
    """What a device has of a weight: by channels, its own part."""
    return spec if box is None else msgspec.structs.replace(spec, shape=box.shape)


def _listed(job: Job, names: Iterable[str]) -> list[TensorEntry]:
    entries = {entry.name: entry for entry in job.state}
    return [entries[name] for name in names]


def _state_of(executor: Executor, *, copy: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights, buffers and the optimiser's state of a device, by full name, and what is no tensor of it."""
    tensors, scalars = executor.stepper.state(copy=False) if executor.stepper is not None else ({}, {})
    found = state.named(state.WEIGHT, executor.weights.tensors) | state.named(state.OPTIMIZER, tensors)
    return (state.plain(found) if copy else {name: tensor.detach() for name, tensor in found.items()}), scalars


def _apart(log: DeviceLog, state_bytes: Mapping[str, int]) -> DeviceLog:
    """A device's account with what was sent of its state apart from what the plan says."""
    return msgspec.structs.replace(log, sent_bytes=_sent(log.sent_bytes, state_bytes), state_bytes=dict(state_bytes))


def _sent(sent_bytes: Mapping[str, int], state_bytes: Mapping[str, int]) -> dict[str, int]:
    """What was sent for the plan."""
    found = {to: count - state_bytes.get(to, 0) for to, count in sent_bytes.items()}
    return {to: count for to, count in found.items() if count}


def _seen(executor: Executor) -> Seen | None:
    """What this device did in the round that has ended, if somebody looks at it."""
    recorder = executor.recorder
    if not recorder.is_watched:
        return None
    import psutil

    return Seen(thinned(recorder.glimpses), int(psutil.Process().memory_info().rss), recorder.log.peak_bytes)


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()


class _Stopped(ManyhandsError):
    """The coordinator said stop: nothing to report."""
