"""The settings of PyTorch's pipelines, tuned by trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from manyhands.facts.plan import Plan
from manyhands_bench.figures import Progress
from manyhands_bench.pipeline.torch_group import TorchGroup
from manyhands_bench.pipeline.torch_setting import TorchSetting, TorchVariant

TRIAL_STEPS = 3


def splits(
    units: Sequence[tuple[float, int]], speeds: Sequence[float], bytes_per_second: float, count: int
) -> list[tuple[int, ...]]:
    """Return the bounds of the `count` most even pipelines over devices of these speeds, by their slowest stage or
    link."""

    def slowest(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(units))
        stages = [
            sum(seconds for seconds, _ in units[first:last]) / speed
            for (first, last), speed in zip(pairwise(bounds), speeds, strict=True)
        ]
        return max([*stages, *(units[cut - 1][1] / bytes_per_second for cut in cuts)])

    every = combinations(range(1, len(units)), len(speeds) - 1)
    return [(0, *cuts, len(units)) for cuts in sorted(every, key=slowest)[:count]]


def shared_out(samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return shares of the samples in proportion to speeds, at least one each."""
    shares = [max(1, int(samples * speed / sum(speeds))) for speed in speeds]
    while sum(shares) < samples:  # the device furthest below its due
        most = max(range(len(speeds)), key=lambda device: speeds[device] / sum(speeds) * samples - shares[device])
        shares[most] += 1
    while sum(shares) > samples:
        shares[shares.index(max(shares))] -= 1
    return tuple(shares)


@dataclass
class Tuned:
    """PyTorch's ways, the best setting of each kind, and every trial."""

    best: dict[str, TorchVariant]
    trials: dict[TorchVariant, float]

    def text(self, kind: str) -> str:
        tried = [f"{way} {seconds:.3g} s" for way, seconds in self.trials.items() if way.kind == kind]
        return f"{self.best[kind]}; best of {len(tried)} tried: {'; '.join(tried)}"


def tuned(
    group: TorchGroup, setting: TorchSetting, speeds: Sequence[float], bytes_per_second: float, count: int,
    ours: Plan, names: Sequence[str], say: Progress,
) -> Tuned:  # fmt: skip
    """Try what a careful person would: splits by capacity and an even one, fewer devices, shares by capacity; and our
    plan's own cuts, if each of its stages has a single device. Return the best of each kind and every trial."""
    all_ranks = tuple(range(len(speeds)))
    trials: dict[TorchVariant, float] = {}

    def attempt(ways: Iterable[TorchVariant]) -> None:
        for way in ways:
            if way not in trials:
                say(f"trying {way}")
                trials[way] = min(group.run(way, TRIAL_STEPS)[1:])

    def best(kind: str, most: int = 1) -> list[TorchVariant]:
        return sorted((way for way in trials if way.kind == kind), key=lambda way: trials[way])[:most]

    usual = setting.micro_batches
    units = group.units(setting.samples // usual)
    even = splits(units, [1.0] * len(speeds), bytes_per_second, 1)
    bounds = [*splits(units, speeds, bytes_per_second, count), *even]
    attempt(TorchVariant("1f1b", all_ranks, bound, usual) for bound in bounds)
    if len(speeds) > 2:
        fewer = splits(units, speeds[:2], bytes_per_second, max(1, count // 2))
        attempt(TorchVariant("1f1b", all_ranks[:2], bound, usual) for bound in fewer)
    if len(ours.stages) > 1 and all(len(stage.devices) == 1 for stage in ours.stages):
        ranks = tuple(names.index(stage.devices[0]) for stage in ours.stages)
        if ranks == tuple(sorted(ranks)):
            attempt([TorchVariant("1f1b", ranks, (0, *(int(stage.layers[1]) for stage in ours.stages)), usual)])
    attempt(
        replace(leading, micro_batches=number)
        for leading in best("1f1b", 3)
        for number in {ours.micro_batches, usual // 2}
        if number >= len(leading.ranks) and setting.samples % number == 0
    )
    attempt(replace(way, kind="gpipe") for way in best("1f1b", 3))
    samples = setting.samples
    shares = {shared_out(samples, [1.0] * len(speeds)), shared_out(samples, speeds)}
    attempt(TorchVariant("ddp", all_ranks, shares=share) for share in sorted(shares))
    attempt([replace(best(kind)[0], channels_last=True) for kind in ("1f1b", "gpipe", "ddp")])
    return Tuned({kind: best(kind)[0] for kind in ("1f1b", "gpipe", "ddp")}, trials)
