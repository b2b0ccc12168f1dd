"""Interprets a schedule's actions under a virtual clock.

Each device has one processor and sends and receives beside it. Messages of one pair go one after another, as on one
connection; pairs share links and ports fairly. The loop takes the next event (a computation or a
transfer that ends), moves the clock there, and lets whoever was waiting for it go on: exactly what an executor does
with real devices, with `planner.cost` in place of torch and `links` in place of sockets.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadSchedule
from manyhands.facts.network import Network as NetworkFacts
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.facts.units import format_bytes
from manyhands.planner.cost import CostModel
from manyhands.schedule.actions import (
    Action,
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
from manyhands.schedule.memory import DeviceMemory
from manyhands.schedule.policies import DONE, WAIT, DeviceState, Policy
from manyhands.schedule.policy import Schedule
from manyhands.schedule.work import DeviceWork
from manyhands.simulator.links import Network, Transfer
from manyhands.simulator.result import DeviceResult, Simulation, Span

MOST_SPANS = 2_000_000


def simulate(
    plan: Plan,
    network: NetworkFacts,
    cluster: Cluster,
    profile: Profile | None = None,
    *,
    keep_spans: bool = True,
    policies: dict[str, Policy] | None = None,
) -> Simulation:
    """One round of `plan`. Without a profile, times are estimated from the catalogue and the result says so."""
    resolved = resolve(plan, network, cluster)
    estimated = profile is None
    profile = profile or estimate_cluster(network, cluster)
    schedule = Schedule(resolved, network)
    costs = CostModel(network, cluster, profile)
    run = _Run(schedule, cluster, costs, policies or schedule.policies(), keep_spans)
    result = run.to_the_end()
    if estimated or profile.is_estimated:
        result.warnings.append("Times are estimated from the device catalogue, not measured.")
    return result


@dataclass
class _Device:
    """A device under way."""

    name: str
    work: DeviceWork
    policy: Policy
    memory: DeviceMemory
    result: DeviceResult
    arrived: set[tuple[str, Message]] = field(default_factory=set)
    mail: Counter[tuple[str, Message]] = field(default_factory=Counter)
    held: Action | None = None
    """An action that waits: it is tried again when something arrives."""
    open_reductions: set[ReduceKey] = field(default_factory=set)
    transfers: int = 0
    transfers_since: float = 0.0
    is_done: bool = False


class _Run:
    def __init__(
        self, schedule: Schedule, cluster: Cluster, costs: CostModel, policies: dict[str, Policy], keep_spans: bool
    ) -> None:
        self.schedule, self.cluster, self.costs, self.keep_spans = schedule, cluster, costs, keep_spans
        self.plan = schedule.plan
        self.now = 0.0
        self.events: list[tuple[float, int, str, Any, int]] = []
        self.ticket = count()
        self.links = Network(cluster)
        self.queues: dict[tuple[str, str], deque[Message]] = defaultdict(deque)
        """Messages of a pair that wait for the one before them: a channel delivers in order."""
        self.spans: list[Span] = []
        self.log: dict[str, list[Action]] = {name: [] for name in policies}
        self.bytes_between: dict[tuple[str, str], float] = defaultdict(float)
        self.joined: dict[ReduceKey, int] = Counter()
        self.flows_left: dict[ReduceKey, int] = {}
        self.complete: set[ReduceKey] = set()
        self.waiting: dict[object, list[str]] = defaultdict(list)
        self.runnable: deque[str] = deque(policies)
        self.devices: dict[str, _Device] = {}
        for name, policy in policies.items():
            work = schedule.lowering.work[name]
            memory = DeviceMemory(self.plan, schedule.network, work.geometries, name)
            budget = cluster.device(name).memory_bytes
            self.devices[name] = _Device(name, work, policy, memory, DeviceResult(name, memory_bytes=budget))

    def to_the_end(self) -> Simulation:
        self._let_run()
        while self.events:
            self.now, _, kind, what, version = heapq.heappop(self.events)
            if kind == "computed":
                self.runnable.append(what)
            elif kind == "sent":
                self._transfers_ended(what, version)
            elif kind == "arrived":
                self._arrived(what)
            else:
                self._reduced(what)
            self._let_run()
        stuck = [device for device in self.devices.values() if not device.is_done]
        if stuck:
            lines = [f"  {device.name} waits at '{device.held}'" for device in stuck[:8]]
            raise BadSchedule("The run does not end:\n" + "\n".join(lines))
        return self._result()

    def _at(self, seconds: float, kind: str, what: Any, version: int = 0) -> None:
        heapq.heappush(self.events, (seconds, next(self.ticket), kind, what, version))

    def _let_run(self) -> None:
        while self.runnable:
            self._advance(self.devices[self.runnable.popleft()])

    def _advance(self, device: _Device) -> None:
        """Take actions until one takes time or must wait."""
        while not device.is_done:
            action = device.held
            if action is None:
                answer = device.policy.next(DeviceState(device.arrived))
                if answer == DONE:
                    device.is_done = True
                    device.result.finished_seconds = self.now
                    return
                if answer == WAIT:
                    self.waiting[device.name].append(device.name)
                    return
                assert not isinstance(answer, str)
                action = answer
                self.log[device.name].append(action)
                device.memory.act(action)
                if isinstance(action, Reduce):
                    self._join(device, action)
                device.held = action
            if not self._can_go_on(device, action):
                return
            device.held = None
            if self._takes_time(device, action):
                return

    def _can_go_on(self, device: _Device, action: Action) -> bool:
        """Whether an action has what it waits for; if not, the device is noted to be woken."""
        if isinstance(action, Receive):
            key = (action.source, action.message)
            if not device.mail[key]:
                self.waiting[(device.name, key)].append(device.name)
                return False
            device.mail[key] -= 1
        elif isinstance(action, Reduce) and action.what == "statistics":
            if action.key not in self.complete:
                self.waiting[action.key].append(device.name)
                return False
        elif isinstance(action, Step):
            late = next((key for key in device.open_reductions if key not in self.complete), None)
            if late is not None:
                self.waiting[late].append(device.name)
                return False
            device.open_reductions.clear()
        return True

    def _takes_time(self, device: _Device, action: Action) -> bool:
        """Start an action. True if the processor is busy with it."""
        if isinstance(action, Send):
            self._send(device.name, action)
        if isinstance(action, (Send, Receive, Reduce)):
            seconds = self.costs.copy_seconds(device.name, action)
        elif isinstance(action, (Forward, Backward)):
            seconds = self.costs.compute_seconds(device.work.geometry(action.stage), device.name, action)
        elif isinstance(action, (Loss, Discard)):  # small beside the network: a profile does not know it
            seconds = 0.0
        else:
            geometry = device.work.geometry(action.stage)
            seconds = self.costs.step_seconds(geometry, device.name, self.plan.optimizer_slots)
        device.result.busy_seconds += seconds
        is_computing = isinstance(action, (Forward, Backward, Step))
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
            self._start_transfers([(*pair, action.message.bytes)], action.message)

    def _start_transfers(self, flows: Sequence[tuple[str, str, float]], label: object) -> None:
        for source, target, _ in flows:
            self._count_transfer(source, 1)
            self._count_transfer(target, 1)
        self._retime(self.links.start_all(flows, label, self.now, is_urgent=is_urgent(label)))

    def _retime(self, changed: list[Transfer]) -> None:
        for transfer in changed:
            if transfer.rate:  # else it waits, and its rate will change
                seconds = transfer.left / transfer.rate if transfer.rate < math.inf else 0.0
                self._at(transfer.since + max(0.0, seconds), "sent", transfer, transfer.version)

    def _transfers_ended(self, first: Transfer, version: int) -> None:
        """The last byte has left: of this transfer and of all others that end now, as those of a sum often do."""
        ended = [first] if version == first.version else []
        while self.events and self.events[0][0] == self.now and self.events[0][2] == "sent":
            _, _, _, other, version = heapq.heappop(self.events)
            if version == other.version:
                ended.append(other)
        for transfer in ended:
            transfer.version += 1
        if ended:
            self._retime(self.links.finish(ended, self.now))
        for transfer in ended:
            self._leaves(transfer)

    def _leaves(self, transfer: Transfer) -> None:
        """It arrives after the link's delay."""
        delay = self.costs.link(transfer.source, transfer.target).delay_seconds
        is_message = isinstance(transfer.label, Message)
        if self.keep_spans and len(self.spans) < MOST_SPANS:
            kind = transfer.label.kind if isinstance(transfer.label, Message) else "reduce"
            source, target, start = transfer.source, transfer.target, transfer.started
            self.spans.append(Span(source, "send", start, self.now, kind, transfer.label, target))
            self.spans.append(Span(target, "receive", start + delay, self.now + delay, kind, transfer.label, source))
        self._count_transfer(transfer.source, -1)
        if is_message:
            pair = (transfer.source, transfer.target)
            self.queues[pair].popleft()
            if self.queues[pair]:
                following = self.queues[pair][0]
                self._start_transfers([(*pair, following.bytes)], following)
            self._at(self.now + delay, "arrived", transfer)
        else:
            self._count_transfer(transfer.target, -1)
            reduce = transfer.label
            assert isinstance(reduce, Reduce)
            self.flows_left[reduce.key] -= 1
            if not self.flows_left[reduce.key]:
                self._at(self.now + self.costs.reduction_delay_seconds(reduce), "reduced", reduce)

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
        flows = self.costs.reduction_bytes(reduce)
        self.flows_left[reduce.key] = len(flows)
        for (source, target), byte_count in flows.items():
            self.bytes_between[(source, target)] += byte_count
            self.devices[target].result.bytes_received += byte_count
        self._start_transfers([(*pair, byte_count) for pair, byte_count in flows.items()], reduce)

    def _reduced(self, reduce: Reduce) -> None:
        self.complete.add(reduce.key)
        self.runnable.extend(self.waiting.pop(reduce.key, ()))

    def _count_transfer(self, name: str, change: int) -> None:
        """Time during which at least one transfer is under way costs energy."""
        device = self.devices[name]
        if device.transfers:
            device.result.transfer_seconds += self.now - device.transfers_since
        device.transfers += change
        device.transfers_since = self.now

    def _result(self) -> Simulation:
        seconds = max(device.result.finished_seconds for device in self.devices.values())
        warnings = []
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
            log=self.log,
            actions=sum(map(len, self.log.values())),
            warnings=warnings,
        )
