"""Splits over real processes of this machine: exact where they must be, late by K at most, packed, moved, bereft."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import manyhands as mh
from manyhands.facts.calibration import Calibration
from manyhands.facts.errors import BadValue, ManyhandsError, UnknownName
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.trace import LinkTrace
from manyhands.graph.capture import capture
from manyhands.job.base import Job
from manyhands.planner.split import Deployment, LinkRates
from manyhands.runtime.processes import WorkerProcess
from manyhands.session import measuring
from manyhands.split import job as split_job
from manyhands.split import plans as split_plans
from manyhands.split.config import SplitConfig
from manyhands.split.controller import SplitController
from manyhands.split.job import SplitResult
from manyhands.split.session import Two, linked, look_at_link, open_two, rates_of
from manyhands.split.training import split_train
from real_runs import BATCH, LAYERS, SGD, Pictures, assert_close, network
from split_bytes import bytes_of_step

STEPS = 20
pytestmark = pytest.mark.xdist_group("splitting")  # its workers are started once


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    patch = pytest.MonkeyPatch()
    patch.setattr(Job, "write_pictures", lambda *_: None)
    patch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    patch.setattr(split_plans, "ROUND_BATCHES", 4)  # several rounds
    patch.setattr(split_plans, "WINDOW_BATCHES", 12)
    try:
        with open_two() as found:
            yield found
    finally:
        patch.undo()


def split(two: Two, folder: Path, model: nn.Module | None = None, **options: Any) -> tuple[SplitResult, nn.Module]:
    """`split_train` with what most tests want."""
    model = network() if model is None else model
    given = {
        "loss": functional.cross_entropy, "optimizer": SGD, "batch_size": BATCH, "seed": 5, "steps": STEPS, "cut": 1,
        "bits": 32, "k": 0, "data": Pictures(), **options,
    }  # fmt: skip
    return split_train(model, given.pop("data"), cloud=two, folder=folder, **given), model


@pytest.fixture(scope="module")
def alone(two: Two, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The same steps by one device, as mh.train does them."""
    model = network()
    plan = Plan("Sequential", BATCH, (Stage((0, LAYERS), (two.edge,)),))
    mh.train(
        model, Pictures(), loss=functional.cross_entropy, optimizer=SGD, batch_size=BATCH, seed=5, steps=STEPS,
        cluster=two.session.coordinator, plan=plan, folder=tmp_path_factory.mktemp("alone") / "run",
    )  # fmt: skip
    return model.state_dict()


def events(result: SplitResult, kind: str) -> list[dict[str, Any]]:
    lines = (result.folder / "events.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == kind]


def graph_network(dtype: torch.dtype = torch.float64) -> Any:
    return capture(network(dtype=dtype), torch.zeros(4, 1, 8, 8, dtype=dtype)).network


@pytest.mark.slow
@pytest.mark.quick("2-window")
@pytest.mark.parametrize(("cut", "mode"), [(1, "grouped"), (2, "window")])
def test_k_0_is_exactly_one_device(two: Two, alone: dict[str, Tensor], tmp_path: Path, cut: int, mode: str) -> None:
    result, model = split(two, tmp_path / "run", cut=cut, mode=mode)
    assert_close(model.state_dict(), alone)
    assert result.staleness == [0] * STEPS
    assert result.cuts == [(0, cut)]
    assert len(result.losses) == STEPS
    step = bytes_of_step(result.plan, graph_network())
    assert result.bytes_between == {pair: STEPS * size for pair, size in step.items() if size}
    assert result.bytes_up == STEPS * step[(two.edge, two.server)]
    assert result.bytes_down == STEPS * step[(two.server, two.edge)]


@pytest.mark.slow
def test_the_norm_of_both_sides_is_clipped_and_weights_averaged_as_on_one_device(two: Two, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"clip_norm": 0.7, "ema": 0.8, "steps": 8}
    plain = network()
    plan = Plan("Sequential", BATCH, (Stage((0, LAYERS), (two.edge,)),))
    expected = mh.train(
        plain, Pictures(), loss=functional.cross_entropy, optimizer=SGD, batch_size=BATCH, seed=5,
        cluster=two.session.coordinator, plan=plan, folder=tmp_path / "alone", **limits,
    )  # fmt: skip
    result, model = split(two, tmp_path / "run", **limits)
    assert_close(model.state_dict(), plain.state_dict())
    assert result.ema is not None
    assert expected.ema is not None
    assert_close(result.ema, expected.ema)
    assert len(result.grad_norms) == 8
    assert max(result.grad_norms) > 0.7
    assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-10, abs=0)
    assert len(result.plan.devices) == 2


