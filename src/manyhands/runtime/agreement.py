"""Finds the device whose numbers are wrong, from what the devices that form a sum report of it.

Devices that share a stage add up their gradients, and then hold the same sum and the same weights. Each reports
projections (`executor.projections`) of what it sent, what it received, the sum it formed, the sum it got back, and of
its weights after the step. The same numbers pass through several devices, and must be the same in each:

    sent by a device             =  received by the one that adds it up      else one of the two is wrong
    its own + what it received   =  the sum that it formed                   else that device is wrong
    the sum that it formed       =  the sum that the others hold             else the outvoted device is wrong
    weights of a device          =  weights of the others                    else the outvoted device is wrong

Of two devices that contradict each other either may be wrong: the one that contradicts more of the others is evicted,
then the one that did so before, then the one that does less of the work, and the reason says so.

Numbers that are not finite are another matter: a network that diverges produces them, and so does a sample that it
cannot process. A replica that alone has them is evicted and the round is run again. If they come again in that step,
they are the network's own, and the run ends as on one device.

Rounding differs between machines, and must never be taken for a fault: the tolerance follows from the norms of the
compared values, and an error smaller than it goes unnoticed. The module uses no threads, no clock and no tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from manyhands.executor.projections import SumRecord
from manyhands.facts.network import Network
from manyhands.runtime.stalls import Verdict
from manyhands.schedule.actions import Reduce
from manyhands.schedule.policy import Schedule
from manyhands.schedule.reduction import chunk_points, gradient_rounds

SLACK = 64.0
"""How far projections of the same numbers may lie apart, in units of the rounding error of one number times the norm.
Correct devices reach a tenth of it."""
DRIFT = 4.0
"""The slack that each optimiser step adds, because machines may round the weights differently."""
EXPLODED = 1e6
"""A gradient this many times as long as any before it comes from a network that diverges."""
_PRECISION = {"float64": (2.3e-16, 2.3e-308, 1e307), "float32": (1.2e-7, 1.2e-38, 1e37)}
_COARSE = (8e-3, 1.2e-38, 1e4)
"""For other types: rounding error of one number, smallest number, magnitude beyond which sums may overflow."""

Key = tuple[int, int, int, int, str]
Value = float | None


@dataclass
class Suspicions:
    """The doubts about a job's devices that it carries from one generation to the next."""

    disputes: Counter[str] = field(default_factory=Counter)
    """Device -> how often it contradicted another while neither could be shown to be wrong."""
    not_finite: dict[int, str] = field(default_factory=dict)
    """Step -> the device that was evicted because its gradients alone were not finite."""


@dataclass
class Evidence:
    """The contradictions found in the sums of a round."""

    wrong: list[Verdict] = field(default_factory=list)
    """Devices whose own report contradicts itself."""
    outvoted: list[Verdict] = field(default_factory=list)
    """Devices that most others contradict."""
    disputes: list[tuple[str, str, str]] = field(default_factory=list)
    """Pairs of devices that contradict each other, and about what."""

    def add_vote(self, values: Mapping[str, Value], tolerance: float, subject: str) -> None:
        """Compare values that should be the same on all devices: one that differs from more than half is outvoted."""
        if all(_agree(value, other, tolerance) for value, other in pairwise(values.values())):
            return
        supporters = {
            name: sum(_agree(value, other, tolerance) for other in values.values()) for name, value in values.items()
        }
        most = max(values, key=lambda name: supporters[name])
        others = [name for name in values if not _agree(values[name], values[most], tolerance)]
        if 2 * supporters[most] > len(values):
            most_of_them = ", ".join(sorted(set(values) - set(others)))
            self.outvoted += [Verdict(name, f"{subject} differs from that of {most_of_them}") for name in others]
        else:
            self.disputes += [(most, name, f"{subject} differs") for name in others]


