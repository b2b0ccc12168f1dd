"""Proof, without running anything, that a schedule ends: no deadlock, every message matched, memory within budget.

Devices are run in turn, untimed: a send always succeeds, a receive needs its message, a reduction all its members. If
every device reaches the end of its list in some order, it does so in every order, since nothing here depends on time.
Otherwise the report shows where each device stands.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadSchedule, OutOfMemory
from manyhands.facts.units import format_bytes
from manyhands.schedule.actions import Action, Await, Message, Receive, Reduce, ReduceKey, Send, Step
from manyhands.schedule.memory import DeviceMemory
from manyhands.schedule.policy import Schedule
from manyhands.schedule.shortage import remedy

_AROUND = 2

_MOST_SHOWN = 8
_LONGEST_ACTION = 80
"""Characters: a message's tensors may be all weights."""


@dataclass(frozen=True)
class Checked:
    """The figures that the proof gathers on the way."""

    actions: int
    messages: int
    bytes_between: dict[tuple[str, str], int]
    peak_bytes: dict[str, float]
    most_micro_batches_held: dict[str, int]


@dataclass
class _World:
    """The untimed state of all devices."""

    actions: Mapping[str, Sequence[Action]]
    place: dict[str, int] = field(default_factory=dict)
    mail: Counter[tuple[str, str, Message]] = field(default_factory=Counter)
    joined: dict[ReduceKey, int] = field(default_factory=Counter)
    open_reductions: dict[str, dict[ReduceKey, Reduce]] = field(default_factory=lambda: defaultdict(dict))
    waiting: dict[object, list[str]] = field(default_factory=lambda: defaultdict(list))

    def is_complete(self, reduce: Reduce) -> bool:
        return self.joined[reduce.key] == len(reduce.devices)


def check_matching(actions: Mapping[str, Sequence[Action]]) -> tuple[int, dict[tuple[str, str], int]]:
    """Check that every send has its receive and the reverse; return the number of messages, and bytes between devices.

    Every reduction must be joined by exactly its members, and one that is to be waited for later must be.
    """
    sent: Counter[tuple[str, str, Message]] = Counter()
    received: Counter[tuple[str, str, Message]] = Counter()
    members: dict[ReduceKey, Counter[str]] = defaultdict(Counter)
    reductions: dict[ReduceKey, Reduce] = {}
    bytes_between: dict[tuple[str, str], int] = defaultdict(int)
    for device, listed in actions.items():
        awaited = {action.key for action in listed if isinstance(action, Await)}
        for action in listed:
            if isinstance(action, Send):
                sent[(device, action.to, action.message)] += 1
                bytes_between[(device, action.to)] += action.message.bytes
            elif isinstance(action, Receive):
                received[(action.source, device, action.message)] += 1
            elif isinstance(action, Reduce):
                members[action.key][device] += 1
                reductions[action.key] = action
                if action.later and action.key not in awaited:
                    raise BadSchedule(f"{device} gives its part to '{action}', and never waits for the others'.")
    for (source, target, message), count in (sent - received).items():
        raise BadSchedule(f"{source} sends {message} to {target} {count} time(s) more than {target} receives it.")
    for (source, target, message), count in (received - sent).items():
        raise BadSchedule(f"{target} waits for {message} from {source} {count} time(s) more than {source} sends it.")
    for key, joined in members.items():
        if joined != Counter(reductions[key].devices):
            raise BadSchedule(
                f"'{reductions[key]}' is joined by {dict(joined)}; it must be joined once by each of its devices."
            )
    return sum(sent.values()), dict(bytes_between)


def check_progress(actions: Mapping[str, Sequence[Action]]) -> None:
    """Check that every device reaches the end of its list."""
    world = _World(actions, place=dict.fromkeys(actions, 0))
    ready = deque(actions)
    while ready:
        _advance(world, ready.popleft(), ready)
    stuck = [device for device, listed in actions.items() if world.place[device] < len(listed)]
    if stuck:
        raise BadSchedule(_report(world, stuck))


