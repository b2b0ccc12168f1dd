"""Plans whose layers run forward again in the backward pass, for devices that could not keep all activations.

Time is the price (each such layer's forward pass twice), so it is the last resort: it is tried where a strategy's plans
do not fit with any number of micro-batches, and dropped again from the stages that fit without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec

from manyhands.facts.errors import OutOfMemory
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import layer_range

ORDERS = ("sequential", "gpipe", "1f1b", "eager")
"""Orders in which layers can be run again: not replay, which runs whole stages again, nor those of inference."""


def recomputed(plan: Plan, network: Network) -> Plan:
    """Return a resolved plan in which every layer that can be run again is, but the one whose backward pass comes
    first."""
    if plan.order not in ORDERS:
        return plan
    stages = [_recomputed(plan, stage, network, is_last=stage is plan.stages[-1]) for stage in plan.stages]
    return msgspec.structs.replace(plan, stages=tuple(stages))


def _recomputed(plan: Plan, stage: Stage, network: Network, *, is_last: bool) -> Stage:
    if not isinstance(stage.share, (Single, BySamples)):
        return stage
    first, last = layer_range(stage)
    shares_norms = len(stage.devices) > 1 and plan.batch_norm == "synchronised"
    spans = tuple(
        (layer, layer + 1)
        for layer in range(first, last - is_last)
        if not (shares_norms and _has_statistics(network, layer))
    )
    return msgspec.structs.replace(stage, recompute=spans)


def _has_statistics(network: Network, layer: int) -> bool:
    ops = network.ops[network.layers[layer].first : network.layers[layer].last]
    return any(op.statistics for op in ops)


def within_memory(plan: Plan, network: Network, price: Callable[[Plan], float]) -> tuple[Plan, float]:
    """Return a plan that fits with recomputation, and its price: of the stages that can do without it, none has it.
    Raises OutOfMemory where it does not fit with it either."""
    chosen = recomputed(plan, network)
    seconds = price(chosen)
    for index, stage in enumerate(plan.stages):
        if not chosen.stages[index].recompute:
            continue
        stages = (*chosen.stages[:index], stage, *chosen.stages[index + 1 :])
        with suppress(OutOfMemory):
            other = msgspec.structs.replace(chosen, stages=stages)
            other_seconds = price(other)
            if other_seconds <= seconds:
                chosen, seconds = other, other_seconds
    return chosen, seconds
