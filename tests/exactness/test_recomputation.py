"""Layers that run forward again in the backward pass: exact, dropout and batch norm included, and with less memory."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from hand_made import cluster, even_profile
from harness import ADAM, assert_exact, plan_for, run, schedule_of, shared
from manyhands.facts.plan import Plan
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.schedule.actions import Backward, Forward
from manyhands.schedule.memory import DeviceMemory
from small_networks import batches_of, captured


def every_layer(plan: Plan, length: int = 1) -> Plan:
    """The plan with all layers run again, in runs of some length."""
    stages = [
        msgspec.structs.replace(
            stage, recompute=tuple((a, min(a + length, stage.layers[1])) for a in range(*stage.layers, length))
        )
        for stage in plan.stages
    ]
    return msgspec.structs.replace(plan, stages=tuple(stages))


@pytest.mark.quick("small-1-1f1b")
@pytest.mark.parametrize("order", ["1f1b", "gpipe", "eager", "sequential"])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", ["small", "skips", "pair", "tied", "frozen", "evaluating", "words", "early"])
def test_layers_run_again_train_as_one_device_does(name: str, length: int, order: str) -> None:
    graph = captured(name)
    count = len(graph.network.layers)
    stages = [shared(0, count, 2)] if name == "tied" else [shared(0, count // 2, 2), shared(count // 2, count, 2)]
    plan = every_layer(plan_for(graph, stages, batch_size=6, micro_batches=3, order=order), length)
    assert_exact(graph, plan, batches_of(name, 3, 6), ADAM)


def test_samples_of_a_stage_are_shared_where_no_statistics_are() -> None:
    graph = captured("skips")
    plan = every_layer(plan_for(graph, [shared(0, len(graph.network.layers), 2, 1)], batch_size=6, micro_batches=2,
                                bucket_bytes=300))  # fmt: skip
    assert_exact(graph, plan, batches_of("skips", 2, 6), ADAM)


def test_batch_norm_over_devices_is_refused() -> None:
    graph = captured("small")
    with pytest.raises(mh.ManyhandsError, match="batch norm over 2 devices"):
        schedule_of(graph, every_layer(plan_for(graph, [shared(0, len(graph.network.layers), 2, 1)], batch_size=3)))


@pytest.mark.parametrize("spans", [((1, 0),), ((0, 2), (1, 3)), ((0, 99),)])
def test_runs_of_layers_out_of_order_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    graph = captured("small")
    plan = plan_for(graph, [shared(0, len(graph.network.layers), 2)], batch_size=2)
    stage = msgspec.structs.replace(plan.stages[0], recompute=spans)
    with pytest.raises(mh.ManyhandsError, match="recompute"):
        schedule_of(graph, msgspec.structs.replace(plan, stages=(stage,)))


class Deep(nn.Module):
    """Blocks that keep much more than what enters them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 32))
                                    for _ in range(6))  # fmt: skip
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def deep() -> Graph:
    torch.manual_seed(0)
    module = Deep().double()
    x, y = torch.randn(4, 32, dtype=torch.float64), torch.randint(5, (4,))
    return capture(module, x, loss=F.cross_entropy, target=y)


@pytest.mark.slow
def test_each_run_of_layers_goes_forward_twice_and_once_again_before_its_backward_pass(deep: Graph) -> None:
    plan = every_layer(plan_for(deep, [shared(0, len(deep.network.layers), 4)], batch_size=4), 2)
    schedule = schedule_of(deep, plan)
    actions = [a for a in schedule.every_action(schedule.plan.devices[0]) if isinstance(a, (Forward, Backward))]
    spans = [(a.first, a.last) for a in actions if isinstance(a, Forward) and a.part == "ahead"]
    assert spans == sorted(spans)
    again = [(a.first, a.last) for a in actions if isinstance(a, Forward) and a.part == "again"]
    assert again == spans[::-1]
    for span in spans:
        place = next(i for i, a in enumerate(actions) if isinstance(a, Forward) and a.part == "again" and
                     (a.first, a.last) == span)  # fmt: skip
        assert isinstance(actions[place + 1], Backward)


def peaks(graph: Graph, plan: Plan, batch: int) -> tuple[float, float]:
    """Bytes at the peak by the memory model, and as counted while it ran."""
    schedule = schedule_of(graph, plan)
    device = schedule.plan.devices[0]
    memory = DeviceMemory(schedule.plan, graph.network, schedule.lowering.work[device].geometries, device)
    for action in schedule.every_action(device):
        memory.act(action)
    drawn = [(torch.randn(batch, 32, dtype=torch.float64), torch.randint(5, (batch,))) for _ in range(3)]
    ran = run(graph, plan, drawn, memory_step=1)
    return memory.peak_bytes, ran.logs[device].peak_bytes


@pytest.mark.slow
def test_memory_falls_as_the_model_says(deep: Graph) -> None:
    plain = plan_for(deep, [shared(0, len(deep.network.layers), 256)], batch_size=256)
    kept, again = (peaks(deep, plan, 256) for plan in (plain, every_layer(plain)))
    assert again[0] < 0.6 * kept[0]
    assert again[1] < 0.6 * kept[1]
    assert again[1] <= 1.05 * again[0]
    assert kept[1] <= 1.05 * kept[0]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("strategy", ["single", "pipeline"])
def test_the_planner_runs_layers_again_where_nothing_else_fits(deep: Graph, strategy: str) -> None:
    names = ("a", "b")[: 1 if strategy == "single" else 2]

    def planned(memory_bytes: float) -> tuple[Plan, float, float]:
        devices = cluster(names, memory_bytes=memory_bytes)
        seconds = even_profile(deep.network, names)
        plan = mh.plan(
            deep.network, devices, batch_size=256, strategy=strategy, micro_batches=2, profile=seconds,
        ).plan  # fmt: skip
        simulated = mh.simulate(plan, deep.network, devices, seconds)
        return plan, max(device.peak_bytes for device in simulated.devices.values()), simulated.seconds

    plenty, needed, seconds = planned(10**12)
    assert not any(stage.recompute for stage in plenty.stages)
    part = 0.6 if strategy == "single" else 0.7
    scarce, most, scarce_seconds = planned(part * needed)
    assert any(stage.recompute for stage in scarce.stages)
    assert most <= part * needed
    assert scarce_seconds > seconds
    with pytest.raises(mh.ManyhandsError):
        planned(0.02 * needed)
