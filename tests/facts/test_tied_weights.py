"""Weights in several stages: which those are, and the plans that cannot have them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hand_made import chain, changed
from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import op_range, resolve
from manyhands.facts.tied_weights import tied_weights

TIED = changed(chain(6), 4, weights=("w1", "w4"))
"""Operator 4 reads the weight of operator 1, too."""


def plan(network: Network = TIED, *, last: tuple[str, ...] = ("c",), **facts: Any) -> Plan:
    share = BySamples((1,) * len(last)) if len(last) > 1 else Single()
    stages = (
        Stage((0, 2), ("a",)),
        Stage((2, 4), ("b",)),
        Stage((4, 6), last, share, reduce=facts.pop("reduce", "allreduce")),
    )
    return Plan(network.name, facts.pop("batch_size", max(2, len(last))), stages, **facts)


def frozen(network: Network, name: str) -> Network:
    weights = {**network.weights, name: msgspec.structs.replace(network.weights[name], trainable=False)}
    return msgspec.structs.replace(network, weights=weights)


def test_a_trained_weight_is_in_all_stages_that_read_it() -> None:
    stages = resolve(plan(), TIED).stages
    weights = [TIED.weights_of(*op_range(stage, TIED)) for stage in stages]
    assert tied_weights(TIED, weights) == {"w1": (0, 2)}
    assert tied_weights(frozen(TIED, "w1"), weights) == {}  # each has a copy, and none changes
    assert tied_weights(TIED, [TIED.weights_of(0, 6)]) == {}


def test_stages_that_step_at_different_times() -> None:
    network = changed(TIED, 4, inputs=("x",))
    stages = (Stage((0, 2), ("a",)), Stage((2, 6), ("b",)))
    replayed = Plan(network.name, 2, stages, micro_batches=2, order="replay")
    with pytest.raises(BadPlan, match=r"stages\[1\] and stages\[0\] both use the weight 'w1', and order is replay"):
        resolve(replayed, network)
    resolve(msgspec.structs.replace(replayed, order="1f1b"), network)
    resolve(replayed, frozen(network, "w1"))


def test_a_stage_in_which_one_device_steps() -> None:
    with pytest.raises(BadPlan, match=r"both use the weight 'w1', and stages\[2\].reduce is gateway") as caught:
        resolve(plan(last=("c", "d"), reduce="gateway"), TIED)
    assert "reduce: allreduce" in caught.value.hint
    resolve(plan(last=("c", "d")), TIED)
    resolve(plan(reduce="gateway"), TIED)  # of one device, which steps


def test_a_buffer_that_is_written_has_one_place() -> None:
    written = changed(frozen(TIED, "w1"), 1, writes=("w1",))
    with pytest.raises(BadPlan, match=r"stages\[2\] and stages\[0\] both use the buffer 'w1', which is written"):
        resolve(plan(written), written)
    assert written.may_cut == (True, True, False, False, False, True, True)
    assert all(TIED.may_cut)
