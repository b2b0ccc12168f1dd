"""Tiles, samples, pipelines, splits and channels are plans of one machine: the same processes and executor, told by
logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manyhands.executor.messages import plan_bytes
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Codec, Plan, Replay, Single, Stage
from manyhands.graph.capture import capture
from manyhands.inference.infer import Inference
from manyhands.runtime.coordinator import Coordinator
from manyhands.schedule.actions import Forward, parse_action
from manyhands.schedule.policy import Schedule
from real_runs import BATCH, LAYERS, TOLERANCE, names, network, pid, train, workers

pytestmark = pytest.mark.xdist_group("one machine")  # its workers are started once
STEPS = 4
CUT = 2
ROUND = 4
"""Samples of a round where two are under way."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def plans(one: str, other: str) -> dict[str, Plan]:
    def plan(*stages: Stage, batch: int = BATCH, **options: object) -> Plan:
        return Plan("Sequential", batch, stages, **options)  # type: ignore[arg-type]

    both = (one, other)
    tail = Stage((CUT, LAYERS), (other,), Single())
    halves = (Stage((0, CUT), (one,), Single()), Stage((CUT, LAYERS), (other,), Single(), Codec(bits=8)))
    return {
        "samples": plan(Stage((0, LAYERS), both, BySamples((7, 5)))),
        "tiles": plan(Stage((0, CUT), both, ByTiles((1, 1))), tail, order="sequential"),
        "pipeline": plan(Stage((0, CUT), (one,), Single()), tail, micro_batches=2),
        "split": plan(*halves, batch=4 * BATCH, micro_batches=4, order="replay", replay=Replay(3, "window")),
    }


def test_all_ways_run_through_one_executor(cluster: Coordinator, tmp_path: Path) -> None:
    """In the same two processes, one job after another; every action was one of the plan's schedule."""
    devices = names(cluster)
    before = {name: pid(cluster, name) for name in devices}
    for kind, plan in plans(*devices).items():
        ran = train(cluster, plan, tmp_path / kind, steps=STEPS)
        schedule = Schedule(ran.result.plan, ran.planned.network)
        rounds = STEPS // plan.steps_per_round
        for device in devices:
            log = ran.result.logs[device]
            texts = {str(action) for action in schedule.every_action(device)}
            assert log.rounds == rounds, kind
            assert log.actions, kind
            for text in log.actions:
                assert str(parse_action(text)) == text
                plain = text.removesuffix(" ahead").removesuffix(" again")
                assert plain in texts, (kind, text)
        sent = {pair: size for pair, size in ran.result.bytes_between.items() if size and "coordinator" not in pair}
        assert sent == {pair: rounds * size for pair, size in ran.result.planned_bytes.items() if size}, kind
        assert {name: pid(cluster, name) for name in devices} == before


def streams(one: str, other: str) -> dict[str, Plan]:
    """Ways of inference: DECNN's and its rivals'."""

    def plan(*stages: Stage, samples: int = 1, order: str = "stream") -> Plan:
        return Plan("Sequential", samples, stages, samples, order)  # type: ignore[arg-type]

    both = (one, other)
    channels = Stage((0, LAYERS), both, ByChannels((1, 1)))
    rest = Stage((CUT, LAYERS), both, ByChannels((1, 1)))
    return {
        "channels": plan(channels),
        "two samples under way": plan(channels, samples=ROUND, order="interleave"),
        "rows (MoDNN), then input-based": plan(Stage((0, CUT), both, ByTiles((1, 1))), rest),
        "columns, two samples under way": plan(
            Stage((0, CUT), both, ByTiles((1,), (1, 1))), rest, samples=ROUND, order="interleave"
        ),
        "pipeline": plan(Stage((0, CUT), (one,)), Stage((CUT, LAYERS), (other,))),
    }


@pytest.mark.slow
def test_inference_runs_through_it_too(cluster: Coordinator) -> None:
    """In the same processes as training; answers are one device's, bytes and actions the plan's."""
    devices = names(cluster)
    before = {name: pid(cluster, name) for name in devices}
    model = network().eval()
    graph = capture(model, torch.zeros(2, 1, 8, 8, dtype=torch.float64), name="Sequential")
    torch.manual_seed(4)
    samples = torch.randn(2 * ROUND, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = model(samples)
    for kind, plan in streams(*devices).items():
        with Inference.open(graph, cluster=cluster, plan=plan) as running:
            got = torch.stack(list(running.map(samples)))
        assert float((got - expected).abs().max()) <= TOLERANCE * float(expected.abs().max()), kind
        schedule = Schedule(running.plan, graph.network)
        planned = plan_bytes({name: tuple(schedule.every_action(name)) for name in devices}, graph.network)
        rounds = len(samples) // plan.micro_batches
        for device in devices:
            log = running.logs[device]
            assert log.rounds == rounds, kind
            sent = {to: size for to, size in log.sent_bytes.items() if to in devices}
            assert sent == {to: rounds * size for (source, to), size in planned.items() if source == device}, kind
            texts = {str(action) for action in schedule.every_action(device)}
            done = [parse_action(text) for text in log.actions]
            assert {str(action) for action in done if not isinstance(action, Forward)} == {
                text for text in texts if not text.startswith("forward")
            }, kind
            operators = [op for action in done if isinstance(action, Forward) and action.part != "sum"
                         for op in range(action.first, action.last)]  # fmt: skip
            geometries = schedule.lowering.work[device].geometries
            share = sum(geometry.last - geometry.first for geometry in geometries)
            assert len(operators) == share * plan.micro_batches, kind
        assert {name: pid(cluster, name) for name in devices} == before
