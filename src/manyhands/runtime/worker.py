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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.engine.channel import Channel, connect
from manyhands.engine.security import Security, is_loopback
from manyhands.engine.tcp import TcpEndpoint
from manyhands.executor.executor import Executor, Setting
from manyhands.executor.messages import COORDINATOR
from manyhands.executor.optimizers import build, step_bytes_per_second
from manyhands.facts.cluster import Link
from manyhands.facts.errors import BadPlan, ManyhandsError, Refused, WorkerLost
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan_check import resolve
from manyhands.facts.version import __version__
from manyhands.graph.document import read_document
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import store_weights
from manyhands.graph.weights import Weights
from manyhands.profiler.measure import measure_network
from manyhands.profiler.steps import random_state
from manyhands.profiler.this_machine import copy_bytes_per_second, identify
from manyhands.profiler.whole import scaled_to_steps
from manyhands.runtime import probing, state
from manyhands.runtime.attempt import Attempt
from manyhands.runtime.control import (
    PROTOCOL,
    AskClock,
    Beat,
    Clock,
    Diagnosis,
    Done,
    Facts,
    Failed,
    Hello,
    Job,
    Leave,
    Measure,
    Measured,
    Prepare,
    Probed,
    ProbeLinks,
    Progress,
    Ready,
    Refusal,
    Said,
    Send,
    Start,
    State,
    Stop,
    Welcome,
    decode,
    encode,
)
from manyhands.runtime.processes import keep_memory
from manyhands.schedule.policy import Schedule

BEAT_SECONDS = 0.5
GRACE_SECONDS = 10.0
"""How long the main thread may go on in one torch call after the coordinator has gone."""
CONNECT_SECONDS = 30.0
SWITCH_SECONDS = 2e-4
"""How long the engine's thread waits for Python: its default, 5 ms, is many times a message's own time."""


@dataclass
class Joining:
    """Where and as whom a worker joins."""

    host: str
    port: int
    token: str
    name: str = ""
    compute: str = "cpu"
    threads: int = 0
    limit_seconds: float = 60.0
    encrypted: bool | None = None
    """None: unless the coordinator is on this very machine."""
    patience: float = 1.0
    """How many times longer than usual to wait for anybody."""
    parent: int = 0
    """A process without which this one ends too; 0: none."""


@dataclass
class _Prepared:
    generation: int
    job: Job
    executor: Executor
    snapshots: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


