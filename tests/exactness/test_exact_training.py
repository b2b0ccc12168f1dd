"""Training over several devices is training on one: same losses, weights and buffers to 1e-10, done as planned."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from drawn_plans import plans
from harness import ADAM, SGD, TOLERANCE, Batch, alone, assert_exact, plan_for, relative, run, shared
from manyhands.executor.optimizers import build
from manyhands.facts.errors import BadPlan
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Codec, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights
from manyhands.models import registry
from small_networks import NETWORKS, batches_of, captured, module_of
from tape import CapturedLoss

STEPS = 20
DECAY = Optimizer("SGD", lr=0.05, momentum=0.9, weight_decay=0.1)


def one_stage(graph: Graph, *samples: int, micro_batches: int = 1, **options: Any) -> Plan:
    stage = shared(0, len(graph.network.layers), *samples, reduce=options.pop("reduce", "allreduce"))
    size = sum(samples) * micro_batches
    return plan_for(graph, [stage], batch_size=size, micro_batches=micro_batches, **options)


def pipeline(graph: Graph, cuts: Sequence[int | str], shares: Sequence[Sequence[int]], **options: Any) -> Plan:
    """Stages between cuts, each with its own share of the samples."""
    ends = [0, *(graph.network.find_layer(cut) for cut in cuts), len(graph.network.layers)]
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    size = sum(shares[0]) * options.get("micro_batches", 1)
    return plan_for(graph, stages, batch_size=size, **options)


# One stage, shared by samples


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["SGD", "Adam"])
def test_unequal_shares(optimizer: Optimizer) -> None:
    """Batch norms and dropout. Without biases before the norms: see small_networks.Small."""
    graph = captured("small")
    ran = assert_exact(graph, one_stage(graph, 3, 2, 1), batches_of("small", STEPS, 6), optimizer)
    first, *others = ran.weights.values()
    for own in others:  # replicas agree to the last bit
        assert all(torch.equal(own[name], first[name]) for name in first)


@pytest.mark.slow
def test_the_reference_is_the_module_trained_by_pytorch() -> None:
    graph, module = captured("still"), copy.deepcopy(module_of("still"))
    batches = batches_of("still", STEPS, 6)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, y in batches:
        loss = functional.cross_entropy(module(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    ran = run(graph, one_stage(graph, 1, 3, 2), batches, SGD)
    ran.assert_as_planned(STEPS)
    ran.assert_equals(module.state_dict(), losses)
    assert losses[-1] != losses[0]


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("name", sorted(set(NETWORKS) - {"small", "still"}))
def test_networks_with_something_special(name: str) -> None:
    graph = captured(name)
    optimizer = ADAM if name not in ("biased", "unread") else DECAY
    assert_exact(graph, one_stage(graph, 3, 1, 2), batches_of(name, 5, 6), optimizer)


@pytest.mark.slow
def test_shares_of_a_single_sample() -> None:
    """A device with one sample has no variance of its own over rows of numbers; all of them together have one."""
    graph = captured("norms")
    assert_exact(graph, one_stage(graph, 1, 1, 1), batches_of("norms", 5, 3))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("bucket_bytes", [1, 500])
def test_gradients_in_small_buckets(bucket_bytes: int) -> None:
    graph = captured("small")
    ran = assert_exact(graph, one_stage(graph, 3, 2, 1, bucket_bytes=bucket_bytes), batches_of("small", 3, 6))
    assert sum(text.startswith("reduce s0 gradients") for text in ran.logs["s0-0"].actions) > 1


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gateway(micro_batches: int) -> None:
    graph = captured("small")
    plan = one_stage(graph, 3, 2, 1, reduce="gateway", micro_batches=micro_batches)
    ran = assert_exact(graph, plan, batches_of("small", 5, 6 * micro_batches), ADAM)
    assert not any(text.startswith("step") for text in ran.logs["s0-1"].actions)


@pytest.mark.slow
def test_many_devices_in_a_ring() -> None:
    graph = captured("tied")
    assert_exact(graph, one_stage(graph, *[1] * 18), batches_of("tied", 3, 18))


def test_a_weight_without_gradient_is_left_alone() -> None:
    """One device's optimiser skips it; a zero in its place would let weight decay shrink it."""
    graph, batches = captured("unread"), batches_of("unread", 3, 6)
    for plan in (one_stage(graph, 4, 2), pipeline(graph, ["head", "c"], [[6], [2, 4], [6]])):
        ran = assert_exact(graph, plan, batches, DECAY)
        for own in ran.weights.values():
            if "head.weight" in own:
                assert torch.equal(own["head.weight"], graph.state["head.weight"])


