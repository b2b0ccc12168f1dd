"""Training in bfloat16 and float16: no further from float64 than plain PyTorch under the same autocast, times 1.5; what
travels is half as long; and a step whose gradients overflow is skipped by all devices."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import cache, partial

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Batch, plan_for, run, shared
from lower_precision import (
    CLASSES,
    PLAIN_SGD,
    RATE,
    SAMPLES,
    Pictures,
    Rows,
    by_pipeline,
    by_samples,
    by_tiles,
    captured_in,
    distance,
    drawn_anew,
    picture_batches,
    ratio,
    row_batches,
    trained_plainly,
)
from manyhands.executor.messages import plan_bytes
from manyhands.facts.clipping import Clipping
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph

MOST = 1.5
LOWER = (torch.bfloat16, torch.float16)
PLANS: dict[str, Callable[[Graph], Plan]] = {
    "one device": lambda graph: by_samples(graph, SAMPLES),
    "samples": lambda graph: by_samples(graph, 3, 2, 1),
    "pipeline": lambda graph: by_pipeline(graph, 3),
    "tiles": lambda graph: by_tiles(graph, ByTiles((2, 1)), len(graph.layers) - 1),
    "a grid of tiles": lambda graph: by_tiles(graph, ByTiles((1, 1), (1, 1)), len(graph.layers) - 1),
}


@cache
def pictures_in(dtype: torch.dtype) -> tuple[nn.Module, Graph]:
    """A network and its graph, which has the network's own memory."""
    module = Pictures()
    return module, captured_in(module, dtype, picture_batches(0)[0])


@pytest.mark.quick("pipeline-dtype0")
@pytest.mark.parametrize("dtype", LOWER)
@pytest.mark.parametrize("name", sorted(PLANS))
def test_no_further_from_float64_than_pytorch(name: str, dtype: torch.dtype) -> None:
    module, graph = pictures_in(dtype)
    ratios = []
    for seed in range(3):
        drawn_anew(module, seed)
        ratios.append(ratio(module, PLANS[name](graph), picture_batches(seed), graph, dtype))
    assert statistics.median(ratios) <= MOST, ratios
    if name in ("one device", "pipeline"):  # the same operators in the same order
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("dtype", LOWER)
def test_a_float32_stream_stays_one(dtype: torch.dtype) -> None:
    """A sum with a float32 weight is float32 under autocast, and travels so."""
    torch.manual_seed(0)
    module, batches = Rows(), row_batches(0)
    graph = captured_in(module, dtype, batches[0])
    plan = by_pipeline(graph, 3)
    assert ratio(module, plan, batches, graph, dtype) == pytest.approx(1.0, abs=1e-3)
    assert {"float32", str(dtype).removeprefix("torch.")} == {
        graph.network.tensors[name].dtype for layer in graph.layers for name in layer.outputs
    }


# What travels


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", ["pipeline", "tiles"])
def test_activations_and_gradients_travel_in_half_the_bytes(name: str) -> None:
    batches, sent = picture_batches(0, steps=1), {}
    for dtype in (torch.float32, torch.bfloat16):
        graph = pictures_in(dtype)[1]
        first, cut = graph.network.find_layer("b"), graph.network.find_layer("f")
        plan = by_cut(graph, cut)
        if name == "tiles":
            tiles = Stage((first, cut), ("t0", "t1"), ByTiles((1, 1)))
            plan = plan_for(
                graph, [shared(0, first, SAMPLES), tiles, shared(cut, len(graph.layers), SAMPLES)], batch_size=SAMPLES
            )  # fmt: skip
        ran = run(graph, plan, batches, PLAIN_SGD)
        ran.assert_as_planned(1)
        kinds = [log.sent_kinds for log in ran.logs.values()]
        sent[dtype] = sum(
            each.get(kind, 0) for each in kinds for kind in ("value", "gradient", "halo", "halo-gradient")
        )
    assert sent[torch.float32] > 0
    assert sent[torch.bfloat16] * 2 == sent[torch.float32]


def by_cut(graph: Graph, cut: int) -> Plan:
    return msgspec.structs.replace(
        by_samples(graph, SAMPLES), stages=(shared(0, cut, SAMPLES), shared(cut, len(graph.layers), SAMPLES))
    )


