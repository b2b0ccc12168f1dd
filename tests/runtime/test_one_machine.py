"""Tiles, samples, pipelines and splits are plans of one machine: the same processes and executor, told by logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.facts.plan import BySamples, ByTiles, Codec, Plan, Replay, Single, Stage
from manyhands.runtime.coordinator import Coordinator
from manyhands.schedule.actions import parse_action
from manyhands.schedule.policy import Schedule
from real_runs import BATCH, LAYERS, names, pid, train, workers

pytestmark = pytest.mark.xdist_group("one machine")  # its workers are started once
STEPS = 4
CUT = 2


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
