"""The check of a plan for a network with carried buffers: what one pass writes, the next reads in the same place."""

from __future__ import annotations

from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan


def check_carried(plan: Plan, network: Network) -> None:
    """Refuse a stage of several devices that carries a buffer from pass to pass, and training with one.

    Each device would carry what it has computed itself, and read what others have computed.
    """
    carrying = next((op for op in network.ops if op.carries), None)
    if carrying is None:
        return
    if plan.is_training:
        raise BadPlan(
            f"Operator {carrying.name} carries '{carrying.weights[0]}' from one pass to the next, and the plan trains.",
            hint="Train the network without its cache of keys and values.",
        )
    if plan.order != "stream":
        raise BadPlan(
            f"order is {plan.order}, and '{carrying.weights[0]}' is carried from each batch to the next.",
            hint="Use order: stream.",
        )
    for index, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            raise BadPlan(
                f"stages[{index}] is shared by {stage.share.by}, and a cache of keys and values lies on one device "
                "whole.",
                hint='Generate over a pipeline (--share pipeline, plan="pipeline"), or give each stage one device.',
            )
