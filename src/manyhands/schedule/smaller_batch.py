"""The plan for one smaller batch, from the plan that a job runs: the last batch of an epoch is what is left of it.

    12 samples, 2 micro-batches      5 samples                   2 samples
    a   2   2                        a   2                       a   1
    b   4   4                        b   3                       b   1
    c   6   6   the next stage       c   5                       c   2

Layers stay where they are, so that weights do too. The samples of every device are cut down in proportion; a device for
which none is left has nothing to do. There are as few micro-batches as there can be if none is larger than those of the
running plan: what a device holds of them then fits as it did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import resolve


def for_smaller_batch(plan: Plan, network: Network, samples: int) -> Plan:
    """Return the plan for a batch of so many samples, of a resolved plan for larger ones; refuse, with BadPlan, what
    cannot be computed as one device would."""
    assert 0 < samples < plan.step_size, "only a smaller batch needs another plan"
    if plan.steps_per_round > 1:
        raise BadPlan(
            f"order is {plan.order}: a round has {plan.steps_per_round} steps, of one size.", hint="Use order: 1f1b."
        )
    refusals: list[BadPlan] = []
    for micro_batches in _counts(samples, plan.micro_batch_size):
        try:
            return resolve(divided_anew(plan, samples, micro_batches), network)
        except BadPlan as error:
            refusals.append(error)
    raise refusals[0]


def _counts(samples: int, most: int) -> Iterator[int]:
    """Yield how many micro-batches there may be: the fewest of at most `most` samples each; where those are refused, as
    batch norm refuses single samples, fewer."""
    divisors = [count for count in range(1, samples + 1) if samples % count == 0]
    fewest = next(count for count in divisors if samples // count <= most)
    yield from (count for count in reversed(divisors) if count <= fewest)


def divided_anew(plan: Plan, samples: int, micro_batches: int) -> Plan:
    """Return the plan for so many samples in so many micro-batches, shared in the same proportions."""
    warm_up = plan.warm_up
    if isinstance(warm_up, tuple):
        warm_up = tuple(min(ahead, micro_batches) for ahead in warm_up)
    stages = tuple(_stage(stage, samples // micro_batches, plan.homes.values()) for stage in plan.stages)
    return msgspec.structs.replace(
        plan, batch_size=samples, micro_batches=micro_batches, warm_up=warm_up, stages=stages
    )  # fmt: skip


def _stage(stage: Stage, samples: int, homes: Collection[str]) -> Stage:
    """Return a stage for micro-batches of so many samples, on those of its devices that get any."""
    share = stage.share
    if isinstance(share, BySamples):
        kept = [place for place, device in enumerate(stage.devices) if device in homes]
        if stage.reduce == "gateway":  # it alone has the optimizer's state of its stage
            kept.insert(0, 0)
        counts = divided(samples, share.samples, kept)
        devices = tuple(device for device, count in zip(stage.devices, counts) if count)
        share = BySamples(tuple(filter(None, counts)))
    else:
        devices = stage.devices[:samples] if share.splits_samples else stage.devices
    if len(devices) == 1 < len(stage.devices):
        share = Single()
    return msgspec.structs.replace(stage, devices=devices, share=share)


def divided(samples: int, counts: Sequence[int], kept: Iterable[int] = ()) -> tuple[int, ...]:
    """Return so many samples divided in proportion to `counts`, rounded up where most is left over: of no more samples
    than `counts` has, nobody gets more than its count. `kept`: places that get one at least, if there are enough."""
    total = sum(counts)
    parts = [samples * count // total for count in counts]
    by_rest = sorted(range(len(counts)), key=lambda place: (-(samples * counts[place] % total), place))
    for place in by_rest[: samples - sum(parts)]:
        parts[place] += 1
    wanted = list(dict.fromkeys(kept))[:samples]
    for place in wanted:
        if not parts[place]:
            giver = max(range(len(parts)), key=lambda other: (parts[other] - (other in wanted), parts[other], -other))
            parts[giver] -= 1
            parts[place] = 1
    return tuple(parts)