def _advance(world: _World, device: str, ready: deque[str]) -> None:
    """Run a device until it must wait; devices that it wakes are added to `ready`."""
    actions = world.actions[device]
    while world.place[device] < len(actions):
        action = actions[world.place[device]]
        if isinstance(action, Send):
            key = (device, action.to, action.message)
            world.mail[key] += 1
            ready.extend(world.waiting.pop(key, ()))
        elif isinstance(action, Receive):
            key = (action.source, device, action.message)
            if not world.mail[key]:
                world.waiting[key].append(device)
                return
            world.mail[key] -= 1
        elif isinstance(action, Reduce):
            if action.what == "norm" and _waits_for_sums(world, device):
                return
            if action.key not in world.open_reductions[device]:
                world.open_reductions[device][action.key] = action
                world.joined[action.key] += 1
            if world.is_complete(action):
                ready.extend(world.waiting.pop(action.key, ()))
            elif action.is_awaited:
                world.waiting[action.key].append(device)
                return
        elif isinstance(action, Await):
            joined = world.open_reductions[device].get(action.key)
            if joined is None:
                raise BadSchedule(f"{device} is to '{action}', and has not given its own part before.")
            if not world.is_complete(joined):
                world.waiting[action.key].append(device)
                return
        elif isinstance(action, Step):
            if _waits_for_sums(world, device):
                return
            world.open_reductions[device].clear()
        world.place[device] += 1


def _waits_for_sums(world: _World, device: str) -> bool:
    """Return whether a sum that the device has joined is not complete; it is then registered to be woken."""
    joined = (r for r in world.open_reductions[device].values() if r.what != "norm")
    late = next((r for r in joined if not world.is_complete(r)), None)
    if late is not None:
        world.waiting[late.key].append(device)
    return late is not None


def _report(world: _World, stuck: list[str]) -> str:
    """Return where each stuck device stands, with two actions before and after."""
    lines = [f"The schedule does not end: {len(stuck)} of {len(world.actions)} devices wait forever."]
    for device in stuck[:_MOST_SHOWN]:
        actions, place = world.actions[device], world.place[device]
        lines.append(f"  {device}, action {place} of {len(actions)}:")
        for index in range(max(0, place - _AROUND), min(len(actions), place + _AROUND + 1)):
            lines.append(f"    {'->' if index == place else '  '} {actions[index]}")
    if len(stuck) > _MOST_SHOWN:
        lines.append(f"  and {len(stuck) - _MOST_SHOWN} more")
    return "\n".join(lines)


def check(
    schedule: Schedule, cluster: Cluster | None = None, actions: Mapping[str, Sequence[Action]] | None = None
) -> Checked:
    """Check a schedule's list (or the log of an event-driven run, given as `actions`), and return its figures."""
    if actions is None and not schedule.is_fixed:
        raise BadSchedule(
            f"order is {schedule.plan.order}: what each device does is decided as messages arrive; there is no list.",
            hint="Run manyhands simulate, and check its log.",
        )
    lists = actions if actions is not None else schedule.actions
    messages, bytes_between = check_matching(lists)
    check_progress(lists)
    peaks: dict[str, float] = {}
    held: dict[str, int] = {}
    for device, run in lists.items():
        memory = DeviceMemory(schedule.plan, schedule.network, schedule.lowering.work[device].geometries, device)
        for action in run:
            memory.act(action)
        peaks[device], held[device] = memory.peak_bytes, memory.most_micro_batches_held
        if cluster is not None and memory.peak_bytes > cluster.device(device).memory_bytes:
            budget = cluster.device(device).memory_bytes
            contents = "weights, gradients and optimiser" if schedule.plan.is_training else "weights"
            when = textwrap.shorten(str(memory.peak_action), _LONGEST_ACTION, placeholder=" …")
            raise OutOfMemory(
                f"{device} would hold {format_bytes(memory.peak_bytes)} of {format_bytes(budget)} at '{when}' "
                f"({format_bytes(memory.static_bytes)} {contents}, the rest activations of "
                f"{memory.most_micro_batches_held} micro-batch(es) of {schedule.plan.micro_batch_size} sample(s)).",
                hint=remedy(schedule.plan, schedule.network, cluster, device, memory.static_bytes),
            )
    return Checked(sum(map(len, lists.values())), messages, bytes_between, peaks, held)
