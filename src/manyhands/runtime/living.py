"""Keeps `live.json` in a run's folder up to date while the run goes on: its devices, its speed, the last round.

Nothing waits for it: events are noted in memory, and a thread writes the file about once a second.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.facts.plan_check import layer_range
from manyhands.facts.profile import Profile
from manyhands.observe.live import (
    MOST_LINKS,
    Live,
    LiveDevice,
    LiveLink,
    LiveRound,
    LiveSpan,
    LiveStage,
    RunState,
    write_live,
    write_round,
)
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.control_parts import Arrival, Seen
from manyhands.schedule.glimpse import MOST_SPANS, Glimpse, thinned
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import simulate

if TYPE_CHECKING:
    from manyhands.runtime.coordinator import Coordinator

WRITE_SECONDS = 1.0
WATCH_SECONDS = 3.0
"""Seconds between two watched rounds: the spans of one take about 5 kB from each device."""
LEAST_LOOKS = 5
"""How many rounds of a run are watched at least, where it is too short for that interval."""
_LAST_STEPS = 20
_LAST_ARRIVALS = 32
_MOST_SPANS_IN_ALL = 4000
_LEAST_SPANS = 20
_END_SECONDS = 5.0
_UNDER_WAY = 4
"""How many rounds are kept that not all devices have reported yet."""


def rounds_between_looks(round_seconds: float, rounds: int) -> int:
    """Return a number n such that one round in n is to be watched."""
    rounds_apart = WATCH_SECONDS / round_seconds if round_seconds > 0 else rounds
    return max(1, min(round(rounds_apart), max(3, rounds // LEAST_LOOKS)))


@dataclass
class _Outlook:
    """The plan that runs, and what the simulator predicts for it."""

    plan: Plan
    network: Network
    cluster: Cluster
    profile: Profile
    prediction: Simulation | None

    @functools.cached_property
    def stage_seconds(self) -> dict[tuple[int, str], float]:
        """(stage, device) -> simulated seconds of computing in a round."""
        seconds_by_stage: defaultdict[tuple[int, str], float] = defaultdict(float)
        for span in self.prediction.spans if self.prediction is not None else ():
            if span.kind in ("forward", "backward"):
                seconds_by_stage[getattr(span.what, "stage", -1), span.device] += span.end - span.start
        return dict(seconds_by_stage)

    @functools.cached_property
    def spans(self) -> tuple[LiveSpan, ...]:
        """The spans of the simulated round."""
        by_device: defaultdict[str, list[Glimpse]] = defaultdict(list)
        for span in self.prediction.spans if self.prediction is not None else ():
            stage, label = getattr(span.what, "stage", -1), _label(span.what)
            by_device[span.device].append(Glimpse(span.track, span.kind, span.start, span.end, stage, label))
        return tuple(
            live_span
            for name in self.plan.devices
            for live_span in _spans(name, thinned(by_device[name], self.most_spans), 0.0)
        )

    @property
    def most_spans(self) -> int:
        """The most spans of a device: a drawing is to stay small however many devices there are."""
        return max(_LEAST_SPANS, min(MOST_SPANS, _MOST_SPANS_IN_ALL // max(1, 2 * len(self.plan.devices))))


class Living:
    """One run as observers see it. Its methods are called from the run's own threads and never raise or wait."""

    def __init__(self, folder: Path, *, command: str, model: str, first_step: int, steps: int, batch_size: int) -> None:
        self.folder = folder
        self._live = Live(
            command=command, model=model, pid=os.getpid(), host=socket.gethostname(), started=time.time(),
            first_step=first_step, step=first_step, steps=steps, batch_size=batch_size,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._coordinator: Coordinator | None = None
        self._outlook: _Outlook | None = None
        self._seconds: deque[float] = deque(maxlen=_LAST_STEPS)
        self._seen: dict[str, Seen] = {}
        """The last watched round of each device."""
        self._rounds: dict[int, dict[str, Seen]] = {}
        self._busy: dict[str, float] = {}
        self._stage_seconds: dict[int, float] = {}
        self._arrivals: defaultdict[tuple[str, str], deque[Arrival]] = defaultdict(lambda: deque(maxlen=_LAST_ARRIVALS))
        self._sent: dict[tuple[str, str], tuple[int, int]] = {}
        """(from, to) -> a generation, and the bytes sent in it so far."""
        self._sent_before: Counter[tuple[str, str]] = Counter()
        """Bytes sent in generations before."""
        self._round: LiveRound | None = None
        self._devices: tuple[LiveDevice, ...] = ()
        self._is_new_round = self._is_to_be_simulated = False
        self._closing = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._keep_writing, name="living", daemon=True)
        self._thread.start()

    # What happens

    def shown_at(self, url: str) -> None:
        self._change(dashboard=url)

    def coordinated_by(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def planned(self, plan: Plan, network: Network, cluster: Cluster, profile: Profile, prediction: Simulation) -> None:
        """Note the plan with which the run begins, and what the simulator predicts for it."""
        with self._lock:
            self._outlook = _Outlook(plan, network, cluster, profile, prediction)
        self._change(state="running", text="", predicted_seconds=prediction.seconds / plan.steps_per_round)

    def replanned(self, plan: Plan) -> None:
        """Note that the run goes on by another plan, which is simulated when there is time."""
        with self._lock:
            if self._outlook is None:
                return
            outlook = self._outlook
            self._outlook = _Outlook(plan, outlook.network, outlook.cluster, outlook.profile, None)
            self._is_to_be_simulated = True
            self._rounds.clear()
            self._busy.clear()
            self._stage_seconds.clear()
        self._change(state="running", generation=self._live.generation + 1)

    def stepped(
        self, step: int, epoch: int, loss: float | None, seconds: float, samples: int, grad_norm: float | None = None
    ) -> None:
        with self._lock:
            self._seconds.append(seconds)
            typical = statistics.median(self._seconds)
        self._change(
            step=step + 1, epoch=epoch, loss=loss, grad_norm=grad_norm, seconds=typical,
            samples_per_second=samples / typical if typical else None,
            remaining_seconds=max(0, self._live.steps - step - 1) * typical,
        )  # fmt: skip

    def waited_for_data(self, share: float) -> None:
        """Note for which part of the last steps' time the devices waited for batches."""
        self._change(data_wait=share)

    def reported(self, device: str, message: Progress) -> None:
        """Note that a device has ended a round."""
        with self._lock:
            for target, count in message.sent.items():
                generation, before = self._sent.get((device, target), (message.generation, 0))
                if generation != message.generation:
                    self._sent_before[device, target] += before
                self._sent[device, target] = message.generation, count
            if message.seen is None or self._outlook is None:
                return
            self._seen[device] = message.seen
            seen_by_device = self._rounds.setdefault(message.step, {})
            seen_by_device[device] = message.seen
            if set(seen_by_device) >= set(self._outlook.plan.devices):
                del self._rounds[message.step]
                self._take_round(message.step, seen_by_device, self._outlook)
            while len(self._rounds) > _UNDER_WAY:
                del self._rounds[min(self._rounds)]

    def arrived(self, device: str, arrivals: Iterable[Arrival]) -> None:
        with self._lock:
            for arrival in arrivals:
                if arrival.seconds > 0:
                    self._arrivals[arrival.source, device].append(arrival)

    def noted(self, text: str) -> None:
        self._change(text=text)

    def waits(self, text: str) -> None:
        self._change(state="waiting", text=text)

    def close(self, state: RunState, text: str = "") -> None:
        """Write the final state, and end the thread."""
        if self._closing.is_set():
            return
        self._change(state=state, text=text, remaining_seconds=0.0 if state == "ended" else None)
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    def _change(self, **facts: Any) -> None:
        with self._lock:
            self._live = msgspec.structs.replace(self._live, **facts)

    # What is written

    def _keep_writing(self) -> None:
        while not self._closing.wait(WRITE_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(Exception):  # the run must not end because it cannot be shown
            with self._lock:
                live = msgspec.structs.replace(
                    self._live, updated=time.time(), devices=self._describe_devices(), links=self._describe_links(),
                    stages=self._describe_stages(),
                )  # fmt: skip
                new_round, self._is_new_round = self._round if self._is_new_round else None, False
            write_live(self.folder, live)
            if new_round is not None:
                write_round(self.folder, new_round)
            self._simulate()

    def _simulate(self) -> None:
        """Simulate a new plan; there is no prediction where devices joined that the profile does not know."""
        with self._lock:
            outlook, is_wanted, self._is_to_be_simulated = self._outlook, self._is_to_be_simulated, False
        if outlook is None or not is_wanted:
            return
        with contextlib.suppress(ManyhandsError, KeyError):
            prediction = simulate(outlook.plan, outlook.network, outlook.cluster, outlook.profile)
            with self._lock:
                if self._outlook is outlook:
                    self._outlook = _Outlook(
                        outlook.plan, outlook.network, outlook.cluster, outlook.profile, prediction
                    )
            self._change(predicted_seconds=prediction.seconds / outlook.plan.steps_per_round)

    def _take_round(self, step: int, seen_by_device: Mapping[str, Seen], outlook: _Outlook) -> None:
        members = self._coordinator.members if self._coordinator is not None else {}
        offsets = {name: members[name].clock_offset_seconds if name in members else 0.0 for name in seen_by_device}
        starts = [span.start + offsets[name] for name, report in seen_by_device.items() for span in report.spans]
        ends = [span.end + offsets[name] for name, report in seen_by_device.items() for span in report.spans]
        if not starts:
            return
        zero, seconds = min(starts), max(ends) - min(starts)
        measured = tuple(
            span
            for name in outlook.plan.devices
            for span in _spans(name, thinned(seen_by_device[name].spans, outlook.most_spans), zero - offsets[name])
        )
        expected = outlook.prediction.seconds if outlook.prediction is not None else 0.0
        self._round = LiveRound(step, seconds, expected, measured, outlook.spans)
        self._is_new_round = True
        self._busy = {name: computing(report.spans) / seconds for name, report in seen_by_device.items() if seconds}
        for number in range(len(outlook.plan.stages)):
            devices = outlook.plan.stages[number].devices
            self._stage_seconds[number] = max(computing(seen_by_device[name].spans, number) for name in devices)

    def _describe_devices(self) -> tuple[LiveDevice, ...]:
        """Return the devices. When the coordinator ends, all members leave: the devices then stay as they were."""
        coordinator, outlook = self._coordinator, self._outlook
        if coordinator is None or coordinator.is_closing:
            return self._devices
        members = dict(coordinator.members)
        stages: defaultdict[str, list[int]] = defaultdict(list)
        planned = outlook.prediction.devices if outlook is not None and outlook.prediction is not None else {}
        if outlook is not None:
            for number, stage in enumerate(outlook.plan.stages):
                for name in stage.devices:
                    stages[name].append(number)
        described = []
        started = coordinator.local.running()
        order = {name: place for place, name in enumerate(outlook.cluster.names)} if outlook is not None else {}
        for name, member in sorted(members.items(), key=lambda item: order.get(item[0], len(order))):
            state = "left" if member.has_left else "lost" if member.is_lost else "here"
            if member.is_leaving and not member.is_lost:
                state = "leaving"
            if state == "here" and outlook is not None and name not in stages:
                state = "idle"
            last_seen, device = self._seen.get(name), member.device
            described.append(
                LiveDevice(
                    name, device.kind, state, member.reason if state == "lost" else "",
                    memory_bytes=(outlook.cluster.device(name) if outlook and name in order else device).memory_bytes,
                    planned_bytes=planned[name].peak_bytes if name in planned else 0.0,
                    resident_bytes=last_seen.resident_bytes if last_seen is not None and not member.is_lost else 0,
                    peak_bytes=last_seen.peak_bytes if last_seen is not None else 0,
                    busy=self._busy.get(name) if not member.is_lost else None, host=member.channel.peer_host,
                    compute=member.facts.compute, stages=tuple(stages.get(name, ())),
                    pid=started.get(name, 0),
                )
            )  # fmt: skip
        self._devices = tuple(described)
        return self._devices

    def _describe_links(self) -> tuple[LiveLink, ...]:
        outlook = self._outlook
        if outlook is None:
            return ()
        pairs: dict[tuple[str, str], None] = {}
        if outlook.prediction is not None:
            pairs |= dict.fromkeys(outlook.prediction.bytes_between)
        pairs |= dict.fromkeys(self._sent)
        described = []
        busiest = sorted(pairs, key=lambda pair: -self._bytes_sent(pair))
        for source, target in busiest[:MOST_LINKS]:
            rate, delay = None, 0.0
            with contextlib.suppress(ManyhandsError, KeyError):
                link = outlook.cluster.link_between(source, target)
                speed = outlook.cluster.bytes_per_second_between(source, target)
                rate, delay = (speed if speed < float("inf") else None), link.delay_seconds
            arrivals = self._arrivals.get((source, target), ())
            seconds = sum(arrival.seconds for arrival in arrivals)
            sent = self._bytes_sent((source, target))
            measured = sum(arrival.bytes for arrival in arrivals) / seconds if seconds else None
            described.append(LiveLink(source, target, rate, delay, measured, sent))
        return tuple(described)

    def _bytes_sent(self, pair: tuple[str, str]) -> int:
        return self._sent.get(pair, (0, 0))[1] + self._sent_before[pair]

    def _describe_stages(self) -> tuple[LiveStage, ...]:
        outlook = self._outlook
        if outlook is None:
            return ()
        described = []
        for number, stage in enumerate(outlook.plan.stages):
            first, last = layer_range(stage)
            seconds = self._stage_seconds.get(number)
            described.append(
                LiveStage(
                    number, first, last, _share_text(stage), stage.devices, seconds,
                    max((outlook.stage_seconds.get((number, name), 0.0) for name in stage.devices), default=0.0),
                    outlook.plan.batch_size / seconds if seconds else None,
                )
            )  # fmt: skip
        return tuple(described)


def _spans(device: str, glimpses: Sequence[Glimpse], zero: float) -> Iterable[LiveSpan]:
    for glimpse in glimpses:
        yield LiveSpan(
            device,
            glimpse.track,
            round(glimpse.start - zero, 6),
            round(glimpse.end - zero, 6),
            glimpse.kind,
            glimpse.label,
            glimpse.stage,
        )


def _label(action: object) -> str:
    micro_batch = getattr(action, "micro_batch", None)
    return str(micro_batch) if micro_batch is not None else ""


def computing(spans: Iterable[Glimpse], stage: int | None = None) -> float:
    """Return the seconds of computing, without waits; `stage`: only those of this stage."""
    return sum(
        span.end - span.start
        for span in spans
        if span.track == "compute" and span.kind != "reduce" and (stage is None or span.stage == stage)
    )


def _share_text(stage: Stage) -> str:
    """Return a description of how a stage is shared, in a few words."""
    share = stage.share
    if isinstance(share, BySamples):
        return f"samples {'+'.join(map(str, share.samples))}" if len(share.samples) <= 8 else "samples"
    if isinstance(share, ByTiles):
        return f"tiles {len(share.rows)}x{len(share.columns)}"
    return "all" if isinstance(share, Single) else share.by
