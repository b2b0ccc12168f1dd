"""Interprets a schedule's actions under a virtual clock.

Each device has one processor and sends and receives in parallel with it. Messages of one pair go one after another, as
on one connection; pairs share links and ports fairly. The loop takes the next event (a computation or a transfer that
ends), moves the clock there, and resumes what was waiting for it: exactly what an executor does with real devices, with
`planner.cost` in place of torch and `links` in place of sockets.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadSchedule
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.facts.units import format_bytes
from manyhands.planner.cost import CostModel
from manyhands.schedule.actions import (
    Action,
    Await,
    Backward,
    Discard,
    Forward,
    Loss,
    Message,
    Receive,
    Reduce,
    ReduceKey,
    Send,
    Step,
    is_urgent,
)
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.memory import DeviceMemory
from manyhands.schedule.policies import DONE, WAIT, DeviceState, Policy
from manyhands.schedule.policy import Schedule
from manyhands.schedule.reduction import Counts, SumFlows, flow_bytes, phases
from manyhands.simulator.flows import FlowBundle, FlowShape, Transfer, few_sizes
from manyhands.simulator.links import LinkNetwork
from manyhands.simulator.result import DeviceResult, Simulation, Span

MOST_SPANS = 2_000_000


def simulate(
    plan: Plan,
    network: Network,
    cluster: Cluster,
    profile: Profile | None = None,
    *,
    keep_spans: bool = True,
    policies: dict[str, Policy] | None = None,
) -> Simulation:
    """Simulate one round of `plan`. Without a profile, times are estimated from the catalogue and the result says
    so."""
    resolved = resolve(plan, network, cluster)
    estimated = profile is None
    profile = profile or estimate_cluster(network, cluster)
    schedule = Schedule(resolved, network)
    costs = CostModel(network, cluster, profile)
    run = _Run(schedule, cluster, costs, policies or schedule.policies(), keep_spans)
    result = run.to_the_end()
    if estimated or profile.is_estimated:
        by = "the device catalogue" if any(device.estimated for device in cluster.devices) else "the devices' speed"
        result.warnings.append(f"Times are estimated from {by}, not measured.")
    return result


class SumPhase(NamedTuple):
    """One phase of a sum (`schedule.reduction.phases`); the next one begins when it is over."""

    reduce: Reduce
    number: int

    @property
    def flows(self) -> SumFlows:
        return phases(self.reduce)[self.number]


@dataclass
class _Device:
    """A device during a simulation."""

    name: str
    work: DeviceWork
    policy: Policy
    memory: DeviceMemory
    result: DeviceResult
    copies: bool
    """Whether moving bytes in and out of the network takes its time."""
    log: list[Action] = field(default_factory=list)
    arrived: set[tuple[str, Message]] = field(default_factory=set)
    mail: Counter[tuple[str, Message]] = field(default_factory=Counter)
    held: Action | None = None
    """An action that waits: it is tried again when something arrives."""
    open_reductions: set[ReduceKey] = field(default_factory=set)
    norm_given: ReduceKey | None = None
    """The last norm of gradients that it has given its part of."""
    transfers: int = 0
    transfers_since: float = 0.0
    is_done: bool = False

    def __post_init__(self) -> None:
        self.state = DeviceState(self.arrived)


class _Run:
    def __init__(
        self, schedule: Schedule, cluster: Cluster, costs: CostModel, policies: dict[str, Policy], keep_spans: bool
    ) -> None:
        self.schedule, self.cluster, self.costs, self.keep_spans = schedule, cluster, costs, keep_spans
        self.plan = schedule.plan
        self.now = 0.0
        self.events: list[tuple[float, int, str, Any, int]] = []
        self.ticket = count()
        self.links = LinkNetwork(cluster)
        self.queues: dict[tuple[str, str], deque[Message]] = defaultdict(deque)
        """Messages of a pair that wait for the one before them: a channel delivers in order."""
        self.spans: list[Span] = []
        self.bytes_between: dict[tuple[str, str], float] = defaultdict(float)
        self.joined: dict[ReduceKey, int] = Counter()
        self.shapes: dict[tuple[object, ...], FlowShape] = {}
        self.summed: dict[FlowShape, Counts] = {}
        """The flows of sums, and the bytes they carried in all."""
        self.complete: set[ReduceKey] = set()
        self.waiting: dict[object, list[str]] = defaultdict(list)
        self.runnable: deque[str] = deque(policies)
        self.devices: dict[str, _Device] = {}
        for name, policy in policies.items():
            work = schedule.lowering.work[name]
            memory = DeviceMemory(self.plan, schedule.network, work.geometries, name)
            facts = cluster.device(name)
            result = DeviceResult(name, memory_bytes=facts.memory_bytes)
            self.devices[name] = _Device(name, work, policy, memory, result, self.costs.copies(name))

    def to_the_end(self) -> Simulation:
        self._let_run()
        while True:
            if self.links.must_settle(self.events[0][0] if self.events else math.inf):
                for party in self.links.settle(self.now):
                    if (ends := party.ends) < math.inf:  # else it waits, and its rate will change
                        self._at(ends, "sent", party, party.version)
            if not self.events:
                break
            self.now, _, kind, subject, version = heapq.heappop(self.events)
            if kind == "computed":
                self.runnable.append(subject)
            elif kind == "sent":
                if version == subject.version:
                    self._sent(subject)
            elif kind == "arrived":
                self._arrived(subject)
            else:
                self._start_phase(subject)
            self._let_run()
        stuck = [device for device in self.devices.values() if not device.is_done]
        if stuck:
            lines = [f"  {device.name} waits at '{device.held}'" for device in stuck[:8]]
            raise BadSchedule("The run does not end:\n" + "\n".join(lines))
        return self._result()

    def _at(self, seconds: float, kind: str, subject: Any, version: int = 0) -> None:
        heapq.heappush(self.events, (seconds, next(self.ticket), kind, subject, version))

    def _let_run(self) -> None:
        while self.runnable:
            self._advance(self.devices[self.runnable.popleft()])

    def _advance(self, device: _Device) -> None:
        """Take actions until one takes time or must wait."""
        while not device.is_done:
            action = device.held or self._next(device)
            if action is None:
                return
            if isinstance(action, (Reduce, Await, Receive, Step)) and not self._can_go_on(device, action):
                device.held = action
                return
            device.held = None
            if self._takes_time(device, action):
                return

    def _next(self, device: _Device) -> Action | None:
        """Return the policy's next action and log it; None: there is nothing to do, for now or for good."""
        answer = device.policy.next(device.state)
        if isinstance(answer, str):
            if answer == DONE:
                device.is_done = True
                device.result.finished_seconds = self.now
            else:
                assert answer == WAIT
                self.waiting[device.name].append(device.name)
            return None
        device.log.append(answer)
        device.memory.act(answer)
        if isinstance(answer, Reduce) and answer.what != "norm":
            self._join(device, answer)
        return answer

    def _can_go_on(self, device: _Device, action: Receive | Reduce | Await | Step) -> bool:
        """Return whether an action has what it waits for; if not, the device is registered to be woken."""
        if isinstance(action, Receive):
            key = (action.source, action.message)
            if not device.mail[key]:
                self.waiting[(device.name, key)].append(device.name)
                return False
            device.mail[key] -= 1
        elif isinstance(action, (Reduce, Await)):
            if isinstance(action, Reduce) and action.what == "norm" and not self._gives_norm(device, action):
                return False
            if (isinstance(action, Await) or action.is_awaited) and action.key not in self.complete:
                self.waiting[action.key].append(device.name)
                return False
        elif self._waits_for_sums(device):
            return False
        else:
            device.open_reductions.clear()
        return True

    def _waits_for_sums(self, device: _Device) -> bool:
        """Return whether a sum of gradients is not complete; the device is then registered to be woken."""
        late = next((key for key in device.open_reductions if key not in self.complete), None)
        if late is not None:
            self.waiting[late].append(device.name)
        return late is not None

    def _gives_norm(self, device: _Device, reduce: Reduce) -> bool:
        """Return whether a device has given its part of the gradients' norm, which it does once its sums of gradients
        are complete."""
        if device.norm_given == reduce.key:
            return True
        if self._waits_for_sums(device):
            return False
        device.norm_given = reduce.key
        self._join(device, reduce)
        return True

    def _takes_time(self, device: _Device, action: Action) -> bool:
        """Start an action, and return whether the processor is busy with it."""
        is_computing = True
        if isinstance(action, (Forward, Backward)):
            seconds = self.costs.compute_seconds(device.work.geometry(action.stage), device.name, action)
        elif isinstance(action, Step):
            geometry = device.work.geometry(action.stage)
            seconds = self.costs.step_seconds(geometry, device.name, self.plan)
        else:
            is_computing = False
            if isinstance(action, Send):
                self._send(device.name, action)
            seconds = 0.0  # of a loss too: it is small beside the network, and a profile does not know it
            if device.copies and not isinstance(action, (Loss, Discard, Await)):
                seconds = self.costs.copy_seconds(device.name, action)
        device.result.busy_seconds += seconds
        if self.keep_spans and len(self.spans) < MOST_SPANS and (seconds or is_computing):
            kind = type(action).__name__.lower() if is_computing else "copy"
            self.spans.append(Span(device.name, "compute", self.now, self.now + seconds, kind, action))
        if seconds == 0.0:
            return False
        self._at(self.now + seconds, "computed", device.name)
        return True

    def _send(self, source: str, action: Send) -> None:
        pair = (source, action.to)
        self.bytes_between[pair] += action.message.bytes
        self.queues[pair].append(action.message)
        if len(self.queues[pair]) == 1:
            self._start_transfer(*pair, action.message)

    def _start_transfer(self, source: str, target: str, message: Message) -> None:
        self._count_transfer(source, 1)
        self._count_transfer(target, 1)
        self.links.start(source, target, message.bytes, message, self.now, is_urgent=is_urgent(message))

    def _sent(self, party: Transfer | FlowBundle) -> None:
        """Handle the last byte's departure: of a message, which arrives after the link's delay, or of some flows of a
        sum."""
        if isinstance(party, FlowBundle):
            self._sent_for_sum(party)
            return
        self.links.end(party, self.now)
        pair = (party.source, party.target)
        message = party.label
        assert isinstance(message, Message)
        self._note_sent(*pair, party.started, message.kind, message)
        self._count_transfer(party.source, -1)
        self.queues[pair].popleft()
        if self.queues[pair]:
            self._start_transfer(*pair, self.queues[pair][0])
        self._at(self.now + self.costs.link(*pair).delay_seconds, "arrived", party)

    def _sent_for_sum(self, bundle: FlowBundle) -> None:
        ended = self.links.end_some(bundle, self.now)
        shape, phase = bundle.shape, bundle.label
        assert isinstance(phase, SumPhase)
        reduce = phase.reduce
        if self.keep_spans:
            for source, target in zip(shape.sources[ended.flows].tolist(), shape.targets[ended.flows].tolist()):
                self._note_sent(shape.devices[source], shape.devices[target], bundle.started, "reduce", reduce)
        for place in ended.users.tolist():
            self._count_transfer(shape.devices[place], -1)
        if bundle.is_over:
            delay = self.costs.phase_delay_seconds(*phase)
            self._at(self.now + delay, "phase over", SumPhase(reduce, phase.number + 1))

    def _note_sent(self, source: str, target: str, started: float, kind: str, subject: object) -> None:
        if self.keep_spans and len(self.spans) < MOST_SPANS:
            delay = self.costs.link(source, target).delay_seconds
            self.spans.append(Span(source, "send", started, self.now, kind, subject, target))
            self.spans.append(Span(target, "receive", started + delay, self.now + delay, kind, subject, source))

    def _arrived(self, transfer: Transfer) -> None:
        device = self.devices[transfer.target]
        assert isinstance(transfer.label, Message)
        key = (transfer.source, transfer.label)
        device.mail[key] += 1
        device.arrived.add(key)
        device.result.bytes_received += transfer.label.bytes
        self._count_transfer(transfer.target, -1)
        self.runnable.extend(self.waiting.pop((device.name, key), ()))
        self.runnable.extend(self.waiting.pop(device.name, ()))

    def _join(self, device: _Device, reduce: Reduce) -> None:
        if reduce.what == "gradients":
            device.open_reductions.add(reduce.key)
        self.joined[reduce.key] += 1
        if self.joined[reduce.key] < len(reduce.devices):
            return
        self._start_phase(SumPhase(reduce, 0))

    def _start_phase(self, phase: SumPhase) -> None:
        """Start what travels in the next phase of a sum; after its last, the sum is complete."""
        reduce = phase.reduce
        if phase.number == len(phases(reduce)):
            self.complete.add(reduce.key)
            self.runnable.extend(self.waiting.pop(reduce.key, ()))
            return
        shape, sizes = self._shape_of(phase), flow_bytes(reduce, self.schedule.network, phase.flows)
        self.summed[shape] = self.summed.get(shape, 0) + sizes
        for place in shape.users.nonzero()[0].tolist():
            self._count_transfer(shape.devices[place], 1)
        self.links.start_together(shape, few_sizes(sizes), phase, self.now, is_urgent=is_urgent(reduce))

    def _shape_of(self, phase: SumPhase) -> FlowShape:
        reduce, flows = phase.reduce, phase.flows
        key = (reduce.devices, reduce.places, reduce.what == "gradients", phase.number)
        shape = self.shapes.get(key)
        if shape is None:
            shape = self.shapes[key] = FlowShape(self.links.wiring, reduce.devices, flows.sources, flows.targets)
        return shape

    def _count_transfer(self, name: str, change: int) -> None:
        """Count the transfers under way: time with at least one of them costs energy."""
        device = self.devices[name]
        if device.transfers:
            device.result.transfer_seconds += self.now - device.transfers_since
        device.transfers += change
        device.transfers_since = self.now

    def _result(self) -> Simulation:
        seconds = max(device.result.finished_seconds for device in self.devices.values())
        warnings = []
        for flows, sizes in self.summed.items():
            ends = [map(flows.devices.__getitem__, places.tolist()) for places in (flows.sources, flows.targets)]
            for source, target, byte_count in zip(*ends, sizes.tolist()):
                self.bytes_between[source, target] += byte_count
                self.devices[target].result.bytes_received += byte_count
        for (source, _), byte_count in self.bytes_between.items():
            self.devices[source].result.bytes_sent += byte_count
        for name, device in self.devices.items():
            facts, result = self.cluster.device(name), device.result
            result.peak_bytes = device.memory.peak_bytes
            result.most_micro_batches_held = device.memory.most_micro_batches_held
            idle = max(0.0, seconds - result.busy_seconds)
            result.joules = (
                result.busy_seconds * facts.watts_active
                + idle * facts.watts_idle
                + result.transfer_seconds * facts.watts_transfer
            )
            if result.peak_bytes > facts.memory_bytes:
                peak, budget = format_bytes(result.peak_bytes), format_bytes(facts.memory_bytes)
                warnings.append(f"{name} runs out of memory: {peak} of {budget}.")
        return Simulation(
            seconds=seconds,
            samples=self.plan.batch_size,
            devices={name: device.result for name, device in self.devices.items()},
            bytes_between=dict(self.bytes_between),
            spans=self.spans,
            log={name: device.log for name, device in self.devices.items()},
            actions=sum(len(device.log) for device in self.devices.values()),
            warnings=warnings,
            is_energy_known=all(self.cluster.device(name).watts_active > 0 for name in self.devices),
        )
