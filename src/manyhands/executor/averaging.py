"""The exponential moving average of a device's weights, which travels with the optimizer's state.

It is that of torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay), updated after every step: first a
copy of the weights, then average + (1 - decay) (weight - average). Buffers are not averaged; frozen weights are their
own average. In a state of the optimizer (`weight/key`), the average has a key that no optimizer of PyTorch has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manyhands.facts.errors import BadFile, BadPlan, BadValue
from manyhands.facts.plan import Plan

KEY = "/ema of the weight"


class WeightAverage:
    """The average of some trained weights since the first step."""

    def __init__(self, decay: float, weights: Mapping[str, torch.Tensor]) -> None:
        if not 0.0 <= decay <= 1.0:
            raise BadValue(f"The decay of the weights' average is {decay}; it must be between 0 and 1.")
        self.decay, self.weights = decay, dict(weights)
        self.tensors: dict[str, torch.Tensor] = {}
        """The average of each weight; empty: there was no step yet."""

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are after a step into the average."""
        current = [weight.detach() for weight in self.weights.values()]
        if not self.tensors:
            self.tensors = {name: weight.clone() for name, weight in zip(self.weights, current)}
        elif current:
            torch._foreach_lerp_(list(self.tensors.values()), current, 1 - self.decay)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the average as entries of an optimizer's state; the tensors are those in use."""
        return {name + KEY: tensor for name, tensor in self.tensors.items()}

    def load(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Go on from an average, by weight; those of other weights are ignored."""
        missing = [name for name in self.weights if name not in averages]
        if missing:
            raise BadFile(
                f"The state has no average of '{missing[0]:.120}' and {len(missing) - 1} more.",
                hint="Go on without ema, or begin anew.",
            )
        self.tensors = {}
        for name, weight in self.weights.items():
            came = averages[name]
            if came.shape != weight.shape or came.dtype != weight.dtype:
                raise BadFile(
                    f"The average of '{name:.120}' is {came.dtype} {list(came.shape)}; its weight is {weight.dtype} "
                    f"{list(weight.shape)}."
                )
            self.tensors[name] = torch.empty_like(weight, requires_grad=False).copy_(came)


def divided(
    optimizer_state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the optimizer's own entries of a state, and the averages by weight; empty: it has none."""
    kept_by_optimizer = {name: tensor for name, tensor in optimizer_state.items() if not name.endswith(KEY)}
    averages = {name.removesuffix(KEY): t for name, t in optimizer_state.items() if name.endswith(KEY)}
    return kept_by_optimizer, averages


def check_averaged(plan: Plan) -> None:
    """Refuse an average in a plan where devices hold weights that they do not step."""
    for index, stage in enumerate(plan.stages):
        if stage.reduce == "gateway" and len(stage.devices) > 1:
            raise BadPlan(
                f"ema averages weights where they are stepped; stages[{index}] has a gateway, which alone steps them.",
                hint="Use reduce: allreduce, or leave out ema.",
            )
