"""The critical path of a simulated step: the chain of computing, transfers and delays that its end had to wait for,
from its last action back to its first. The seconds of its legs add up to the step's.

    nano     ██forward██                                     ██backward██▄step
                        ╲ value, 4 ms                       ╱ gradient, 4 ms
    tx2                   ░wait░  ██forward██████backward██
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from manyhands.facts.cluster import Cluster
from manyhands.schedule.actions import Message, Reduce
from manyhands.schedule.reduction import phases
from manyhands.simulator.result import Simulation, Span

USES = {
    "value": "activations and their gradients", "gradient": "activations and their gradients",
    "halo": "tiles' boundaries", "halo-gradient": "tiles' boundaries", "partial": "partial sums", "input": "inputs",
    "output": "outputs and their gradients", "output-gradient": "outputs and their gradients", "weights": "weights",
    "weight-gradient": "weight gradients",
}  # fmt: skip
"""Message kind -> the name shown to people."""
GRADIENT_SUMS = "weight gradients"
TIED_SUMS = "gradients of weights that several stages hold"
STATISTICS = "batch-norm sums"
GRADIENT_NORM = "norm of all gradients"
_CLOSE = 1e-12


@dataclass(frozen=True)
class Leg:
    """A leg of the chain. `source` is the device that computes, or the sender of a transfer or delay."""

    kind: Literal["compute", "transfer", "delay"]
    seconds: float
    source: str
    target: str = ""
    use: str = ""
    stage: int = -1


@dataclass(frozen=True)
class _Transfer:
    """A message, or all flows of one phase of a sum, from when it could start to when the others have it."""

    start: float
    sent: float
    """When the last byte left."""
    arrives: float
    source: str
    target: str
    what: object
    after: _Transfer | None = None
    """The phase of the sum before this one."""


def use_of(cause: object) -> str:
    """Return what a transfer is for."""
    if isinstance(cause, Reduce):
        if cause.weights:
            return TIED_SUMS
        return {"gradients": GRADIENT_SUMS, "norm": GRADIENT_NORM}.get(cause.what, STATISTICS)
    return USES.get(cause.kind, cause.kind) if isinstance(cause, Message) else ""


def critical_path(result: Simulation, cluster: Cluster) -> list[Leg]:
    """Return the chain, last leg first. The simulation must have kept its spans."""
    return list(_Chain(result, cluster).walk())


class _Chain:
    def __init__(self, result: Simulation, cluster: Cluster) -> None:
        self.result, self.cluster = result, cluster
        self.seen: set[int] = set()
        self.computed: dict[str, list[Span]] = defaultdict(list)
        transfers: list[_Transfer] = []
        sums: dict[object, list[Span]] = defaultdict(list)
        for span in result.spans:
            if span.track == "compute" and span.end > span.start:
                self.computed[span.device].append(span)
            elif span.track == "send" and isinstance(span.what, Reduce):
                sums[span.what.key].append(span)
            elif span.track == "send":
                delay = cluster.link_between(span.device, span.peer).delay_seconds
                transfers.append(
                    _Transfer(span.start, span.end, span.end + delay, span.device, span.peer, span.what)
                )  # fmt: skip
        self.reaches: dict[str, list[tuple[float, _Transfer]]] = defaultdict(list)
        self.before: dict[tuple[str, str, float], _Transfer] = {}
        for transfer in transfers:
            self.reaches[transfer.target].append((transfer.arrives, transfer))
            self.before[transfer.source, transfer.target, transfer.sent] = transfer
        for flows in sums.values():
            self._add_sum(flows)
        for arrivals in self.reaches.values():
            arrivals.sort(key=itemgetter(0))

    def _add_sum(self, flows: list[Span]) -> None:
        """Add a sum, phase after phase: each is over when its last flow has ended and the delays of its rounds have
        passed, and after the last of them every device has the sum."""
        reduce = flows[0].what
        assert isinstance(reduce, Reduce)
        by_start: dict[float, list[Span]] = defaultdict(list)
        for span in flows:
            by_start[span.start].append(span)
        transfer: _Transfer | None = None
        for number, start in enumerate(sorted(by_start)):
            last = max(by_start[start], key=lambda span: span.end)
            slowest = max(self.cluster.link_between(span.device, span.peer).delay_seconds for span in by_start[start])
            of_sum = phases(reduce)
            delay = slowest * (of_sum[number].rounds if len(of_sum) == len(by_start) else 1)
            transfer = _Transfer(start, last.end, last.end + delay, last.device, last.peer, reduce, transfer)
        for device in reduce.devices:
            if transfer is not None:
                self.reaches[device].append((transfer.arrives, transfer))

    def walk(self) -> Iterator[Leg]:
        names = list(self.result.devices)
        device = max(names, key=lambda name: self.result.devices[name].finished_seconds)
        now = self.result.devices[device].finished_seconds
        while now > 0:
            computed, transfer = self._computed_by(device, now), self._arrived_by(device, now)
            if computed is not None and (transfer is None or computed.end >= transfer.arrives):
                if now - computed.end > _CLOSE * now:
                    yield Leg("delay", now - computed.end, device)
                stage = getattr(computed.what, "stage", -1)
                yield Leg("compute", computed.end - computed.start, device, use=computed.kind, stage=stage)
                now = computed.start
            elif transfer is not None:
                if now > transfer.sent:
                    yield Leg("delay", now - transfer.sent, transfer.source, transfer.target, use_of(transfer.what))
                while True:  # it, and those that it stood in line behind on its connection
                    self.seen.add(id(transfer))
                    if transfer.sent > transfer.start:
                        seconds, stage = transfer.sent - transfer.start, getattr(transfer.what, "stage", -1)
                        yield Leg("transfer", seconds, transfer.source, transfer.target, use_of(transfer.what), stage)
                    ahead = transfer.after or self.before.get((transfer.source, transfer.target, transfer.start))
                    is_sum = isinstance(transfer.what, Reduce)
                    if ahead is None or id(ahead) in self.seen or (is_sum and ahead is not transfer.after):
                        break
                    if transfer.start > ahead.sent:
                        seconds = transfer.start - ahead.sent
                        yield Leg("delay", seconds, ahead.source, ahead.target, use_of(ahead.what))
                    transfer = ahead
                device, now = self._waited_for(transfer), transfer.start
            else:
                yield Leg("delay", now, device)
                return

    def _waited_for(self, transfer: _Transfer) -> str:
        """Return the device that let it start: its sender, or the last to join a sum."""
        if isinstance(transfer.what, Reduce):
            return max(transfer.what.devices, key=lambda name: self._latest(name, transfer.start))
        return transfer.source

    def _latest(self, device: str, now: float) -> float:
        computed, transfer = self._computed_by(device, now), self._arrived_by(device, now)
        return max(computed.end if computed else 0.0, transfer.arrives if transfer else 0.0)

    def _computed_by(self, device: str, now: float) -> Span | None:
        spans = self.computed[device]
        place = bisect_right(spans, now, key=lambda span: span.end)
        return spans[place - 1] if place else None

    def _arrived_by(self, device: str, now: float) -> _Transfer | None:
        arrivals = self.reaches[device]
        place = bisect_right(arrivals, now, key=itemgetter(0))
        while (
            place and id(arrivals[place - 1][1]) in self.seen
        ):  # links without time or delay: no transfer counts twice
            place -= 1
        return arrivals[place - 1][1] if place else None
