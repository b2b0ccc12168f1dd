"""The order of forward and backward passes on one stage: which micro-batch is run when.

Drawn for three stages and four micro-batches, forward as digits, backward as letters (a = backward of 0):

    sequential   0a1b2c3d            one after another: nothing overlaps
    gpipe        0123abcd            all forward, then all backward: M micro-batches are held
    1f1b, K=3    012a3bcd            K_p forward passes ahead, then one backward, one forward in turn (ASTEROID §3.2)
    stream       0123                inference: no backward, samples never overtake each other
    interleave   0.0.1.1.2           the same; while one waits for others the next is computed (interleave.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from manyhands.facts.plan import Plan

Pass = tuple[Literal["forward", "backward"], int]


def sequential(micro_batches: int) -> Iterator[Pass]:
    for number in range(micro_batches):
        yield ("forward", number)
        yield ("backward", number)


def gpipe(micro_batches: int) -> Iterator[Pass]:
    for number in range(micro_batches):
        yield ("forward", number)
    for number in range(micro_batches):
        yield ("backward", number)


def one_forward_one_backward(micro_batches: int, ahead: int) -> Iterator[Pass]:
    """Yield `ahead` forward passes; then a backward and a forward in turn; then the backward passes that remain."""
    ahead = max(1, min(ahead, micro_batches))
    for number in range(ahead):
        yield ("forward", number)
    for number in range(micro_batches):
        yield ("backward", number)
        if ahead + number < micro_batches:
            yield ("forward", ahead + number)


def stream(micro_batches: int) -> Iterator[Pass]:
    for number in range(micro_batches):
        yield ("forward", number)


def passes(plan: Plan, stage: int) -> tuple[Pass, ...]:
    """Return the fixed order of a stage. `eager` has none: it is decided as messages arrive (policy.py)."""
    if plan.order == "sequential":
        return tuple(sequential(plan.micro_batches))
    if plan.order == "gpipe":
        return tuple(gpipe(plan.micro_batches))
    if plan.order == "stream":
        return tuple(stream(plan.micro_batches))
    return tuple(one_forward_one_backward(plan.micro_batches, plan.warm_up_of(stage)))
