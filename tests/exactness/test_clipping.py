"""Clipping gradients over devices is clipping them on one: the same norms, weights and losses, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adapted_language import adapted
from harness import ADAM, SGD, TOLERANCE, Batch, Ran, alone, plan_for, run, shared
from language_model import SAMPLES, batch, language, next_word
from manyhands.facts.clipping import Clipping
from manyhands.facts.errors import BadPlan, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Reduce
from replayed import Replayed, batches, captured
from replayed import plan_for as replay_plan
from tiled_cases import Case, small_case
from tiled_networks import Residual, same

STEPS = 4
BATCHES = [batch(seed) for seed in range(STEPS)]
NORM, VALUE = Clipping(norm=0.6), Clipping(value=0.02)


def clipped_by_pytorch(
    graph: Graph, data: Sequence[Batch], clipping: Clipping, optimizer: Optimizer = SGD
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Weights, losses and norms of one device, with whole batches."""
    norms: list[float] = []

    def clip(weights: Weights) -> None:
        trained = list({id(t): t for t in weights.tensors.values() if t.requires_grad}.values())
        if clipping.norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(trained, clipping.norm)))
        if clipping.value is not None:
            nn.utils.clip_grad_value_(trained, clipping.value)

    return *alone(graph, data, optimizer, seed=7, before_step=clip), norms


def assert_clipped(
    graph: Graph, plan: Plan, data: Sequence[Batch], clipping: Clipping, optimizer: Optimizer = SGD
) -> Ran:
    plan = msgspec.structs.replace(plan, gradient_norm=clipping.norm is not None)
    ran = run(graph, plan, data, optimizer, seed=7, clipping=clipping)
    ran.assert_as_planned(len(data))
    weights, losses, norms = clipped_by_pytorch(graph, data, clipping, optimizer)
    ran.assert_equals(weights, losses)
    if clipping.norm is not None:
        assert ran.schedule.lowering.norm is not None
        assert max(norms) > clipping.norm, "no step is clipped"
        takers = set(ran.schedule.lowering.norm.parts)
        assert {device for device, own in ran.grad_norms.items() if own} == takers
        assert len({tuple(ran.grad_norms[device]) for device in takers}) == 1, "the same bits on every device"
        for device in takers:
            assert ran.grad_norms[device] == pytest.approx(norms, rel=TOLERANCE, abs=0)
    return ran


@cache
def tied() -> Graph:
    words, labels = BATCHES[0]
    return capture(language(), words, loss=next_word, target=labels, granularity="operators")


@cache
def frozen() -> Graph:
    words, labels = BATCHES[0]
    return capture(adapted("second"), words, loss=next_word, target=labels, granularity="operators")


def maps() -> nn.Module:
    return nn.Sequential(same(2, 3), nn.BatchNorm2d(3), Residual(nn.Sequential(nn.SiLU(), same(3, 3))), same(3, 2))


def of_maps() -> Case:
    return small_case(maps, (2, 8, 6), 4)


