"""Predictions beside what was measured: said where wrong, learnt from, and forgotten when asked to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from hand_made import chain, cluster, even_profile
from manyhands.cli.profile import profile as profile_command
from manyhands.cli.train import print_prediction_accuracy
from manyhands.executor.log import WARM_UP_ROUNDS, DeviceLog, Recorder
from manyhands.explaining.planned_run import PlannedRun
from manyhands.explaining.prediction_accuracy import (
    LEAST_STEPS,
    PredictionAccuracy,
    StageTimes,
    compared,
    correct_profiles,
    forget_run,
    sentence,
)
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.facts.plan_check import layer_range, resolve
from manyhands.facts.profile import Corrected, DeviceProfile, Kernel, LayerTiming, Profile, Timing
from manyhands.files.documents import read_document, write_document
from manyhands.graph.graph import Graph
from manyhands.job.base import Job
from manyhands.job.evaluation import captured
from manyhands.observe.stage_plots import draw_stages
from manyhands.planner.correction import MOST, Promise, TimingEvidence, corrected, evidence, promises, rungs
from manyhands.planner.cost import CostModel
from manyhands.plans.simulating import simulate
from manyhands.profiler.store import forget_sessions, load_profile, profiles_folder, save_profile
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.record import read_decided
from manyhands.schedule.actions import Backward, Forward
from manyhands.schedule.policy import Schedule
from manyhands.session.measuring import measure, profile_place
from manyhands.session.session import Session
from real_runs import BATCH, LAYERS, SGD, Pictures, Ran, names, network, train, workers

NETWORK = chain(4, operators_per_layer=2)
MADE = cluster(["a", "b", "c"])
PLANS = {
    "samples": Plan("chain", 12, (Stage((0, 4), ("a", "b"), BySamples((9, 3))),)),
    "stages": Plan(
        "chain", 12, (Stage((0, 1), ("a",), Single()), Stage((1, 4), ("b", "c"), BySamples((1, 2)))), micro_batches=4
    ),
    "tiles": Plan("chain", 2, (Stage((0, 3), ("a", "b"), ByTiles((5, 3), (6,))), Stage((3, 4), ("c",), Single()))),
}
WHEN = "2026-01-02T03:04:05+00:00"


@st.composite
def ladders(draw: st.DrawFn) -> DeviceProfile:
    """A profile with rungs and seconds of any kind; noise may make them fall."""
    sizes = sorted(draw(st.sets(st.integers(1, 14), min_size=1, max_size=5)))
    seconds = st.floats(1e-4, 1.0)
    layers = tuple(
        LayerTiming(layer.name, tuple(Timing(size, draw(seconds), draw(seconds)) for size in sizes))
        for layer in NETWORK.layers
    )
    return msgspec.structs.replace(even_profile(NETWORK, ["a"]).of("a"), layers=layers)


def promised(plan: Plan, own: DeviceProfile) -> dict[tuple[int, str], Promise]:
    profile = Profile({name: msgspec.structs.replace(own, device=name) for name in MADE.names})
    return promises(Schedule(plan, NETWORK), CostModel(NETWORK, MADE, profile))


def seen(plan: Plan, stage: int, device: str, factor: float) -> TimingEvidence:
    work = Schedule(plan, NETWORK).lowering.work[device]
    return evidence(work.geometry(stage), NETWORK, device, factor)


@pytest.mark.slow
@given(ladders(), st.sampled_from(sorted(PLANS)), st.data(), st.floats(1 / MOST, MOST))
def test_a_stage_takes_what_it_took_and_nothing_else_changes(
    own: DeviceProfile, kind: str, data: st.DataObject, factor: float
) -> None:
    plan = resolve(PLANS[kind], NETWORK, MADE)
    before = promised(plan, own)
    stage, device = data.draw(st.sampled_from(sorted(before)))
    better = corrected(own, [seen(plan, stage, device, factor)], steps=20, when=WHEN)
    wanted = factor if abs(factor - 1) > 0.05 else 1.0
    after = promised(plan, better)
    assert after[stage, device].compute_seconds == pytest.approx(wanted * before[stage, device].compute_seconds)
    first, last = layer_range(plan.stages[stage])
    for layer in set(range(4)) - set(range(first, last)):
        for samples in (0.3, 1, 2.5, 6, 20):
            assert better.layer_seconds(layer, samples) == pytest.approx(own.layer_seconds(layer, samples), rel=1e-9)
    again = corrected(better, [seen(plan, stage, device, 1.0)], steps=20, when="later")
    assert again is better, "correcting with the truth changes nothing"
    if wanted != 1.0:
        assert better.corrected == Corrected(1, 20, WHEN)
    else:
        assert better is own


@pytest.mark.slow
@given(ladders(), st.lists(st.tuples(st.integers(1, 14), st.floats(0.01, 100)), min_size=1, max_size=4))
def test_more_samples_take_no_less_time_where_they_did_not_before(
    own: DeviceProfile, found: list[tuple[int, float]]
) -> None:
    """Whatever is found of whichever shares, also by several devices with one profile."""
    sizes = frozenset({float(found[0][0])})
    better = corrected(
        own, [TimingEvidence(f, {1: frozenset({float(n)}), 2: sizes}) for n, f in found], steps=1, when=WHEN
    )  # fmt: skip
    for layer in range(4):
        known = [timing.samples for timing in better.ladders[layer]]
        for low, high in zip(known, known[1:]):
            for was, now in zip(
                zip(own.layer_seconds(layer, low), own.layer_seconds(layer, high)),
                zip(better.layer_seconds(layer, low), better.layer_seconds(layer, high)),
            ):
                assert was[0] > was[1] * (1 - 1e-12) or now[0] <= now[1]
        assert all(f > 0 and b > 0 for f, b in (better.layer_seconds(layer, n) for n in known))


def test_other_shares_are_half_believed_to_be_as_wrong_and_equal_workers_have_their_median() -> None:
    own = even_profile(NETWORK, ["a"]).of("a")
    ladder = (Timing(2, 0.02, 0.04), Timing(8, 0.08, 0.16))
    own = msgspec.structs.replace(own, layers=tuple(LayerTiming(one.layer, ladder) for one in own.layers))
    found = [TimingEvidence(factor, {0: frozenset({4.0})}) for factor in (1.1, 1.44, 7.0)]
    better = corrected(own, found, steps=30, when=WHEN)
    assert better.layer_seconds(0, 4) == pytest.approx((0.0576, 0.1152))
    assert better.layer_seconds(0, 2) == pytest.approx((0.024, 0.048))
    assert better.layer_seconds(0, 8) == pytest.approx((0.096, 0.192))
    assert better.layer_seconds(1, 4) == pytest.approx((0.04, 0.08))
    accident = corrected(own, [TimingEvidence(1e6, {0: frozenset({2.0})})], steps=30, when=WHEN)
    assert accident.layer_seconds(0, 2) == pytest.approx((0.02 * MOST, 0.04 * MOST))
    assert accident.layer_seconds(0, 8) == pytest.approx((0.08 * MOST**0.5, 0.16 * MOST**0.5))
    steep = corrected(own, [TimingEvidence(1 / MOST, {0: frozenset({8.0})})], steps=30, when=WHEN)
    assert steep.layer_seconds(0, 2) == pytest.approx((0.02 * MOST**-0.5, 0.04 * MOST**-0.5))
    twice = corrected(better, [TimingEvidence(2.0, {0: frozenset({4.0})})], steps=12, when="later")
    assert twice.corrected == Corrected(2, 42, "later")


def test_rungs_are_those_that_are_read() -> None:
    ladder = (Timing(2, 1, 1), Timing(4, 1, 1), Timing(8, 1, 1))
    read = {samples: rungs(ladder, samples) for samples in (0.5, 2, 3, 4, 5, 8, 30)}
    assert read == {0.5: (0,), 2: (0,), 3: (0, 1), 4: (1,), 5: (1, 2), 8: (2,), 30: (1, 2)}


def test_what_copying_can_explain_is_not_the_layers() -> None:
    promise = Promise(1.0, copying_seconds=0.5)
    assert [promise.factor(taken) for taken in (0.5, 1.0, 1.4, 2.5)] == [0.5, 1.0, 1.0, 2.0]
    assert Promise(0.0).factor(1.0) == 1.0


# What is said


def made_run(take: Callable[[int, str], float], step_seconds: float | None = None) -> PredictionAccuracy:
    """A run of two stages in which everything went as predicted but for what is said here."""
    plan = resolve(PLANS["stages"], NETWORK, MADE)
    profile = even_profile(NETWORK, MADE.names)
    prediction = simulate(plan, NETWORK, MADE, profile)
    planned = PlannedRun(plan, NETWORK, MADE, profile, prediction, 30, Path("run"))
    schedule = Schedule(plan, NETWORK)
    seconds = {
        place: one.compute_seconds for place, one in promises(schedule, CostModel(NETWORK, MADE, profile)).items()
    }
    logs = {name: DeviceLog(name, rounds=30) for name in plan.devices}
    for (stage, device), own in seconds.items():
        usual = own * take(stage, device)
        logs[device].stage_seconds[stage] = [usual, usual, 50 * usual, usual, usual]  # one accident is not heard of
    steps = [9.9, 9.9, *[step_seconds or prediction.seconds] * 28]
    found = compared(planned, schedule, logs, steps)
    assert found is not None
    return found


def test_a_prediction_that_was_right_is_not_talked_about() -> None:
    found = made_run(lambda stage, device: 1.1)
    assert sentence(found, Path("run")) == ""
    assert [(one.stage, one.device) for one in found.stages] == [(0, "a"), (1, "b"), (1, "c")]
    assert all(one.ratio == pytest.approx(1.1) for one in found.stages)
    assert found.steps == 5


def test_one_sentence_says_which_stage_is_wrong_and_what_to_type() -> None:
    found = made_run(lambda stage, device: {"b": 0.5, "c": 2.5}.get(device, 1.0))
    said = sentence(found, Path("my run"), "The stored profile was corrected from 5 steps.")
    assert said == (
        "Stage 1 on c computed for 1.8 s a step, 2.50 times the 720 ms that were predicted (1 more is off too). "
        "The stored profile was corrected from 5 steps. To measure anew: manyhands profile --refresh --run 'my run'"
    )


def test_a_step_may_be_wrong_though_every_stage_was_right() -> None:
    right = made_run(lambda stage, device: 1.0)
    found = made_run(lambda stage, device: 1.0, 3 * right.predicted_seconds)
    said = sentence(found, Path("run"))
    assert said.startswith("A step took ")
    assert "3.00 times" in said
    assert "manyhands profile --refresh --run run" in said


@pytest.mark.slow
def test_the_table_is_short_and_the_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [StageTimes(n // 20, f"d{n}", (n // 20, n // 20 + 1), 0.1, 0.1 + n / 100, 1.0, 30) for n in range(40)]
    found = PredictionAccuracy(1.0, 1.2, tuple(stages))
    print_prediction_accuracy(found)
    said = capsys.readouterr().out
    assert "d19 " in said
    assert "d39 " in said
    assert "d5 " not in said
    assert found.rest("d19") == pytest.approx((0.9, 1.2 - 0.29))
    assert found.to_dict()["stages"][3]["ratio"] == pytest.approx(1.3)
    rows = [("stage 0, a", (0.1, 0.2), (0.3, 0.0)), ("stage 1, $b$", (0.0, 0.0), (0.5, 1.0))]
    for some in ([], rows[:1], rows):
        assert draw_stages(some, tmp_path / "stages.png", title="t").read_bytes().startswith(b"\x89PNG")


def test_warm_up_is_not_measured_nor_what_a_gpu_has_not_ended() -> None:
    for waits, kept in ((True, 4), (False, 1)):
        recorder = Recorder(DeviceLog("a"), range(3, 4), waits_for_device=waits)
        for step in range(WARM_UP_ROUNDS + 4):
            recorder.begin(step)
            recorder.took(Forward(0, 0, 0, 2), 0.0, 1.0)
            recorder.took(Backward(0, 0, 0, 2), 2.0, 4.0)
            recorder.took(Forward(2, 0, 4, 6), 4.0, 4.5)
            recorder.end()
        assert recorder.log.stage_seconds == {0: [3.0] * kept, 2: [0.5] * kept}
        assert "stage_seconds" not in recorder.log.to_dict()


# In real runs

STEPS = WARM_UP_ROUNDS + LEAST_STEPS + 2


@pytest.fixture(scope="module")
def crew() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def error(found: PredictionAccuracy | None) -> float:
    """How far off every share of a stage is, at most."""
    assert found is not None
    return max(abs(math.log(one.ratio)) for one in found.stages)


def piped(crew: Coordinator) -> Plan:
    first, second = names(crew)
    stages = (Stage((0, 1), (first,), Single()), Stage((1, LAYERS), (second,), Single()))
    return Plan("Sequential", BATCH, stages)


def much_too_fast(network: Network, session: Session, name: str) -> DeviceProfile:
    """A profile of a device in which every layer takes a microsecond, whatever it is given."""
    return DeviceProfile(
        network=network.name, fingerprint=network.fingerprint, input=network.input_text,
        granularity=network.granularity, device=name, source="measured",
        machine=session.coordinator.members[name].facts.machine,
        layers=tuple(
            LayerTiming(one.name, tuple(Timing(n, 1e-6, 1e-6) for n in (1, BATCH // 4, BATCH // 2, BATCH)))
            for one in network.layers
        ),
    )  # fmt: skip


def stored() -> dict[Path, DeviceProfile]:
    found = profiles_folder().glob("*.json")
    return {path: load_profile(path) for path in found if not path.name.endswith(".rate.json")}


@pytest.mark.slow
def test_the_second_run_knows_better(
    crew: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    session, plan, said = Session(crew, crew.cluster(), False, 0), piped(crew), list[str]()
    graph = captured(network(), Pictures(), functional.cross_entropy, granularity="blocks", name="")
    monkeypatch.setattr("manyhands.job.opening.captured", lambda *_, **__: graph)  # which takes longer than the runs
    for name in names(crew):
        path = profile_place(session, graph, name, SGD)
        save_profile(much_too_fast(graph.network, session, name), path)
        write_document(path.with_suffix(".rate.json"), 1e9)
    wrong = stored()

    ran = train(crew, plan, tmp_path / "first", steps=STEPS, say=said.append)
    assert len(said) == 1, "what was stored is taken, and one thing is to be said"
    assert f"The stored profile was corrected from {STEPS - WARM_UP_ROUNDS} steps." in said[0]
    assert f"manyhands profile --refresh --run {tmp_path / 'first'}" in said[0]
    written: Any = read_document(tmp_path / "first" / "stages.json")
    assert written["corrected_from_steps"] == STEPS - WARM_UP_ROUNDS
    assert [one["device"] for one in written["stages"]] == list(plan.devices)
    for path, one in stored().items():
        assert one.corrected is not None
        assert (one.corrected.runs, one.corrected.steps) == (1, STEPS - WARM_UP_ROUNDS)
        is_first = path == profile_place(session, graph, names(crew)[0], SGD)
        same = [now == was for now, was in zip(one.layers, wrong[path].layers)]
        assert same == ([False, True, True] if is_first else [True, False, False]), "each its own stage's"

    again = train(crew, plan, tmp_path / "second", steps=STEPS, say=said.append)
    assert error(again.result.prediction_accuracy) < error(ran.result.prediction_accuracy)
    assert read_decided(tmp_path / "first", graph.network)[1].devices == ran.planned.profile.devices, "it keeps its own"

    _check_that_nothing_is_learnt_from_what_is_no_evidence(session, graph, again, monkeypatch)

    profile_command(run=str(tmp_path / "second"), refresh=True)
    assert "Forgotten: 2 stored profile(s) of Sequential" in capsys.readouterr().out
    assert not stored()
    monkeypatch.setattr("manyhands.session.measuring._measured", _interrupted)
    with pytest.raises(InterruptedError):
        measure(session, graph, BATCH, optimizer=SGD, say=said.append)
    assert said[-1] == "measuring Sequential on 2 worker(s) at once"


def _interrupted(*_: object) -> NoReturn:
    raise InterruptedError


def _check_that_nothing_is_learnt_from_what_is_no_evidence(
    session: Session, graph: Graph, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few steps, a device that is slowed down on purpose, other kernels than the profile was measured with."""
    assert ran.result.prediction_accuracy is not None
    prediction_accuracy = ran.result.prediction_accuracy

    def learnt(planned: PlannedRun = ran.planned, *, steps: tuple[int, int] = (30, 20)) -> int:
        stages = tuple(
            msgspec.structs.replace(one, measured_seconds=9.0, steps=own)
            for one, own in zip(prediction_accuracy.stages, steps)
        )
        return correct_profiles(
            session, graph, planned, SGD, msgspec.structs.replace(prediction_accuracy, stages=stages)
        )

    before = stored()
    assert learnt(steps=(LEAST_STEPS - 1, 3)) == 0
    member = session.coordinator.members[ran.planned.plan.devices[0]]
    with monkeypatch.context() as patch:
        patch.setattr(member, "facts", msgspec.structs.replace(member.facts, slowdown=2.0))
        assert learnt() == 0
    other = {
        name: msgspec.structs.replace(one, kernels={"conv2d": Kernel(channels_last=True)})
        for name, one in ran.planned.profile.devices.items()
    }
    assert learnt(replace(ran.planned, profile=Profile(other))) == 0
    assert stored() == before
    assert learnt(steps=(30, 3)) == 30, "one device's steps may be enough where another's are not"
    path, other_path = (profile_place(session, graph, name, SGD) for name in ran.planned.plan.devices)
    assert stored()[path] != before[path]
    assert stored()[other_path] == before[other_path]
    assert learnt() == 30
    assert stored()[other_path] != before[other_path]