@pytest.mark.parametrize("k", [5, None, "auto", "0@0,2@3"])
def test_a_norm_of_gradients_that_come_late_is_refused(k: Any) -> None:
    with pytest.raises(BadValue, match="needs the gradients of both sides at once") as refused:
        SplitConfig(clip_norm=1.0, k=k)
    assert refused.value.hint == "Give k 0 too, or limit each number: clip_value."
    assert SplitConfig(clip_value=1.0, k=k).clipping is not None
    assert SplitConfig(clip_norm=1.0, k=0).clipping is not None
    assert SplitConfig(clip_norm=1.0, k=k, cut="edge").clipping is not None


@pytest.mark.slow
def test_a_generator_has_its_output_at_the_edge(two: Two, alone: dict[str, Tensor], tmp_path: Path) -> None:
    result, model = split(two, tmp_path / "run", edge_side="downstream")
    assert_close(model.state_dict(), alone)
    assert [stage.devices for stage in result.plan.stages] == [(two.server,), (two.edge,)]


@pytest.mark.slow
def test_frozen_layers_get_no_gradients(two: Two, tmp_path: Path) -> None:
    plain, model = network(), network()
    for one in (plain, model):
        one[0].requires_grad_(False)
    plan = Plan("Sequential", BATCH, (Stage((0, LAYERS), (two.edge,)),))
    mh.train(
        plain, Pictures(), loss=functional.cross_entropy, optimizer=SGD, batch_size=BATCH, seed=5, steps=STEPS,
        cluster=two.session.coordinator, plan=plan, folder=tmp_path / "alone",
    )  # fmt: skip
    result, _ = split(two, tmp_path / "run", model, k=5)
    assert_close(model.state_dict(), plain.state_dict())
    assert result.bytes_down == 0
    assert result.bytes_up > 0


@pytest.mark.slow
def test_everything_at_the_edge(two: Two, alone: dict[str, Tensor], tmp_path: Path) -> None:
    result, model = split(two, tmp_path / "run", cut="edge", k=5)
    assert_close(model.state_dict(), alone)
    assert result.bytes_up == result.bytes_down == 0
    assert result.plan.devices == (two.edge,)