def staged(graph: Graph, shares: Sequence[Sequence[int]], **options: Any) -> Plan:
    count = len(graph.network.layers)
    ends = [count * place // len(shares) for place in range(len(shares) + 1)]
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    return plan_for(graph, stages, batch_size=SAMPLES, micro_batches=SAMPLES // sum(shares[0]), **options)


PLANS: dict[str, Any] = {
    "single": [[4]],
    "samples": [[1, 2, 1]],
    "pipeline": [[1], [1], [1]],
    "hybrid": [[2, 2], [4], [1, 3]],
    "micro-batches": [[1, 1], [2]],
}


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("clipping", [NORM, VALUE], ids=["norm", "value"])
@pytest.mark.parametrize("shares", PLANS.values(), ids=PLANS)
def test_samples_and_stages_with_tied_weights_clip_as_one_device(shares: list[list[int]], clipping: Clipping) -> None:
    assert_clipped(tied(), staged(tied(), shares), BATCHES, clipping)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("order", ["gpipe", "eager", "sequential"])
def test_in_every_order(order: Any) -> None:
    assert_clipped(tied(), staged(tied(), [[1, 1], [2]], order=order), BATCHES, NORM, ADAM)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("shares", [[[4]], [[2, 2], [4]], [[1], [1], [1]]], ids=str)
def test_frozen_layers_are_not_in_the_norm(shares: list[list[int]]) -> None:
    ran = assert_clipped(frozen(), staged(frozen(), shares), BATCHES, Clipping(norm=0.05))
    weights = frozen().network.weights
    assert ran.schedule.lowering.norm is not None
    given = [name for names in ran.schedule.lowering.norm.parts.values() for name in names]
    assert sorted(given) == sorted(name for name, spec in weights.items() if spec.trainable)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("reduce", ["allreduce", "gateway"])
def test_tiles_clip_as_one_device(reduce: Any) -> None:
    case = of_maps()
    plan = case.plan(case.tiled(ByTiles((2, 1), (1, 1)), reduce=reduce))
    for clipping in (Clipping(norm=0.5), Clipping(value=0.01)):
        ran = assert_clipped(case.graph, plan, case.batches, clipping)
    ran = assert_clipped(case.graph, plan, case.batches, Clipping(norm=0.5))
    assert ran.schedule.lowering.norm is not None
    assert len(ran.schedule.lowering.norm.parts) == (1 if reduce == "gateway" else 4)


def test_tiles_beside_samples_clip_as_one_device() -> None:
    case = of_maps()
    samples = len(case.batches[0][0])
    last = Stage((case.count - 1, case.count), ("s0", "s1"), BySamples((1, samples - 1)))
    plan = case.plan(case.tiled(ByTiles((1, 1)), last=case.count - 1), last)
    assert_clipped(case.graph, plan, case.batches, Clipping(norm=0.5))


def test_a_norm_below_the_limit_changes_nothing() -> None:
    plan = msgspec.structs.replace(staged(tied(), [[2, 2]]), gradient_norm=True)
    ran = run(tied(), plan, BATCHES, seed=7, clipping=Clipping(norm=1e6))
    ran.assert_equals(*alone(tied(), BATCHES, SGD, seed=7))


def test_replicas_stay_alike_to_the_bit() -> None:
    ran = assert_clipped(tied(), staged(tied(), [[1, 1, 2]]), BATCHES, NORM)
    first, *others = ran.weights.values()
    assert others
    assert all(torch.equal(own[name], tensor) for own in others for name, tensor in first.items())


@pytest.mark.slow
def test_float32_is_as_near_to_pytorch_as_rounding_lets_it() -> None:
    words, labels = BATCHES[0]
    graph = capture(language().float(), words, loss=next_word, target=labels, granularity="operators")
    plan = msgspec.structs.replace(staged(graph, [[2, 2], [4]]), gradient_norm=True)
    ran = run(graph, plan, BATCHES, seed=7, clipping=NORM)
    weights, losses, _ = clipped_by_pytorch(graph, BATCHES, NORM)
    ran.assert_equals(weights, losses, 1e-5)


# Order replay (mh.split_train)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("clipping", [Clipping(norm=0.4), Clipping(value=0.01)], ids=["norm", "value"])
def test_a_split_without_running_ahead_clips_as_one_device(clipping: Clipping) -> None:
    graph, data = captured(), batches(12)
    plan = replay_plan(0, count=6, gradient_norm=clipping.norm is not None)
    ran = Replayed(graph, plan, data, clipping=clipping)
    weights, losses, norms = clipped_by_pytorch(graph, data, clipping, ran.optimizer)
    for name, tensor in ran.weights.items():
        torch.testing.assert_close(tensor, weights[name], rtol=TOLERANCE, atol=1e-12)
    assert ran.losses == pytest.approx(losses, rel=TOLERANCE)
    for results in ran.results.values():
        assert [norm for result in results for norm in result.grad_norms] == pytest.approx(norms, rel=TOLERANCE)
    if clipping.norm is not None:
        assert max(norms) > clipping.norm
        ran.assert_bytes_are_the_plans()


def test_a_frozen_edge_takes_no_part_in_the_norm() -> None:
    def freeze(model: nn.Sequential) -> None:
        for layer in list(model)[:-1]:
            layer.requires_grad_(False)

    graph, data = captured(freeze), batches(6)
    ran = Replayed(graph, replay_plan(0, gradient_norm=True), data, clipping=Clipping(norm=0.4))
    weights, _, norms = clipped_by_pytorch(graph, data, Clipping(norm=0.4), ran.optimizer)
    assert {device for device, results in ran.results.items() if results[0].grad_norms} == {ran.plan.devices[-1]}
    assert ran.results[ran.plan.devices[-1]][0].grad_norms == pytest.approx(norms, rel=TOLERANCE)
    for name, tensor in ran.weights.items():
        torch.testing.assert_close(tensor, weights[name], rtol=TOLERANCE, atol=1e-12)


@pytest.mark.parametrize("k", [1, None])
def test_a_split_that_runs_ahead_is_refused(k: int | None) -> None:
    with pytest.raises(BadPlan, match="needs all gradients of one batch at once"):
        resolve(replay_plan(k, gradient_norm=True), captured().network)
    ahead = msgspec.structs.replace(replay_plan(0, gradient_norm=True), warm_up=(3, 1))
    with pytest.raises(BadPlan, match="needs all gradients of one batch at once"):
        resolve(ahead, captured().network)


# What is refused


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(BadValue, match="must be a number above 0"):
        Clipping(norm=limit).check()
    with pytest.raises(BadValue, match="must be a number above 0"):
        Clipping(value=limit).check()


def test_both_limits_are_refused() -> None:
    with pytest.raises(BadValue, match="order in which both would be applied"):
        Clipping(norm=1.0, value=1.0).check()


def test_a_plan_without_the_exchange_is_refused() -> None:
    with pytest.raises(BadPlan, match="do not exchange"):
        run(tied(), staged(tied(), [[4]]), BATCHES, clipping=NORM)


def test_the_norm_is_exchanged_once_by_all() -> None:
    plan = msgspec.structs.replace(staged(tied(), [[1, 1], [2]]), gradient_norm=True)
    ran = run(tied(), plan, BATCHES[:1], clipping=NORM)
    for device in plan.devices:
        listed = [a for a in ran.schedule.every_action(device) if isinstance(a, Reduce) and a.what == "norm"]
        assert len(listed) == 1
        assert set(listed[0].devices) == set(plan.devices)


def test_numbers_that_are_not_finite_are_counted() -> None:
    from manyhands.executor.clipping import GradientTotals, part_of_norm

    whole, spoilt = torch.tensor([3.0, 4.0]), torch.tensor([[float("inf"), 1.0], [float("nan"), 2.0]])
    totals = GradientTotals.of_rows([part_of_norm([whole]), part_of_norm([spoilt, whole]), part_of_norm([])])
    assert totals.not_finite == 2
    assert GradientTotals.of_rows([part_of_norm([whole]), part_of_norm([whole])]) == (50.0, 0.0)
    assert not functional.relu(torch.tensor(totals.squares)).isfinite()