# Local statistics


def local_norms(
    graph: Graph, samples: Sequence[int], batches: Sequence[Batch], optimizer: Optimizer
) -> list[dict[str, torch.Tensor]]:
    """By hand: every share normalised by itself, gradients weighted by samples, each device's buffers its own."""
    total = sum(samples)
    devices = [Weights.copied(graph) for _ in samples]
    steppers = [build(optimizer, weights.trainable()) for weights in devices]
    pieces, loss = [Piece(graph, weights) for weights in devices], CapturedLoss(graph)
    for step, (x, y) in enumerate(batches):
        sums: dict[str, torch.Tensor] = {}
        for place, (count, weights, piece) in enumerate(zip(samples, devices, pieces)):
            first = sum(samples[:place])
            rows = slice(first, first + count)
            values = piece(bind_inputs(graph, x[rows]), Context(seed=7, step=step, first_sample=first))
            _, gradients = loss(values, y[rows])
            torch.autograd.backward([values[n] for n in gradients], [g * count / total for g in gradients.values()])
            for name, tensor in weights.trainable().items():
                assert tensor.grad is not None
                sums[name] = sums[name] + tensor.grad if name in sums else tensor.grad
        for weights, stepper in zip(devices, steppers):
            for name, tensor in weights.trainable().items():
                tensor.grad = sums[name].clone()
            stepper.step()
            stepper.zero()
    return [{name: tensor.detach() for name, tensor in weights.tensors.items()} for weights in devices]


def test_local_batch_norm_normalises_each_share_by_itself() -> None:
    graph, batches, samples = captured("small"), batches_of("small", 6, 9), (4, 3, 2)
    ran = run(graph, one_stage(graph, *samples, batch_norm="local"), batches, ADAM, seed=7)
    ran.assert_as_planned(6)
    for own, expected in zip(ran.weights.values(), local_norms(graph, samples, batches, ADAM), strict=True):
        assert own.keys() == expected.keys()
        assert max(relative(own[name], expected[name]) for name in own) <= TOLERANCE
    whole, _ = alone(graph, batches, ADAM, seed=7)
    assert relative(ran.weights["s0-0"]["a.weight"], whole["a.weight"]) > 1e-6  # it is something else


# Pipelines


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("order", ["1f1b", "gpipe", "sequential", "eager"])
@pytest.mark.parametrize("cuts", [["c"], ["b", "add", "e"]], ids=["two", "four"])
def test_orders_over_single_devices(order: str, cuts: list[str]) -> None:
    graph = captured("small")
    plan = pipeline(graph, cuts, [[2]] * (len(cuts) + 1), micro_batches=4, order=order)
    assert_exact(graph, plan, batches_of("small", 5, 8), ADAM)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("order", ["1f1b", "gpipe", "sequential"])
def test_different_shares_on_both_sides_of_a_cut(order: str) -> None:
    """ASTEROID Fig. 10: sample intervals intersect, so a device may send to several and receive from several."""
    graph = captured("small")
    plan = pipeline(graph, ["c", "add"], [[4, 2], [1, 3, 2], [2, 4]], micro_batches=3, order=order)
    assert_exact(graph, plan, batches_of("small", 4, 18), ADAM)


