"""The choice of the device that a run which stands still should go on without, by progress and not by heartbeats.

A process that answers may still be of no use: its computation hangs, two devices cannot reach each other, or one sends
what is not in the plan. Each worker's heartbeat carries its `Standing`: a counter that rises with everything it gets
done, and the devices it waits for. From all of them together, the root cause is found in this order:

    1. hung          computes and has finished nothing for the limit
    2. off the plan  another waits for it, and has refused what it sent
    3. unreachable   two devices do not reach each other, or cannot connect: the one that does less work goes
    4. waited for    others wait for it and it waits for none: it lost or never sent what they need
    5. a circle      all wait for each other, and nothing above explains it: the one that most of them wait for goes

The first three are clear after the limit, the last two are judged after twice the limit. If a device waits for a batch
which the coordinator has not sent yet, no device is at fault. While the coordinator gets no heartbeats of a device,
nobody is judged: it may be what all others wait for, and the failure detector soon says whether it is lost. No threads,
and no clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.network import Network
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import op_range
from manyhands.runtime.control_parts import Standing

LEAST_SECONDS = 4.0
"""Least limit: a process can be kept from running for a second or two by its machine."""
ROUNDS = 10.0
"""Limit in usual rounds' times. Five times slower than usual is slow, not broken."""
FIRST_LEAST_SECONDS = 6.0
FIRST_ROUNDS = 30.0
"""The same for the first round by a plan, in which memory is allocated and kernels are warmed up."""
PREDICTED_ROUNDS = 100.0
"""The same for a job's first round, whose time was only predicted."""
PREDICTED_LEAST_SECONDS = 30.0
SILENT_SECONDS = 3.0
"""Peers send each other a heartbeat every second: without a byte for this long, they do not reach each other."""
HEARD_SECONDS = 2.0
"""Workers send the coordinator a heartbeat every half second: from one that has sent nothing for this long, what its
last heartbeat said may be no longer true."""
CONNECT_SECONDS = 8.0
"""Two devices that wait for each other's connection for this long cannot reach each other."""
_UNCLEAR = 2.0
"""Factor on the limit where there is no direct evidence."""


@dataclass(frozen=True)
class Observed:
    """One device of a run, as the coordinator sees it now."""

    standing: Standing | None
    """The device's place in the run; None: it takes part in nothing at the moment."""
    unmoved_seconds: float
    work: float = 1.0
    """The device's part of the run's computation: this is lost with it."""
    silent_seconds: float = 0.0
    """Seconds for which it has sent the coordinator nothing."""

    def waits_for(self, devices: Mapping[str, Observed]) -> list[str]:
        return [] if self.standing is None else [name for name in self.standing.waits_for if name in devices]


@dataclass(frozen=True)
class Verdict:
    """The device to go on without, and why."""

    device: str
    reason: str
    pairs: tuple[tuple[str, str], ...] = ()
    """The pairs that do not reach each other, where this is the reason."""


def limit_seconds(
    round_seconds: float | None,
    usual_seconds: float | None,
    predicted_seconds: float | None,
    timeout_factor: float = 1.0,
) -> float | None:
    """Return the seconds that a device may make no progress; None where nothing is known to derive it from.

    `round_seconds`: of recent rounds by this plan; `usual_seconds`: by the job's earlier plans; `predicted_seconds`:
    of a round, by the planner.
    """
    if round_seconds is not None:
        limit = max(LEAST_SECONDS, ROUNDS * round_seconds)
    elif usual_seconds is not None:
        limit = max(FIRST_LEAST_SECONDS, FIRST_ROUNDS * usual_seconds)
    elif predicted_seconds is not None:
        limit = max(PREDICTED_LEAST_SECONDS, PREDICTED_ROUNDS * predicted_seconds)
    else:
        return None
    return limit * timeout_factor


def judge(
    devices: Mapping[str, Observed], limit: float, *, steps_fed: int, stride: int = 1, timeout_factor: float = 1.0
) -> Verdict | None:
    """Return the device that keeps the run from going on; None while all make progress, wait for the coordinator, or
    one sends no heartbeats.

    `limit`: seconds without progress, see `limit_seconds`. `steps_fed`: the first step whose batch was not sent yet;
    `stride`: steps of a round.
    """
    if _any_silent(devices, timeout_factor):
        return None
    stuck = {
        name: device
        for name, device in devices.items()
        if device.standing is not None and device.unmoved_seconds >= limit
    }
    return (
        _hung(stuck)
        or _off_the_plan(stuck, devices)
        or _unreachable(stuck, devices, timeout_factor)
        or _waited_for(devices, _UNCLEAR * limit, steps_fed - stride)
    )


def judge_copies(
    devices: Mapping[str, Observed],
    owing: Sequence[tuple[str, str]],
    limit: float,
    *,
    coordinator_unmoved_seconds: float,
    timeout_factor: float = 1.0,
) -> Verdict | None:
    """Return the device whose copy never comes, so that the coordinator sends no further batch.

    `owing`: devices whose copies are missing, each with the receiver: another device, or the coordinator.
    """
    still = min([coordinator_unmoved_seconds, *(device.unmoved_seconds for device in devices.values())])
    if not owing or still < _UNCLEAR * limit or _any_silent(devices, timeout_factor):
        return None
    for source, holder in owing:
        standing = devices[holder].standing if holder in devices else None
        if standing is not None and standing.refused.get(source):
            return Verdict(source, f"{holder} refused its copy of the state: it is not what was announced")
    votes = Counter(name for pair in owing for name in set(pair) if name in devices)
    evicted = _cheapest(votes, devices)
    return Verdict(evicted, f"waited {still:.1f} s for a copy of the state that it was to send or to hold")