def evidence_of(
    reduce: Reduce, records: Mapping[str, SumRecord], counts: Sequence[int], dtype: str, evidence: Evidence
) -> None:
    """Compare the devices' reports of one sum, and add the contradictions to `evidence`.

    `counts`: how many numbers each chunk has.
    """
    if not any(record.received for record in records.values()):
        return _evidence_of_group(reduce, records, counts, dtype, evidence)
    huge = _PRECISION.get(dtype, _COARSE)[2]
    norms = [sum(record.norms[chunk] for record in records.values()) for chunk in range(len(counts))]
    tolerances = _tolerances(records, counts, dtype)
    holds = {name: list(record.own) for name, record in records.items()}
    received = {name: iter(record.received) for name, record in records.items()}
    sums = {name: iter(record.sums) for name, record in records.items()}
    rounds = gradient_rounds(reduce.devices, reduce.places)
    is_direct = len(rounds) == 2
    for hops in rounds:
        sent = {name: tuple(values) for name, values in holds.items()}
        formed: dict[tuple[str, int], Value] = {}
        for hop, chunk in ((each, chunk) for each in hops for chunk in range(each.first, each.last)):
            target, sent_value = hop.target, sent[hop.source][chunk]
            if not hop.adds:
                holds[target][chunk] = received_value = records[target].after[chunk]
            else:
                received_value = next(received[target])
                formed[target, chunk] = _plus(formed.get((target, chunk), sent[target][chunk]), received_value)
            is_vote = is_direct and not hop.adds
            if not is_vote and not _agree(sent_value, received_value, tolerances[chunk]):
                evidence.disputes.append((hop.source, target, f"what {hop.source} sent is not what {target} received"))
        for (name, chunk), expected in formed.items():
            holds[name][chunk] = claimed = next(sums[name])
            is_overflow = claimed is None and norms[chunk] > huge
            if not is_overflow and not _agree(expected, claimed, tolerances[chunk]):
                evidence.wrong.append(Verdict(name, "its sum of the gradients is not the sum of what it was given"))
    for name, record in records.items():
        if not all(map(_agree, holds[name], record.after, tolerances)):
            evidence.wrong.append(Verdict(name, "the sum of the gradients that it holds is not the one that it formed"))
    if is_direct:
        for chunk, owner in enumerate(reduce.devices):
            values = {name: record.after[chunk] for name, record in records.items()}
            evidence.add_vote(values, tolerances[chunk], f"the sum of the gradients that {owner} formed, as it has it,")


def _tolerances(records: Mapping[str, SumRecord], counts: Sequence[int], dtype: str) -> list[float]:
    """Return how far two reports of each chunk may lie apart."""
    error, tiny, _ = _PRECISION.get(dtype, _COARSE)
    norms = [sum(record.norms[chunk] for record in records.values()) for chunk in range(len(counts))]
    return [
        SLACK * error * norm + 16 * len(records) * count * tiny for norm, count in zip(norms, counts)
    ]  # the second term: numbers so small that a machine may take them for zero


def _evidence_of_group(
    reduce: Reduce, records: Mapping[str, SumRecord], counts: Sequence[int], dtype: str, evidence: Evidence
) -> None:
    """Compare the reports of a sum that a process group has formed: nothing is known of what travelled, so a wrong sum
    on all devices may be anybody's."""
    owners = ", ".join(reduce.devices)
    tolerances = _tolerances(records, counts, dtype)
    huge = _PRECISION.get(dtype, _COARSE)[2]
    for chunk, tolerance in enumerate(tolerances):
        held = {name: record.after[chunk] for name, record in records.items()}
        evidence.add_vote(held, tolerance, f"the sum of the gradients of {owners}, as it has it,")
        expected: Value = 0.0
        for record in records.values():
            expected = _plus(expected, record.own[chunk])
        is_overflow = None in held.values() and sum(record.norms[chunk] for record in records.values()) > huge
        if not is_overflow and not any(_agree(expected, value, tolerance) for value in held.values()):
            reason = "the sum of the gradients is not that of what each reported before it"
            evidence.disputes += [(device, other, reason) for device, other in combinations(reduce.devices, 2)]


def decided(evidence: Evidence, work: Mapping[str, float], before: Mapping[str, int]) -> tuple[Verdict, bool] | None:
    """Return the device to go on without, and whether it is certain that it is wrong; None where nothing is wrong.

    `work`: device -> its part of a round's work. `before`: device -> its disputes in earlier rounds.
    """
    for verdicts in (evidence.wrong, evidence.outvoted):
        if verdicts:
            count = Counter(verdict.device for verdict in verdicts)
            suspect = min(count, key=lambda name: (-count[name], work.get(name, 0.0), name))
            return next(verdict for verdict in verdicts if verdict.device == suspect), True
    if not evidence.disputes:
        return None
    votes = Counter(name for device, other, _ in evidence.disputes for name in (device, other))

    def rank(name: str) -> tuple[int, int]:
        return votes[name], before.get(name, 0)

    suspect = min(
        sorted(votes, reverse=True), key=lambda name: (-votes[name], -before.get(name, 0), work.get(name, 0.0))
    )
    suspect_disputes = [dispute for dispute in evidence.disputes if suspect in dispute[:2]]
    others = sorted({name for device, other, _ in suspect_disputes for name in (device, other)} - {suspect})
    reason = suspect_disputes[0][2]
    if any(rank(name) == rank(suspect) for name in others):
        reason += f" ({suspect} and {others[0]}; either may be wrong, and {suspect} does less of the work)"
        return Verdict(suspect, reason), False
    return Verdict(suspect, f"{reason} (it and {', '.join(others)})"), True