class Between(nn.Module):
    """A float32 tensor that a product alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(12, 8), nn.Linear(8, CLASSES), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x) * self.scale))
        return out


def test_the_cast_travels_where_nothing_else_reads_what_it_casts() -> None:
    batches = row_batches(0, steps=1)
    graph = captured_in(Between(), torch.bfloat16, batches[0])
    (tanh,) = [op for op in graph.network.ops if op.target == "aten.tanh.default"]
    assert graph.network.tensors[tanh.outputs[0]].dtype == "float32"
    last = graph.layers[-1]
    assert {graph.network.tensors[name].dtype for name in last.inputs} == {"bfloat16"}
    ran = run(graph, by_cut(graph, len(graph.layers) - 1), batches, PLAIN_SGD)
    ran.assert_as_planned(1)
    (log,) = [log for log in ran.logs.values() if log.sent_kinds.get("value")]
    assert log.sent_kinds["value"] == SAMPLES * 8 * 2


def test_weight_gradients_are_summed_in_float32() -> None:
    batches = picture_batches(0, steps=1)
    graph = captured_in(Pictures(), torch.bfloat16, batches[0])
    schedule = run(graph, by_samples(graph, 3, 3), batches, PLAIN_SGD).schedule
    trained = sum(weight.bytes for weight in graph.network.weights.values() if weight.trainable)
    sums = [a for a in schedule.every_action("s0-0") if str(a).startswith("reduce s0 gradients")]
    assert sum(a.bytes for a in sums) == trained  # type: ignore[union-attr]
    assert plan_bytes({d: tuple(schedule.every_action(d)) for d in schedule.plan.devices}, graph.network)


# Overflow


class Overflowing(nn.Module):
    """In the second of its layers, gradients overflow where an input is large; those of later layers never do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def overflowing_batches() -> list[Batch]:
    """In the second and third step the first layer's gradient is too large for float16 at the scale of the loss."""
    batches = row_batches(0, steps=6)
    return [(x * (3e4 if step in (1, 2) else 1.0), y) for step, (x, y) in enumerate(batches)]


def scaled_plainly(module: nn.Module, batches: list[Batch], clip: float | None) -> tuple[dict[str, Tensor], list[bool]]:
    """PyTorch's own loop with autocast and GradScaler, and which steps it skipped."""
    module = copy.deepcopy(module)
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9), torch.amp.GradScaler("cpu")
    skipped = []
    for x, y in batches:
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(module(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(scaler.get_scale() < before)
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}, skipped


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", ["one device", "samples", "gateway", "pipeline"])
def test_all_devices_skip_the_steps_that_pytorch_skips(name: str, clip: float | None) -> None:
    torch.manual_seed(0)
    module, batches = Overflowing(), overflowing_batches()
    graph = captured_in(module, torch.float16, batches[0])
    plans = PLANS | {
        "pipeline": partial(by_pipeline, stages=3, micro_batches=1),
        "gateway": lambda graph: msgspec.structs.replace(
            by_samples(graph, 4, 2), stages=(shared(0, len(graph.layers), 4, 2, reduce="gateway"),)
        ),
    }
    plan = msgspec.structs.replace(plans[name](graph), gradient_norm=True)
    ran = run(graph, plan, batches, PLAIN_SGD, scales_loss=True, clipping=Clipping(norm=clip) if clip else None)
    ran.assert_as_planned(len(batches))
    weights, skipped = scaled_plainly(module, batches, clip)
    assert skipped == [False, True, True, False, False, False]
    scales = [executor.loss_scale for executor in ran.executors.values() if executor.loss_scale is not None]
    assert scales
    assert {(each.scale, each.steps) for each in scales} == {(2.0**14, 3)}
    exact = trained_plainly(
        module, [batch for batch, is_skipped in zip(batches, skipped) if not is_skipped], torch.float64
    )
    for own in ran.weights.values():
        for name_of, tensor in own.items():
            assert torch.isfinite(tensor).all()
            if clip is None:
                assert float((tensor - weights[name_of]).abs().max()) <= 2e-3 * float(weights[name_of].abs().max())
    of_all = {name_of: tensor for own in ran.weights.values() for name_of, tensor in own.items()}
    apart = distance(of_all, {name_of: tensor.double() for name_of, tensor in weights.items()})
    assert apart <= 1e-3 * distance(
        exact, {name_of: tensor.double() for name_of, tensor in module.state_dict().items()}
    )


def test_one_device_skips_by_itself_without_the_others() -> None:
    """The proof of the trick above: of the pipeline's gradients only the first stage's overflow."""
    torch.manual_seed(0)
    module, (_, (x, y), *_) = Overflowing(), overflowing_batches()
    with torch.autocast("cpu", torch.float16):
        loss = functional.cross_entropy(module(x), y)
    (loss * 2.0**16).backward()  # type: ignore[no-untyped-call]
    finite = {name: bool(torch.isfinite(p.grad).all()) for name, p in module.named_parameters() if p.grad is not None}
    assert not finite["a.weight"]
    assert finite["b.weight"]
    assert finite["c.weight"]


def test_without_scaling_the_loss_as_is() -> None:
    """bfloat16 needs none: the graph alone decides nothing about it."""
    batches = row_batches(0, steps=1)
    graph = captured_in(Rows(), torch.bfloat16, batches[0])
    ran = run(graph, by_samples(graph, SAMPLES), batches, PLAIN_SGD)
    assert all(executor.loss_scale is None for executor in ran.executors.values())


def test_capture_outside_of_autocast_is_as_before() -> None:
    graph = capture(Rows(), row_batches(0)[0][0], granularity="operators")
    assert {spec.dtype for node in graph.nodes for spec in node.outputs} == {"float32"}
