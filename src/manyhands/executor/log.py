"""The log of what a device did, as it did it: the evidence that a run was what its plan said."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from manyhands.schedule.actions import Action, Await, Backward, Forward, Message, Reduce
from manyhands.schedule.glimpse import Glimpse

MOST_SPANS = 20_000
WARM_UP_ROUNDS = 2
"""The first rounds of a run take longer: their times are not kept."""
MOST_ROUNDS = 256
"""Rounds whose times are kept, the last ones."""
SECONDS_BETWEEN_CAPTURED = 10.0
"""Between rounds that are watched though they are one CUDA graph otherwise, and take twice as long when watched."""


class MeasuredSpan(msgspec.Struct, frozen=True):
    """An activity from `start` to `end` (seconds of the device's own clock) on one track."""

    device: str
    track: str
    start: float
    end: float
    kind: str
    text: str
    step: int = 0


class DeviceLog(msgspec.Struct):
    """One device's account of a run: data that travels to the coordinator and is kept in the run folder."""

    device: str
    rounds: int = 0
    actions: list[str] = []
    """The actions of the last round, in the order they were taken."""
    same_actions: int = 0
    """Rounds whose actions were the same as the last round's."""
    samples: int = 0
    """Samples put through this device's part of the network."""
    operators: int = 0
    """Operator executions forward, counted once for each micro-batch."""
    elements: int = 0
    """Elements of feature maps computed forward as a tile, including what overlaps with other tiles."""
    sent_kinds: dict[str, int] = {}
    """Payload bytes of messages by what they carry (Message.kind); reductions are not among them."""
    peak_bytes: int = 0
    """Most tensor bytes alive at once in a step, counted in the requested step; 0: none was requested."""
    peak_parts: dict[str, int] = {}
    """The same bytes by part: features, deltas (gradients of features), weights (with gradients and optimiser),
    buffers."""
    sent_bytes: dict[str, int] = {}
    """Payload bytes handed to the link for the plan, by receiver."""
    received_bytes: dict[str, int] = {}
    host_bytes: int = 0
    """Bytes of a GPU's tensors that went to other devices through the machine's memory."""
    state_bytes: dict[str, int] = {}
    """Bytes of weights and optimiser state sent to each device, as a backup or to go on with; in neither of the
    above."""
    group_sums: dict[str, int] = {}
    """Process group of PyTorch -> the reductions that went through it: their bytes are in none of the above."""
    busy_seconds: float = 0.0
    stage_seconds: dict[int, list[float]] = {}
    """Stage -> forward and backward seconds of each of the last rounds, without the first ones of a run."""
    refused_frames: int = 0
    spans: list[MeasuredSpan] = []

    def to_dict(self) -> dict[str, Any]:
        """Return the log without the spans, which go into the trace, and without every round's seconds, whose medians
        are in stages.json."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["spans"], fields["stage_seconds"]
        return fields


def merged(earlier: Mapping[str, DeviceLog], later: Mapping[str, DeviceLog]) -> dict[str, DeviceLog]:
    """Return what each device did in two runs by one plan, as one log."""
    return {
        name: _one_log(earlier[name], later[name]) if name in earlier and name in later
        else later.get(name) or earlier[name]
        for name in {**earlier, **later}
    }  # fmt: skip


def _one_log(earlier: DeviceLog, later: DeviceLog) -> DeviceLog:
    if not later.rounds:
        return earlier
    is_same = earlier.actions == later.actions
    peak = max(earlier, later, key=lambda log: log.peak_bytes)
    stages = {**earlier.stage_seconds, **later.stage_seconds}
    return DeviceLog(
        device=later.device, rounds=earlier.rounds + later.rounds, actions=later.actions,
        same_actions=later.same_actions + (earlier.same_actions if is_same else 0),
        samples=earlier.samples + later.samples, operators=earlier.operators + later.operators,
        elements=earlier.elements + later.elements, sent_kinds=_sums(earlier.sent_kinds, later.sent_kinds),
        peak_bytes=peak.peak_bytes, peak_parts=peak.peak_parts,
        sent_bytes=_sums(earlier.sent_bytes, later.sent_bytes),
        received_bytes=_sums(earlier.received_bytes, later.received_bytes),
        state_bytes=_sums(earlier.state_bytes, later.state_bytes),
        group_sums=_sums(earlier.group_sums, later.group_sums),
        busy_seconds=earlier.busy_seconds + later.busy_seconds,
        stage_seconds={
            stage: (earlier.stage_seconds.get(stage, []) + later.stage_seconds.get(stage, []))[-MOST_ROUNDS:]
            for stage in stages
        },
        refused_frames=earlier.refused_frames + later.refused_frames,
        spans=(earlier.spans + later.spans)[:MOST_SPANS],
    )  # fmt: skip


def _sums(earlier: Mapping[str, int], later: Mapping[str, int]) -> dict[str, int]:
    return {key: earlier.get(key, 0) + later.get(key, 0) for key in {**earlier, **later}}


class _Known(NamedTuple):
    """The facts noted about an action each time it is carried out."""

    action: Action
    text: str
    computes_for: int | None
    """The stage that it computes for; None: it computes nothing."""
    operators: int
    ends_here: bool
    """Whether it ends on this thread; else another thread goes on with it, and reports when it has ended."""

    @classmethod
    def of(cls, action: Action) -> _Known:
        is_whole = isinstance(action, Forward) and action.part not in ("rim", "sum")
        return cls(
            action, str(action),
            computes_for=action.stage if isinstance(action, (Forward, Backward)) else None,
            operators=action.last - action.first if isinstance(action, Forward) and is_whole else 0,
            ends_here=not (isinstance(action, Reduce) and action.what == "gradients"),
        )  # fmt: skip


@dataclass
class Recorder:
    """Fills a log."""

    log: DeviceLog
    trace_steps: range = range(0)
    """Steps whose spans are kept."""
    waits_for_device: bool = True
    """Whether an action is complete when its call returns: on a GPU, in traced steps only."""
    watch_every: int = 0
    """One round in so many is watched while the run goes on; 0: none."""
    glimpses: list[Glimpse] = field(default_factory=list)
    """Glimpses of the last round that was watched."""
    _round: list[str] = field(default_factory=list)
    _known: dict[int, _Known] = field(default_factory=dict)
    """The facts of actions, by the actions' identity: a fixed schedule has the same actions in every round."""
    step: int = 0
    is_watched: bool = False
    """Whether this round is watched. All devices watch the same rounds, as they have been through as many."""
    is_traced: bool = False
    """Whether it matters in this step when an action ends."""
    _seconds: dict[int, float] = field(default_factory=dict)
    _watched_at: float = -math.inf

    def begin(self, step: int, *, is_captured: bool = False) -> None:
        """Begin a round; `is_captured`: it is one CUDA graph, or is to be one, and is slower where it is watched."""
        self.step, self._round, self._seconds = step, [], {}
        self.glimpses = []
        self.is_watched = self.watch_every > 0 and self.log.rounds % self.watch_every == min(2, self.watch_every - 1)
        if self.is_watched:
            now = time.monotonic()
            self.is_watched = not is_captured or now - self._watched_at >= SECONDS_BETWEEN_CAPTURED
            self._watched_at = now if self.is_watched else self._watched_at
        self.is_traced = self.is_watched or step in self.trace_steps
        if len(self._known) > MOST_SPANS:  # an event-driven schedule makes its actions anew in every round
            self._known.clear()

    def took(self, action: Action, start: float, end: float) -> None:
        """Record an action of the main thread that has ended."""
        facts = self._known.get(id(action))
        if facts is None or facts.action is not action:
            facts = self._known[id(action)] = _Known.of(action)
        self._round.append(facts.text)
        if facts.computes_for is not None:
            self.log.operators += facts.operators
            self.log.busy_seconds += end - start
            self._seconds[facts.computes_for] = self._seconds.get(facts.computes_for, 0.0) + end - start
        if facts.ends_here and self.is_traced:
            self.span(action, facts.text, start, end)

    def sent(self, message: Message) -> None:
        self.log.sent_kinds[message.kind] = self.log.sent_kinds.get(message.kind, 0) + message.bytes

    def span(self, action: Action, text: str, start: float, end: float) -> None:
        if not self.is_traced:
            return
        kind = "reduce" if isinstance(action, Await) else type(action).__name__.lower()
        track = {"send": "send", "receive": "receive"}.get(kind, "compute")
        if isinstance(action, Reduce) and action.what == "gradients":
            track = "send"
        if self.step in self.trace_steps and len(self.log.spans) < MOST_SPANS:
            self.log.spans.append(MeasuredSpan(self.log.device, track, start, end, kind, text, self.step))
        if self.is_watched and len(self.glimpses) < MOST_SPANS:
            stage, micro_batch = getattr(action, "stage", -1), getattr(action, "micro_batch", None)
            self.glimpses.append(
                Glimpse(track, kind, start, end, stage, str(micro_batch) if micro_batch is not None else "")
            )

    def end(self, *, is_longest: bool = True) -> None:
        """Note the end of a round. The times of rounds with shorter batches are not kept: they are not predicted."""
        self.log.rounds += 1
        self.log.same_actions = self.log.same_actions + 1 if self._round == self.log.actions else 1
        self.log.actions = self._round
        if is_longest and self.log.rounds > WARM_UP_ROUNDS and (self.waits_for_device or self.step in self.trace_steps):
            for stage, seconds in self._seconds.items():
                recent = self.log.stage_seconds.setdefault(stage, [])
                recent.append(seconds)
                del recent[:-MOST_ROUNDS]