def _agree(value: Value, other: Value, tolerance: float) -> bool:
    if value is None or other is None:
        return value is other
    return abs(value - other) <= tolerance


def _plus(value: Value, other: Value) -> Value:
    return None if value is None or other is None else value + other


@dataclass(frozen=True)
class _Sum:
    reduce: Reduce
    counts: tuple[int, ...]
    dtype: str
    layers: str
    received: Mapping[str, int]
    """Device -> chunks that it adds to its own."""
    sums: Mapping[str, int]


@dataclass(frozen=True)
class Divergence:
    """Gradients that stopped being finite and are the network's own."""

    step: int
    layers: str
    devices: tuple[str, ...]

    def __str__(self) -> str:
        return f"in the gradients of step {self.step}, in layer {self.layers}, on {', '.join(self.devices)}"


class Agreement:
    """Compares what the devices of a run report of each round."""

    def __init__(
        self, schedule: Schedule, work: Mapping[str, float], suspicions: Suspicions, may_overflow: bool = False,
        uses_groups: bool = False,
    ) -> None:  # fmt: skip
        """`may_overflow`: gradients that are not finite are nobody's fault, since the loss is scaled. `uses_groups`:
        process groups may form the sums, of which no device knows what it received."""
        self.suspicions, self._may_overflow, self._uses_groups = suspicions, may_overflow, uses_groups
        self.divergence: Divergence | None = None
        self._work, self._network = work, schedule.network
        self._replicas = {name for stage in schedule.plan.stages if len(stage.devices) > 1 for name in stage.devices}
        self._sums = _sums_of(schedule) if schedule.plan.is_training else {}
        self._of_device: dict[str, set[Key]] = defaultdict(set)
        for key, gradient_sum in self._sums.items():
            for name in gradient_sum.reduce.devices:
                self._of_device[name].add(key)
        self._weights: dict[Key, dict[str, Value]] = {}
        """Projections of the weights after the last round."""
        self._norms: dict[Key, float] = {}
        """The norm of the longest gradient so far."""

    def compare(
        self, step: int, sums: Mapping[str, Sequence[SumRecord]], not_finite_from: Mapping[str, str]
    ) -> Verdict | None:
        """Return the device whose numbers of a round are wrong; None where all agree.

        Call it once for each round, in order. `step`: the round's last. `not_finite_from`: device -> the device from
        which it got its first numbers that are not finite, possibly itself.
        """
        if not self._sums:
            return None
        records: dict[Key, dict[str, SumRecord]] = defaultdict(dict)
        for name, expected_keys in self._of_device.items():
            for record in sums.get(name, ()):
                records[record.key][name] = record
            if misfit := self._misfit(name, expected_keys, sums.get(name, ())):
                return Verdict(name, f"what it reports of the sums of step {step} {misfit}")
        for key, device_records in records.items():
            if missing := [name for name in self._sums[key].reduce.devices if name not in device_records]:
                return Verdict(missing[0], f"what it reports of step {step} leaves out a sum of gradients")
        if not self._may_overflow and (verdict := self._not_finite(step, records, not_finite_from)):
            return verdict
        evidence = Evidence()
        for key, device_records in records.items():
            gradient_sum = self._sums[key]
            evidence_of(gradient_sum.reduce, device_records, gradient_sum.counts, gradient_sum.dtype, evidence)
        self._compare_weights(step, records, evidence)
        decision = decided(evidence, self._work, self.suspicions.disputes)
        if decision is None:
            return None
        verdict, is_certain = decision
        if not is_certain:
            self.suspicions.disputes.update(
                {name for device, other, _ in evidence.disputes for name in (device, other)}
            )
        return Verdict(verdict.device, f"at step {step} {verdict.reason}")

    def _misfit(self, name: str, expected_keys: set[Key], records: Sequence[SumRecord]) -> str:
        """Return how a device's report differs from the sums that the plan gives it; empty where it does not."""
        keys = [record.key for record in records]
        if not set(keys) <= expected_keys or len(set(keys)) < len(keys):
            return "is not in the plan"
        for record in records:
            gradient_sum = self._sums[record.key]
            parts = len(gradient_sum.counts)
            lengths = [
                len(numbers) for numbers in (record.own, record.norms, record.after, record.received, record.sums)
            ]
            by_messages = [gradient_sum.received[name], gradient_sum.sums[name]]
            by_group = [[0, 0]] if self._uses_groups else []
            if lengths[:3] != [parts, parts, parts] or lengths[3:] not in [by_messages, *by_group]:
                return "is not of the plan's sizes"
        return ""

    def _not_finite(
        self, step: int, records: Mapping[Key, Mapping[str, SumRecord]], sources: Mapping[str, str]
    ) -> Verdict | None:
        """Return the device where numbers stopped being finite; None where they are finite, or the network diverges."""
        exploded = False
        bad: dict[str, Key] = {}
        for key, device_records in records.items():
            for name, record in device_records.items():
                if None in record.own:
                    bad.setdefault(name, key)
            longest = max(sum(record.norms) for record in device_records.values())
            exploded = exploded or (key in self._norms and longest > EXPLODED * self._norms[key])
            self._norms[key] = max(longest, self._norms.get(key, 0.0))
        if not bad or self.divergence is not None:
            return None
        began = {*bad, *sources.values()} - {name for name, source in sources.items() if source != name}
        layers = self._sums[next(iter(bad.values()))].layers
        has_no_like = began <= bad.keys() - self._replicas  # nobody else computes what it does: it cannot be compared
        if exploded or len(began) != 1 or has_no_like or step in self.suspicions.not_finite:
            self.divergence = Divergence(step, layers, tuple(sorted(began or bad)))
            return None
        device = next(iter(began))
        self.suspicions.not_finite[step] = device
        subject = "its gradient" if device in bad else "what it sent to others"
        return Verdict(device, f"at step {step} {subject} was not finite, in layers {layers}, and the others' were")

    def _compare_weights(self, step: int, records: Mapping[Key, Mapping[str, SumRecord]], evidence: Evidence) -> None:
        """Compare the weights after a round, and how far they have moved in it.

        Weights may drift apart slowly where machines round differently, but neither suddenly nor by much.
        """
        for key, device_records in records.items():
            gradient_sum = self._sums[key]
            error = _PRECISION.get(gradient_sum.dtype, _COARSE)[0]
            norm = max(record.weights_norm for record in device_records.values()) + max(
                sum(r.norms) for r in device_records.values()
            )
            values = {name: record.weights for name, record in device_records.items()}
            last, self._weights[key] = self._weights.get(key), values
            subject = f"its weights of layers {gradient_sum.layers}: their projection"
            evidence.add_vote(values, (SLACK + DRIFT * (step + 1)) * error * norm, subject)
            if last is not None and None not in (*values.values(), *last.values()):
                moved = {name: (values[name] or 0.0) - (last[name] or 0.0) for name in values}
                evidence.add_vote(moved, (SLACK + DRIFT) * error * norm, subject)