def test_nothing_is_learnt_from_a_run_that_lost_somebody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.job.base.correct_profiles", lambda *_: 30)
    told: list[str] = []
    nobody: Any = SimpleNamespace(event=lambda *_, **__: None)
    job: Any = SimpleNamespace(
        folder=tmp_path, record=nobody, say=told.append, session=None, graph=None, workload=nobody
    )
    nobody.optimizer = SGD
    found = made_run(lambda stage, device: 3.0)
    for recoveries, steps in (([], 30), ([{"how": "light"}], 0)):
        result: Any = SimpleNamespace(recoveries=recoveries)
        Job._report_accuracy(job, cast(PlannedRun, None), result, found)
        written: Any = read_document(tmp_path / "stages.json")
        assert written["corrected_from_steps"] == steps
    assert ["was corrected from 30 steps" in text for text in told] == [True, False]


def test_what_is_forgotten_is_of_one_network_and_not_of_this_machine_alone(tmp_path: Path) -> None:
    stays = [
        "n_1x8_blocks_m_00ff.json",
        "n_1x8_blocks_m_00ff_inference.json",
        "n_1x8_blocks_m_11ff_2workers_cpu_s.json",
    ]
    goes = [
        "n_1x8_blocks_m_00ff_2workers_cpu_s",
        "n_1x8_blocks_k_00ff_lab-1-pi_cpu_s",
        "n_m_00ff_inference_a_cpu_still",
    ]
    for name in [*stays, *(f"{one}{end}" for one in goes for end in (".json", ".rate.json"))]:
        (tmp_path / name).write_text("{}")
    assert forget_sessions("00ff", tmp_path) == len(goes)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stays)
    assert forget_sessions("00ff", tmp_path / "nowhere") == 0


def test_what_is_typed_wrong(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="no run folder"):
        forget_run(tmp_path)
    with pytest.raises(BadValue, match="measured anew"):
        profile_command(run=str(tmp_path))