class Worker:
    """One device of a cluster, for as long as its coordinator lives."""

    def __init__(self, joining: Joining) -> None:
        self.joining = joining
        sys.setswitchinterval(SWITCH_SECONDS)
        keep_memory()
        if joining.threads:
            torch.set_num_threads(joining.threads)
        if joining.compute != "cpu":
            _prepare_gpu(joining.compute)
        self.channel, security = _reach(joining)
        name = joining.name or socket.gethostname()
        self.endpoint = TcpEndpoint(name, security, host=self.channel.local_host)
        self.commands: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self.prepared: _Prepared | None = None
        self.probing: ProbeLinks | None = None
        self.stopped = -1
        """The last generation that was stopped."""
        self.leaving = False
        self._ended = threading.Event()
        self.gone: ManyhandsError | None = None
        self.silence_seconds = 0.0
        """A coordinator that says nothing for so long is gone; it beats too."""

    def run(self) -> None:
        """Join, then work until told to leave. Raises where the coordinator refuses or is lost."""
        try:
            self._join()
            threading.Thread(target=self._listen, name="control", daemon=True).start()
            while not isinstance(command := self.commands.get(), Leave):
                self._obey(command)
            if self.gone is not None and not self.leaving:
                raise self.gone
        finally:
            self._drop()
            self.endpoint.close()
            self.channel.close()
            self._ended.set()

    # Talking

    def _say(self, message: Said) -> None:
        self.channel.send(encode(message))

    def _join(self) -> None:
        host, port = self.endpoint.address
        machine = identify()
        facts = Facts(
            machine=machine.text, cores=machine.cores, threads=torch.get_num_threads(), torch=str(torch.__version__),
            memory_bytes=_memory_bytes(self.joining.compute), compute=self.joining.compute, pid=os.getpid(),
        )  # fmt: skip
        self._say(Hello(__version__, PROTOCOL, self.endpoint.name, host, port, facts))
        data = self.channel.receive(self.joining.limit_seconds)
        answer = decode(data) if data is not None else None
        if isinstance(answer, Refusal):
            raise Refused(answer.reason, hint=answer.hint)
        if not isinstance(answer, Welcome):
            raise WorkerLost(f"The coordinator at {self.joining.host}:{self.joining.port} did not answer.")
        self.silence_seconds = answer.silence_seconds
        if answer.links:
            shapes = {
                peer: Link(shape.bytes_per_second or math.inf, shape.delay_seconds)
                for peer, shape in answer.links.items()
            }
            self.endpoint.shape(shapes, answer.up_bytes_per_second or math.inf)
        self.endpoint.silence_seconds = min(self.endpoint.silence_seconds, answer.silence_seconds * 2 / 3)

    def _listen(self) -> None:
        """The control thread: passes commands on, stops at once what must stop, and beats."""
        heard = time.monotonic()
        try:
            while True:
                data = self.channel.receive(BEAT_SECONDS)
                self._say(Beat())
                if self.joining.parent and os.getppid() != self.joining.parent:
                    raise WorkerLost("The process that started this worker is gone.")
                if data is None:
                    if time.monotonic() - heard > self.silence_seconds:
                        raise WorkerLost(f"The coordinator has said nothing for {self.silence_seconds:g} s.")
                    continue
                heard = time.monotonic()
                self._hear(decode(data))
        except Exception as error:
            self.gone = error if isinstance(error, ManyhandsError) else WorkerLost(f"Control ended: {error!r}")
            self.endpoint.mailbox.interrupt(self.gone)
            self.commands.put(Leave())
            if not self._ended.wait(GRACE_SECONDS):
                os._exit(WorkerLost.exit_code)  # the main thread is stuck in a call that nothing interrupts

    def _hear(self, message: Said) -> None:
        if isinstance(message, Beat):
            return
        if isinstance(message, AskClock):
            self._say(Clock(message.ticket, time.monotonic()))
        elif isinstance(message, Send):
            self._send_state(message)
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
        try:
            if isinstance(command, Prepare):
                self._prepare(command)
            elif isinstance(command, Start) and self.probing is not None:
                self._probe(self.probing)
            elif isinstance(command, Start):
                self._train(command)
            elif isinstance(command, Measure):
                self._measure(command)
            elif isinstance(command, ProbeLinks):
                self._prepare_probe(command)
            elif isinstance(command, Stop):
                if command.diagnose_step >= 0 and self.prepared is not None:
                    self._say(Diagnosis(generation, self.prepared.executor.diagnose(command.diagnose_step)))
                self._drop()
        except _Stopped:
            pass
        except ManyhandsError as error:
            self._report(generation, type(error).__name__, error.message, error.hint)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            print(text, file=sys.stderr)
            self._report(generation, "Internal", f"{type(error).__name__}: {error}", text[-2000:])

    def _report(self, generation: int, kind: str, message: str, hint: str) -> None:
        step = self.prepared.executor.step if self.prepared is not None else -1
        with contextlib.suppress(ManyhandsError):
            self._say(Failed(generation, kind, message, hint, step))

    def _drop(self) -> None:
        self.probing = None
        if self.prepared is not None:
            self.endpoint.mailbox.interrupt(_Stopped("the run has ended"))
            self.prepared.executor.close()
            self.prepared = None

    def _prepare(self, command: Prepare) -> None:
        """Build this device's part and connect to the others; weights come with the start."""
        self._drop()
        job = command.job
        graph = _graph(job.graph, job.network)
        plan = resolve(job.plan, job.network)
        if self.endpoint.name not in plan.devices:
            raise BadPlan(f"The plan does not name {self.endpoint.name}.")
        schedule = Schedule(plan, job.network)
        specs = {spec.name: spec for spec in graph.weights}
        tensors = state.empty(job.state)
        own = state.of(state.WEIGHT, tensors)
        if graph.loss is not None:
            graph.loss.state.update(state.of(state.LOSS, tensors))
        device = torch.device(self.joining.compute)
        weights = Weights({n: t.to(device).requires_grad_(specs[n].trainable) for n, t in own.items()}, device)
        store_weights(graph, weights, job.stored)
        stepper = None
        if job.optimizer is not None and plan.is_training:
            stepper = build(Optimizer.from_dict(job.optimizer), weights.trainable())
        setting = Setting(
            seed=job.seed, kernels=job.kernels, torch_device=self.joining.compute,
            trace_steps=range(job.trace_first, job.trace_last), memory_step=job.memory_step,
            with_targets=job.with_targets,
        )  # fmt: skip
        self.endpoint.mailbox.limit_seconds = job.wait_limit_seconds
        self.endpoint.sent_bytes.clear()
        self.endpoint.mailbox.received_bytes.clear()
        executor = Executor(graph, schedule, self.endpoint, weights, stepper, setting)
        expected = executor.expected()
        expected[(COORDINATOR, "state")] = state.byte_count(job.state)
        self.endpoint.mailbox.open(command.generation, expected, job.steps_done)
        self.prepared = _Prepared(command.generation, job, executor)
        self._connect(command)
        self._say(Ready(command.generation))

    def _connect(self, command: Prepare | ProbeLinks) -> None:
        """To everybody else of the run; whoever never comes is not waited for once the run was stopped."""
        attempt = Attempt(
            lambda: self.endpoint.connect(command.peers, CONNECT_SECONDS * self.joining.patience), "connect"
        )
        while not attempt.is_over(0.1):
            if self.leaving or self.gone is not None or self.stopped >= command.generation:
                raise _Stopped("stopped by the coordinator")

    def _train(self, command: Start) -> None:
        prepared = self.prepared
        if prepared is None or prepared.generation != command.generation:
            return
        self._load_state(prepared, command.first_step)
        for step in range(command.first_step, command.last_step):
            result = prepared.executor.round(step)
            if step + 1 in command.snapshots:
                self._snapshot(prepared, step + 1)
            self._say(Progress(command.generation, step, result.loss, result.seconds))
        self._say(Done(command.generation, prepared.executor.log))

    def _load_state(self, prepared: _Prepared, step: int) -> None:
        job, executor = prepared.job, prepared.executor
        tensors = state.empty(job.state)
        self.endpoint.mailbox.receive(COORDINATOR, step, "state", list(tensors.values()))
        with torch.no_grad():
            for name, tensor in state.of(state.WEIGHT, tensors).items():
                executor.weights.tensors[name].copy_(tensor)
            if executor.loss is not None:
                for name, tensor in state.of(state.LOSS, tensors).items():
                    executor.loss.piece.weights.tensors[name].copy_(tensor)
        if executor.stepper is not None and job.steps_done:
            executor.stepper.load(state.of(state.OPTIMIZER, tensors), job.scalars, job.steps_done)

    def _snapshot(self, prepared: _Prepared, step: int) -> None:
        """Keep a copy of the state and offer it; it travels when asked for, while training goes on."""
        executor = prepared.executor
        tensors, scalars = executor.stepper.state() if executor.stepper is not None else ({}, {})
        kept = state.plain(state.named(state.WEIGHT, executor.weights.tensors) | state.named(state.OPTIMIZER, tensors))
        prepared.snapshots[step] = kept
        self._say(State(prepared.generation, step, state.entries(kept), scalars))

    def _send_state(self, message: Send) -> None:
        prepared = self.prepared
        if prepared is None or prepared.generation != message.generation:
            return
        kept = prepared.snapshots.pop(message.step, None)
        if kept is not None:
            self.endpoint.send(COORDINATOR, prepared.job.steps_done, f"state {message.step}", list(kept.values()))

    def _measure(self, command: Measure) -> None:
        """Time the layers of a network here, with made-up weights."""
        graph = _graph(command.graph, command.network)
        graph.state.update(random_state(graph))
        profile = measure_network(
            graph, ladder=command.ladder, seconds=command.seconds, kernels=command.kernels, device=self.endpoint.name,
            torch_device=self.joining.compute,
        )  # fmt: skip
        if command.optimizer is not None:
            optimizer = Optimizer.from_dict(command.optimizer)
            profile = scaled_to_steps(graph, profile, command.ladder[-1], lambda weights: _update(optimizer, weights),
                                      torch_device=self.joining.compute)  # fmt: skip
        rate = step_bytes_per_second(graph, command.optimizer, self.joining.compute) or copy_bytes_per_second()
        self._say(Measured(command.generation, profile, rate))

    def _prepare_probe(self, command: ProbeLinks) -> None:
        """Connect to those who take part; it begins when everybody is ready."""
        self._drop()
        self.endpoint.mailbox.open(command.generation, probing.expected(command.devices, self.endpoint.name))
        self._connect(command)
        self.probing = command
        self._say(Ready(command.generation))

    def _probe(self, command: ProbeLinks) -> None:
        self.probing = None
        found = probing.run(self.endpoint, command.devices)
        self._say(Probed(command.generation, *found.of(len(command.devices)), found.links))