def _sums_of(schedule: Schedule) -> dict[Key, _Sum]:
    """Return every sum of gradients of a round, by key."""
    network = schedule.network
    sums_of_key: dict[Key, _Sum] = {}
    for device in schedule.plan.devices:
        for action in schedule.every_action(device):
            if not isinstance(action, Reduce) or action.what != "gradients":
                continue
            tied = action.weights[0] if action.weights else ""
            key = (action.stage, action.first, action.last, action.micro_batch, tied)
            if key in sums_of_key:
                continue
            counts = tuple(last - first for first, last in pairwise(chunk_points(action, network)))
            received: Counter[str] = Counter()
            sums: Counter[str] = Counter()
            for hops in gradient_rounds(action.devices, action.places):
                added = [(hop.target, chunk) for hop in hops if hop.adds for chunk in range(hop.first, hop.last)]
                received.update(target for target, _ in added)
                sums.update(target for target, _ in set(added))
            sums_of_key[key] = _Sum(action, counts, _dtype(action, network), _layers(action, network), received, sums)
    return sums_of_key


def _dtype(reduce: Reduce, network: Network) -> str:
    names = reduce.weights or [name for op in network.ops[reduce.first : reduce.last] for name in op.weights]
    return next((network.weights[name].dtype for name in names if network.weights[name].trainable), "")


def _layers(reduce: Reduce, network: Network) -> str:
    first, last = (network.layers[network.layer_of_op[op]].name for op in (reduce.first, reduce.last - 1))
    return first if first == last else f"{first} to {last}"
