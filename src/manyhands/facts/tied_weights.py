"""Weights that several stages hold: a tied weight, such as an embedding that is the output layer too.

Every stage that reads one has a copy on each of its devices. The copies start equal, the gradients of all of them are
added up before each step of the optimizer, and so they stay equal. A buffer that the network writes as it trains has
one place only: nothing would bring its copies together.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan

WeightNames = Sequence[tuple[str, ...]]
"""The weights that each stage of a plan reads."""


def tied_weights(network: Network, weights: WeightNames) -> dict[str, tuple[int, ...]]:
    """Return each trained weight that several stages read, with the numbers of these stages."""
    stages_of: dict[str, list[int]] = {}
    for index, names in enumerate(weights):
        for name in names:
            if network.weights[name].trainable:
                stages_of.setdefault(name, []).append(index)
    return {name: tuple(stages) for name, stages in stages_of.items() if len(stages) > 1}


def check_tied_weights(plan: Plan, network: Network, weights: WeightNames) -> None:
    """Refuse a plan in which several stages would change copies of a weight each in its way."""
    _check_written(network, weights)
    for name, stages in tied_weights(network, weights).items() if plan.is_training else ():
        both = f"stages[{stages[1]}] and stages[{stages[0]}] both use the weight '{name}'"
        together = "put the layers that share a weight into one stage"
        if plan.order == "replay":
            raise BadPlan(
                f"{both}, and order is replay, in which stages step at different times.",
                hint=f"Use order: 1f1b, or {together}.",
            )
        gateway = next((i for i in stages if is_gateway(plan, i)), None)
        if gateway is not None:
            raise BadPlan(
                f"{both}, and stages[{gateway}].reduce is gateway: only one of its devices steps.",
                hint=f"Use reduce: allreduce, or {together}.",
            )


def is_gateway(plan: Plan, stage: int) -> bool:
    """Return whether one device of a stage adds up the gradients of all."""
    return plan.stages[stage].reduce == "gateway" and len(plan.stages[stage].devices) > 1


def _check_written(network: Network, weights: WeightNames) -> None:
    written = {name for op in network.ops for name in op.writes}
    stage_of: dict[str, int] = {}
    for index, names in enumerate(weights):
        for name in names:
            if name in written and stage_of.setdefault(name, index) != index:
                raise BadPlan(
                    f"stages[{index}] and stages[{stage_of[name]}] both use the buffer '{name}', which is written "
                    "in training.",
                    hint="Put the layers that share it into one stage.",
                )