def suspect(devices: Mapping[str, Observed], timeout_factor: float = 1.0) -> Verdict | None:
    """Return the device that explains why another failed while it waited.

    Only direct evidence counts, from the last heartbeat before that.
    """
    return _off_the_plan(devices, devices) or _unreachable(devices, devices, timeout_factor)


def work_of(plan: Plan, network: Network) -> dict[str, float]:
    """Return device -> its part of all multiply-accumulates of a round."""
    work: dict[str, float] = dict.fromkeys(plan.devices, 0.0)
    for stage in plan.stages:
        first, last = op_range(stage, network)
        macs = 1 + sum(op.macs for op in network.ops[first:last])
        for name, part in _parts(stage).items():
            work[name] += macs * part
    return {name: amount / sum(work.values()) for name, amount in work.items()}


def _parts(stage: Stage) -> dict[str, float]:
    share = stage.share
    if isinstance(share, BySamples):
        sizes = [float(count) for count in share.samples]
    elif isinstance(share, ByTiles):
        sizes = [height * width for height in share.rows for width in share.columns]
    elif isinstance(share, ByChannels):
        sizes = [float(count) for count in share.groups]
    else:
        sizes = [1.0] * len(stage.devices)
    return {name: size / sum(sizes) for name, size in zip(stage.devices, sizes)}


def _any_silent(devices: Mapping[str, Observed], timeout_factor: float) -> bool:
    return any(device.silent_seconds >= HEARD_SECONDS * timeout_factor for device in devices.values())


def _hung(stuck: Mapping[str, Observed]) -> Verdict | None:
    for name, device in stuck.items():
        standing = device.standing
        if standing is not None and standing.is_busy and standing.step >= 0:
            reason = f"it answers, but has made no progress for {device.unmoved_seconds:.1f} s at step {standing.step}"
            return Verdict(name, reason)
    return None


def _off_the_plan(stuck: Mapping[str, Observed], devices: Mapping[str, Observed]) -> Verdict | None:
    for name, device in stuck.items():
        refused = device.standing.refused if device.standing is not None else {}
        for other in device.waits_for(devices):
            if refused.get(other):
                return Verdict(
                    other, f"{name} waits for it and refused {refused[other]} message(s) that are not in the plan"
                )
    return None


def _unreachable(
    stuck: Mapping[str, Observed], devices: Mapping[str, Observed], timeout_factor: float
) -> Verdict | None:
    pairs = _silent_pairs(stuck, devices, timeout_factor) | _unconnected_pairs(devices, timeout_factor)
    if not pairs:
        return None
    count = Counter(name for pair in pairs for name in pair)
    evicted = _cheapest(count, devices)
    others = sorted({name for pair in pairs if evicted in pair for name in pair} - {evicted})
    unreached = tuple(sorted((min(pair), max(pair)) for pair in pairs))
    return Verdict(evicted, f"it and {', '.join(others)} do not reach each other", unreached)


def _silent_pairs(
    stuck: Mapping[str, Observed], devices: Mapping[str, Observed], timeout_factor: float
) -> set[frozenset[str]]:
    """Return the pairs of which one does not reach the other, as soon as any device is stuck."""
    if not stuck:
        return set()
    return {
        frozenset((name, other))
        for name, device in devices.items()
        if device.standing is not None
        for other, seconds in device.standing.silent.items()
        if other in devices and seconds >= SILENT_SECONDS * timeout_factor
    }


def _unconnected_pairs(devices: Mapping[str, Observed], timeout_factor: float) -> set[frozenset[str]]:
    """Return the pairs that have both waited for each other's connection for too long."""
    waiting = {
        name: set(device.waits_for(devices))
        for name, device in devices.items()
        if device.standing is not None
        and device.standing.is_connecting
        and device.unmoved_seconds >= CONNECT_SECONDS * timeout_factor
    }
    return {
        frozenset((name, other))
        for name, others in waiting.items()
        for other in others
        if name in waiting.get(other, ())
    }


def _waited_for(devices: Mapping[str, Observed], limit: float, last_round_fed: int) -> Verdict | None:
    """Return the device at the end of the chains of waiting devices; in a circle, the one that most wait for."""
    stuck = {
        name: device.waits_for(devices)
        for name, device in devices.items()
        if device.standing is not None and device.standing.step >= 0 and device.unmoved_seconds >= limit
    }
    votes = Counter(other for others in stuck.values() for other in others)
    if not votes:
        return None
    ends = {name for name in votes if not stuck.get(name)}
    guilty = {name: votes[name] for name in ends if not _waits_for_a_batch(devices[name], last_round_fed)}
    if ends and not guilty:
        return None
    evicted = _cheapest(guilty or votes, devices)
    waiting = ", ".join(sorted(name for name, others in stuck.items() if evicted in others))
    seconds = min(devices[name].unmoved_seconds for name in stuck)
    return Verdict(evicted, f"{waiting} waited {seconds:.1f} s for what it was to send")


def _cheapest(votes: Mapping[str, int], devices: Mapping[str, Observed]) -> str:
    """Return the device with most votes; of several the one that does least work, and then the last by name."""
    return min(sorted(votes, reverse=True), key=lambda name: (-votes[name], devices[name].work))


def _waits_for_a_batch(device: Observed, last_round_fed: int) -> bool:
    """Return whether a device waits for a batch that the coordinator has not sent yet."""
    standing = device.standing
    return standing is not None and COORDINATOR in standing.waits_for and standing.step > last_round_fed