class _Stopped(ManyhandsError):
    """The coordinator said stop: nothing to report."""


def _reach(joining: Joining) -> tuple[Channel, Security]:
    """The coordinator, over an encrypted connection; on this very machine over whichever kind it has."""
    if joining.encrypted is not None:
        kinds = [joining.encrypted]
    else:
        kinds = [False, True] if is_loopback(joining.host) else [True]
    refusal: Refused | None = None
    for encrypted in kinds:
        security = Security(joining.token, encrypted=encrypted, patience=joining.patience)
        try:
            return connect(joining.host, joining.port, security, joining.limit_seconds), security
        except Refused as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _prepare_gpu(compute: str) -> None:
    """Refuse one that is not there; compute as the others do: the same bits every time, no numbers cut short."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(compute.partition(":")[2] or 0) >= count:
        raise Refused(f"--compute {compute} was asked for; torch sees {count} GPU(s) here.")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def _update(optimizer: Optimizer, weights: Weights) -> Callable[[], None]:
    stepper = build(optimizer, weights.trainable())

    def update() -> None:
        stepper.step()
        stepper.zero()

    return update


def _graph(document: dict[str, Any], network: Any) -> Graph:
    """A graph from the wire, checked, with the description that came along in place of a new one."""
    graph = read_document(document)
    graph.__dict__["network"] = network
    return graph


def _memory_bytes(compute: str) -> int:
    import psutil

    if compute.startswith("cuda"):
        return int(torch.cuda.get_device_properties(torch.device(compute)).total_memory)
    return int(psutil.virtual_memory().total)