@pytest.mark.slow
@pytest.mark.quick("grouped")
@pytest.mark.parametrize("mode", ["grouped", "window"])
def test_gradients_are_late_by_k_at_most(two: Two, tmp_path: Path, mode: str) -> None:
    result, model = split(two, tmp_path / "run", k=5, mode=mode)
    assert max(result.staleness) > 0
    assert all(0 <= late <= 5 for late in result.staleness)
    assert all(bool(torch.isfinite(one).all()) for one in model.state_dict().values())
    rows = (result.folder / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("staleness")
    assert [int(row.split(",")[column]) for row in rows[1:]] == result.staleness


@pytest.mark.slow
def test_k_by_epoch(two: Two, tmp_path: Path) -> None:
    result, _ = split(two, tmp_path / "run", k="3@0,0@2", steps=16)
    per_epoch = 6
    assert max(result.staleness[: 2 * per_epoch]) > 0
    assert result.staleness[2 * per_epoch :] == [0] * (16 - 2 * per_epoch)
    told = events(result, "redeployed")
    assert [(one["reason"], one["step"], one["bytes_moved"]) for one in told] == [("phase", 2 * per_epoch, 0)]


@pytest.mark.slow
def test_eight_bits_are_a_quarter_of_the_bytes(two: Two, tmp_path: Path) -> None:
    data = Pictures(dtype=torch.float32)
    found = {}
    for bits in (8, 32):
        model = network(dtype=torch.float32)
        found[bits], _ = split(two, tmp_path / str(bits), model, data=data, bits=bits, k=2)
    assert found[8].bytes_up <= 0.26 * found[32].bytes_up
    assert found[8].bytes_down == found[32].bytes_down, "gradients return as they are"
    assert found[8].losses != found[32].losses


@pytest.mark.slow
def test_what_was_calibrated_is_obeyed(two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Calibration(
        network="Sequential", fingerprint="", data="mine", batch_size=BATCH, optimizer="", allowed_drop=0.01,
        measure="accuracy", reference=0.5, spread=0.0, steps=1, repeats=1, bits={"1": 16, "2": 4}, k=1, later_k=1,
    )  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(split_job, "find_calibration", lambda *words: asked.append(words) or found)
    data = Pictures(dtype=torch.float32)
    result, _ = split(
        two, tmp_path / "run", network(dtype=torch.float32), data=data, cut="auto", bits="auto", k="auto", steps=12,
        data_name="mine",
    )  # fmt: skip
    assert [words[1:] for words in asked] == [("mine", BATCH)]
    assert result.split is not None
    assert [cut.least_bits for cut in result.split.cuts[:2]] == [16, 4]
    assert max(result.staleness) <= 1
    assert len(events(result, "calibrated")) == 1


def redeploying(at: int, deployment: Deployment) -> Callable[[SplitController, int], bool]:
    """A pilot's answer: from a step on, another deployment."""

    def should_change(pilot: SplitController, steps_done: int) -> bool:
        pilot.steps = steps_done
        if steps_done >= at and pilot.engine.current != deployment:
            pilot.engine.take(deployment, 0.0, steps_done)
        return pilot.engine.current != pilot.deployment

    return should_change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), *(pytest.param(*cuts, marks=pytest.mark.slow) for cuts in ((2, 1), (1, LAYERS)))]
)
def test_only_layers_that_change_sides_travel(
    two: Two, alone: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    wanted = Deployment(after, 0, 32)
    monkeypatch.setattr(SplitController, "should_change", redeploying(8, wanted))
    result, model = split(two, tmp_path / "run", cut=before, backup_every=0)  # a copy there need not travel
    assert_close(model.state_dict(), alone)
    assert [cut for _, cut in result.cuts] == [before, after]
    assert result.split is not None
    moved = sum(result.split.layer_bytes[min(before, after) : max(before, after)])
    (told,) = events(result, "redeployed")
    assert told["bytes_moved"] == moved == result.bytes_moved
    assert told["step"] == result.cuts[1][0] >= 8
    steps = {before: result.cuts[1][0], after: STEPS - result.cuts[1][0]}
    network_ = graph_network()
    ends = (two.edge, two.server)
    sent = {cut: bytes_of_step(plan_at(cut, ends), network_) if cut < LAYERS else {} for cut in (before, after)}
    up = sum(count * sent[cut].get(ends, 0) for cut, count in steps.items())
    assert result.bytes_up == up + (moved if after < before else 0)
    assert result.bytes_down == up + (moved if after > before else 0)


def plan_at(cut: int, ends: tuple[str, str]) -> Plan:
    return Plan("Sequential", BATCH, (Stage((0, cut), ends[:1]), Stage((cut, LAYERS), ends[1:])), order="replay")


@pytest.mark.slow
def test_a_killed_server_leaves_the_edge_alone(
    alone: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "write_pictures", lambda *_: None)
    said: list[str] = []
    with open_two() as own:
        members = own.session.coordinator.members

        def killing(step: int, loss: float, seconds: float) -> None:
            if step == 8:
                os.kill(members[own.server].facts.pid, signal.SIGKILL)

        result, model = split(own, tmp_path / "run", on_step=killing, say=said.append)
    assert_close(model.state_dict(), alone)
    assert [cut for _, cut in result.cuts] == [1, LAYERS]
    assert result.plan.devices == (own.edge,)
    (told,) = events(result, "redeployed")
    assert told["reason"] == "lost"
    assert told["step"] >= 4, "the edge had a copy of what the server had"
    assert events(result, "rewound") == []
    assert len(result.losses) == len(result.staleness) == STEPS
    assert any("server is lost" in text for text in said)


@pytest.mark.slow
def test_a_server_that_comes_back_works_again(
    tmp_path: Path, alone: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "write_pictures", lambda *_: None)
    with open_two() as own:
        coordinator = own.session.coordinator

        def killing(step: int, loss: float, seconds: float) -> None:
            if step == 4:
                os.kill(coordinator.members[own.server].facts.pid, signal.SIGKILL)
            if step == 9:  # alone by now
                process = coordinator.local.processes.pop(own.server)
                process.wait(10)
                coordinator.start_workers([WorkerProcess((own.server,))], 1, 60)

        result, model = split(own, tmp_path / "run", on_step=killing)
    assert_close(model.state_dict(), alone)
    assert [cut for _, cut in result.cuts] == [1, LAYERS, 1]
    assert [one["reason"] for one in events(result, "redeployed")] == ["lost", "back"]
    assert result.plan.devices == (own.edge, own.server)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(two: Two, alone: dict[str, Tensor], tmp_path: Path) -> None:
    split(two, tmp_path / "run", steps=12)
    result, model = split(two, tmp_path / "run", resume=True, cut=2)
    assert_close(model.state_dict(), alone)
    assert len(result.losses) == STEPS


@pytest.mark.slow
def test_what_is_held_out_is_evaluated(two: Two, tmp_path: Path) -> None:
    result, model = split(two, tmp_path / "run", steps=3, k=2, bits=8, test=Pictures(30))
    found = mh.evaluate(model, Pictures(30), loss=functional.cross_entropy, cluster=two.session.coordinator)
    assert result.accuracy == found.accuracy


@pytest.mark.slow
def test_a_link_that_follows_a_trace(two: Two, tmp_path: Path) -> None:
    """Half a second of features at a steady rate, and what was decided from: the trace's mean."""
    step = 4 * 64 * BATCH * 8
    trace = LinkTrace.constant(20 * step, 40 * step)
    result, _ = split(two, tmp_path / "run", k=5, mode="window", trace=trace, steps=12)
    assert result.rates == LinkRates(20 * step, 40 * step)
    assert sum(result.step_seconds) >= 0.8 * 12 / 20
    assert result.set_rates[0][1:] == (20 * step, 40 * step)


@pytest.mark.slow
def test_both_directions_and_both_ends_work_at_the_same_time(two: Two, tmp_path: Path) -> None:
    """Up and down take 50 ms each, whatever the machine does: one after the other, and side by side."""
    step = 4 * 64 * BATCH * 8
    trace = LinkTrace.constant(20 * step, 20 * step)
    seconds = {}
    for k in (0, 5):
        result, _ = split(two, tmp_path / str(k), k=k, mode="window", trace=trace, steps=12)
        seconds[k] = sum(result.step_seconds)
    assert seconds[0] >= 0.95 * 12 * 0.1
    assert seconds[5] <= 0.75 * seconds[0]


def test_the_link_is_looked_at(two: Two) -> None:
    coordinator = two.session.coordinator
    rates = rates_of(*look_at_link(coordinator, two.edge, two.server))
    assert rates.up_bytes_per_second > 1e6
    assert rates.down_bytes_per_second > 1e6
    assert 0 < rates.delay_seconds < 1
    up, down = look_at_link(coordinator, two.edge, two.server, 100_000, 0)
    assert up.byte_count >= 100_000
    assert up.rate > 0
    assert (down.byte_count, down.rate) == (0, 0)
    cluster = linked(two.session.cluster, two.edge, two.server, LinkRates(1e6, 2e6, 0.01))
    assert cluster.bytes_per_second_between(two.edge, two.server) == 1e6
    assert cluster.bytes_per_second_between(two.server, two.edge) == 2e6


@pytest.mark.slow
@pytest.mark.parametrize(
    "rival",
    [
        "edge-only",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("jointdnn", "k0", "uncompressed", "unbounded")),
    ],
)
def test_rivals_run_on_the_same_engine(two: Two, tmp_path: Path, rival: str) -> None:
    model = network(dtype=torch.float32)
    result, _ = split(
        two, tmp_path / "run", model, data=Pictures(dtype=torch.float32), cut="auto", bits="auto", k=5, rival=rival,
        steps=8,
    )  # fmt: skip
    assert result.deployment is not None
    last, late = result.deployment, max(result.staleness)
    if rival == "edge-only":
        assert last.cut == LAYERS
    if rival in ("jointdnn", "uncompressed"):
        assert last.bits == 32
    if rival in ("jointdnn", "k0"):
        assert late == 0
    assert len(result.losses) == 8


@pytest.mark.quick(every=13)
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"cut": "nowhere"}, UnknownName), ({"cut": 99}, BadValue), ({"cut": 0}, BadValue), ({"bits": 7}, BadValue),
        ({"k": -1}, BadValue), ({"k": "4@1"}, BadValue), ({"mode": "heap"}, UnknownName),
        ({"rival": "mine"}, UnknownName), ({"edge_side": "left"}, UnknownName), ({"labels": "moon"}, UnknownName),
        ({"memory_bytes": 0}, BadValue), ({"trace": "/nowhere.txt"}, ManyhandsError),
        ({"cut": "auto", "memory_bytes": 10.0}, ManyhandsError),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_is_left_behind(
    two: Two, tmp_path: Path, wrong: dict[str, Any], error: type[ManyhandsError]
) -> None:
    with pytest.raises(error):
        split(two, tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


def test_a_cloud_wants_a_token(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="token"):
        split_train(
            network(), Pictures(), loss=functional.cross_entropy, optimizer=SGD, batch_size=BATCH, cloud="localhost:1"
        )
    assert SplitConfig(k="4@0,5@8").facts["k"] == "4@0,5@8"
