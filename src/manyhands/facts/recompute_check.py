"""The check of a plan's layers that run forward again in the backward pass."""

from __future__ import annotations

from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, Plan, Single


def check_recompute(plan: Plan, index: int, network: Network) -> None:
    """Refuse layers to be run again that are not in order, or cannot be run again by their device alone."""
    stage = plan.stages[index]
    if not stage.recompute:
        return
    field, (before, last) = f"stages[{index}].recompute", stage.layers
    assert isinstance(before, int), "layers are numbers by now"
    assert isinstance(last, int)
    if not plan.is_training or plan.order == "replay":
        raise BadPlan(f"{field} is given, and order is {plan.order}.", hint="Use order: 1f1b, or leave it out.")
    if not isinstance(stage.share, (Single, BySamples)):
        raise BadPlan(
            f"{field} is given, and the stage is shared by {stage.share.by}.",
            hint="Only stages on one device, or shared by samples, run layers again.",
        )
    for first, end in stage.recompute:
        assert isinstance(first, int)
        assert isinstance(end, int)
        if not before <= first < end <= last:
            raise BadPlan(
                f"{field} has [{first}, {end}]; runs of layers follow one another, between {before} and {last} here."
            )
        ops = network.ops[network.layers[first].first : network.layers[end - 1].last]
        if plan.batch_norm == "synchronised" and len(stage.devices) > 1 and any(op.statistics for op in ops):
            raise BadPlan(
                f"{field} has [{first}, {end}], with batch norm over {len(stage.devices)} devices in it.",
                hint="Leave those layers out, or use batch_norm: local.",
            )
        before = end