def test_eager_with_shared_stages() -> None:
    graph = captured("skips")
    plan = pipeline(graph, ["b", "d"], [[4, 2], [1, 3, 2], [6]], micro_batches=3, order="eager")
    assert_exact(graph, plan, batches_of("skips", 5, 18), ADAM)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_skips_over_several_stages(micro_batches: int) -> None:
    graph = captured("skips")
    plan = pipeline(graph, ["b", "c", "d"], [[4, 2], [6], [3, 3], [1, 5]], micro_batches=micro_batches)
    assert_exact(graph, plan, batches_of("skips", 5, 6 * micro_batches), ADAM)


@pytest.mark.quick(every=14)
@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("pair", ["c", "cat"]),
        ("pair", ["sum_1", "mul"]),
        ("named", ["tanh", "cat"]),
        ("early", ["b", "c"]),
        ("gives-input", ["tanh", "b"]),
        ("tied", ["b", "d"]),
        ("frozen", ["b", "d"]),
        ("evaluating", ["b", "relu"]),
        ("norms", ["a", "still"]),
        ("words", ["a", "mul"]),
        ("words", ["a", "norm"]),
        ("summed", ["c", "e"]),
        ("squares", ["c", "e"]),
        ("weighted", ["c", "e"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_pipelines_of_networks_with_something_special(name: str, cuts: list[str]) -> None:
    graph = captured(name)
    plan = pipeline(graph, cuts, [[4, 2], [1, 2, 3], [3, 3]], micro_batches=2)
    assert_exact(graph, plan, batches_of(name, 4, 12), ADAM)


def test_every_operator_of_a_skip_network_on_a_device_of_its_own() -> None:
    graph = captured("skips")
    count = len(graph.network.layers)
    plan = pipeline(graph, range(1, count), [[1]] * count, micro_batches=3, order="gpipe")
    assert_exact(graph, plan, batches_of("skips", 3, 3))


# Homes


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("home", ["phone", "s0-0", "s0-1", "s3-0", "everywhere"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_input_with_a_home(home: str, micro_batches: int) -> None:
    graph = captured("small")
    plan = pipeline(graph, [3], [[2, 1], [1, 2]], micro_batches=micro_batches)
    plan = msgspec.structs.replace(plan, homes={graph.network.inputs[0]: home})
    assert_exact(graph, plan, batches_of("small", 3, 3 * micro_batches))


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("order", ["1f1b", "eager"])
@pytest.mark.parametrize("homes", [("s0-0", "s3-1"), ("s3-1", "s0-0"), ("phone", "camera"), ("s7-0", "phone")])
def test_inputs_with_homes_of_their_own(order: str, homes: tuple[str, str]) -> None:
    graph = captured("pair")
    plan = pipeline(graph, [3, 7], [[2, 1], [1, 2], [3]], micro_batches=2, order=order)
    plan = msgspec.structs.replace(plan, homes=dict(zip(graph.network.inputs, homes)))
    assert_exact(graph, plan, batches_of("pair", 3, 6))


# Drawn plans


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", ["small", "skips", "pair"])
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_plan_is_exact(name: str, data: st.DataObject) -> None:
    graph = captured(name)
    orders = ("sequential", "gpipe", "1f1b", "eager")
    plan = data.draw(plans(graph.network, kinds=("single", "samples"), orders=orders))
    stages = tuple(msgspec.structs.replace(stage, codec=Codec()) for stage in plan.stages)
    plan = msgspec.structs.replace(plan, stages=stages, batch_norm="synchronised")
    if plan.order == "eager":
        try:
            resolve(msgspec.structs.replace(plan, homes={}), graph.network)
        except BadPlan:  # devices of a stage would meet inside a pass
            plan = msgspec.structs.replace(plan, order="1f1b")
    assert_exact(graph, plan, batches_of(name, 2, plan.batch_size, seed=data.draw(st.integers(0, 99))))


# The same again, bit by bit


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_run_repeated_gives_the_same_bits(dtype: torch.dtype) -> None:
    graph = captured("small", dtype=dtype)
    plan = pipeline(graph, ["c", "add"], [[4, 2], [1, 3, 2], [2, 4]], micro_batches=2)
    batches = batches_of("small", 4, 12, dtype=dtype)
    one, two, other = (run(graph, plan, batches, ADAM, seed=seed) for seed in (5, 5, 6))
    for ran in (one, two, other):
        ran.assert_as_planned(4)
    assert one.device_losses == two.device_losses
    for device, own in one.weights.items():
        assert all(torch.equal(tensor, two.weights[device][name]) for name, tensor in own.items())
    assert not torch.equal(one.weights["s0-0"]["a.weight"], other.weights["s0-0"]["a.weight"])  # another dropout


def test_float32_comes_close() -> None:
    graph = captured("small", dtype=torch.float32)
    batches = batches_of("small", 5, 6, dtype=torch.float32)
    ran = run(graph, one_stage(graph, 3, 2, 1), batches, SGD)
    ran.assert_as_planned(5)
    expected, losses = alone(graph, batches, SGD)
    assert max(relative(tensor, expected[name]) for name, tensor in ran.weights["s0-0"].items()) < 1e-4
    assert ran.losses == pytest.approx(losses, rel=1e-4)


# The zoo


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("tiny", (1, 16, 16)), ("resnet18", (3, 32, 32))], ids=["tiny", "resnet18"]
)
def test_the_zoo(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = registry.build(name).double()
    examples = [
        (
            registry.example_batch(name, 6, input_shape=shape, seed=seed, dtype=torch.float64),
            registry.example_target(name, 6, input_shape=shape, seed=seed),
        )
        for seed in (1, 2)
    ]
    loss = registry.loss_function(registry.ZOO[name].loss)
    graph = capture(module, examples[0][0], loss=loss, target=examples[0][1], name=name)
    assert_exact(graph, one_stage(graph, 3, 2, 1), examples, Optimizer("SGD", lr=0.01, momentum=0.9))


# Kernels


def channels_last(graph: Graph) -> dict[str, Kernel]:
    return {node.name: Kernel(channels_last=True) for node in graph.nodes if takes_format(graph, node)}


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", ["biased", "skips"])
@pytest.mark.parametrize("is_gateway", [False, True], ids=["allreduce", "gateway"])
def test_channels_last_everywhere(name: str, is_gateway: bool) -> None:
    """Weights and gradients lie in memory in another order, and are added up in it."""
    graph = captured(name)
    choice = channels_last(graph)
    plan = one_stage(graph, 3, 2, 1, bucket_bytes=400, reduce="gateway" if is_gateway else "allreduce")
    batches = batches_of(name, 5, 6)
    ran = assert_exact(graph, plan, batches, DECAY, kernels=dict.fromkeys(plan.devices, choice), stored=choice)
    weight = ran.executors["s0-1"].weights.tensors["c.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


def test_channels_last_on_one_device_only() -> None:
    """Weights that are added up lie alike on all devices, so a gradient in another order is put into theirs."""
    graph = captured("biased")
    plan = one_stage(graph, 3, 2, 1)
    assert_exact(graph, plan, batches_of("biased", 5, 6), DECAY, kernels={"s0-1": channels_last(graph)})


def test_channels_last_in_a_pipeline() -> None:
    graph = captured("skips")
    choice = channels_last(graph)
    plan = pipeline(graph, ["b", "d"], [[4, 2], [1, 3, 2], [6]], micro_batches=2)
    batches = batches_of("skips", 4, 12)
    assert_exact(graph, plan, batches, ADAM, kernels=dict.fromkeys(plan.devices, choice), stored=choice)
