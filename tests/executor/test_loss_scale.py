"""Loss scaling: the rules are torch.amp.GradScaler's, and what a checkpoint keeps is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.executor import loss_scale
from manyhands.executor.loss_scale import LossScale, check_scaled
from manyhands.facts.errors import BadFile, BadPlan, NotFinite
from manyhands.facts.plan import Codec, Plan, Replay, Single, Stage


@pytest.mark.slow
@given(st.lists(st.booleans(), max_size=60))
def test_the_factor_is_that_of_pytorchs_scaler(overflows: list[bool]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "GROWTH_STEPS", 4)
        scaler, scale = torch.amp.GradScaler("cpu", growth_interval=4), LossScale()
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for overflows_now in overflows[:40]:
            assert scaler.get_scale() == scale.scale
            scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            own = [weight.grad.clone()]
            if overflows_now:
                weight.grad[1] = torch.inf
            scaler.unscale_(optimizer)
            scale.unscale(own)
            assert float(own[0][0]) == float(weight.grad[0]) == 1.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scale.scale * 0.5 < loss_scale.LEAST_SCALE:
                return
            scale.update(is_skipped=overflows_now)


def test_it_goes_on_where_it_was() -> None:
    scale, other = LossScale(), LossScale()
    for is_skipped in (False, True, True, False):
        scale.update(is_skipped=is_skipped)
    assert scale.state() == {"loss scale/scale": 2.0**14, "loss scale/steps": 1}
    other.load(scale.state())
    assert other.state() == scale.state()


@pytest.mark.parametrize(
    ("factor", "steps"),
    [(None, 0), (0.0, 0), (-1.0, 0), (float("nan"), 0), (float("inf"), 0), (True, 0), ("x", 0), (2.0, -1), (2.0, 2000),
     (2.0, 1.0), (2.0, True), (2.0, None)],
)  # fmt: skip
def test_a_state_that_is_none_is_refused(factor: Any, steps: Any) -> None:
    with pytest.raises(BadFile, match="loss scale"):
        LossScale().load({"loss scale/scale": factor, "loss scale/steps": steps})


def test_gradients_that_are_never_finite_end_the_run() -> None:
    scale = LossScale()
    for _ in range(40):
        scale.update(is_skipped=True)
    assert scale.scale == loss_scale.LEAST_SCALE
    with pytest.raises(NotFinite, match="whatever the loss is scaled by"):
        scale.update(is_skipped=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "do not exchange that"),
        (
            {"gradient_norm": True, "order": "replay", "replay": Replay(k=0), "batch_size": 2, "micro_batches": 2},
            "steps overlap",
        ),
        (
            {"gradient_norm": True, "stages": (Stage((0, 1), ("a",), Single(), Codec(8, gradients=True)),)},
            "no infinity",
        ),
    ],
)
def test_plans_by_which_devices_could_not_agree_are_refused(options: dict[str, Any], message: str) -> None:
    facts = {"batch_size": 1, "stages": (Stage((0, 1), ("a",)),), **options}
    with pytest.raises(BadPlan, match=message):
        check_scaled(Plan("net", **facts))
