"""A device's log is evidence that the run was what its plan said."""

from __future__ import annotations

import pytest
from small_plans import staged, tiled

from harness import SGD, run
from manyhands.executor import log as log_module
from manyhands.executor.log import DeviceLog, Recorder
from manyhands.facts.plan import ByTiles
from manyhands.schedule.actions import parse_action
from small_networks import batches_of, captured


def test_a_log_is_evidence() -> None:
    graph = captured("small")
    plan = staged(graph, [3], [[2, 1], [1, 2]], micro_batches=2)
    ran = run(graph, plan, batches_of("small", 4, 6), SGD, trace_steps=range(1, 3))
    ran.assert_as_planned(4)
    for device, log in ran.logs.items():
        assert {span.step for span in log.spans} == {1, 2}
        assert all(span.start <= span.end and span.device == device for span in log.spans)
        texts = [span.text for span in log.spans if span.step == 1]
        assert sorted(texts) == sorted(log.actions)
        assert all(str(parse_action(text)) == text for text in log.actions)
        assert 0 < log.busy_seconds < 60
        assert "spans" not in log.to_dict()
        assert (
            log.to_dict()["samples"] == log.samples == 4 * plan.micro_batches * (2 if device in ("s0-0", "s3-1") else 1)
        )


def test_a_log_of_tiles_counts_what_was_computed_and_what_was_sent() -> None:
    """Elements of maps with their overlap, and bytes by what they carry."""
    graph = captured("small")
    batches = batches_of("small", 2, 4)
    apart, at_once = (
        run(graph, tiled(graph, ByTiles((1, 1), (1,), groups), "t0"), batches, SGD) for groups in (None, (0,))
    )
    apart.assert_as_planned(2)
    at_once.assert_as_planned(2)
    maps = sum(spec.elements for spec in graph.network.tensors.values() if spec.shape[2:] == (8, 8))
    inputs = graph.network.tensors[graph.network.inputs[0]].elements
    assert sum(log.elements for log in apart.logs.values()) == 2 * 4 * (maps - inputs)
    assert sum(log.elements for log in at_once.logs.values()) > 2 * 4 * (maps - inputs)
    assert set(apart.logs["t1"].sent_kinds) == {"halo", "halo-gradient", "value"}
    assert set(at_once.logs["t1"].sent_kinds) == {"value"}
    assert at_once.logs["t0"].sent_kinds == {"gradient": apart.logs["t0"].sent_kinds["gradient"]}


def test_a_log_of_another_round_would_be_told_apart() -> None:
    """`assert_as_planned` can fail: a run that did one action less is not as planned."""
    graph = captured("small")
    ran = run(graph, staged(graph, [], [[2, 1]]), batches_of("small", 2, 3), SGD)
    ran.assert_as_planned(2)
    ran.logs["s0-0"].actions.pop()
    with pytest.raises(AssertionError):
        ran.assert_as_planned(2)


def test_rounds_that_are_graphs_are_watched_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in three is to be watched, a second each; those that are captured, ten seconds apart."""
    clock = 100.0
    monkeypatch.setattr(log_module.time, "monotonic", lambda: clock)
    recorder = Recorder(DeviceLog("a"), watch_every=3)
    watched = []
    for step in range(30):
        recorder.begin(step, is_captured=step >= 6)
        if recorder.is_watched:
            watched.append(step)
        recorder.end()
        clock += 1.0
    assert watched == [2, 5, 17, 29]
