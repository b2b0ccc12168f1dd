"""Callbacks as a job calls them: in which order, with which state in which checkpoint, and what becomes of errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import manyhands as mh
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, UnknownName
from manyhands.job.callback_list import CallbackList, RunFacts, check_monitors, is_better
from manyhands.runtime.validating import CheckpointRequests

FACTS = RunFacts(Path("runs/x"), 0, 100, 4, ("loss", "top2"), lambda step: 0.5)


class Counting(mh.Callback):
    def __init__(self) -> None:
        self.steps, self.recoveries = 0, list[Mapping[str, Any]]()

    def on_step(self, context: mh.CallbackContext) -> None:
        self.steps += 1

    def on_recovery(self, context: mh.CallbackContext) -> None:
        self.recoveries.append(context.recovery)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Plateau:
    """A listener: it is told before callbacks."""

    name = "plateau"

    def __init__(self, told: list[str]) -> None:
        self.told, self.losses = told, list[float]()

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        self.told.append(self.name)
        self.losses.append(metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = list(state["losses"])


def listed(*callbacks: mh.Callback, listeners: tuple[Any, ...] = (), facts: RunFacts = FACTS) -> CallbackList:
    return CallbackList(callbacks, listeners, facts, CheckpointRequests())


def test_a_checkpoint_has_the_state_of_its_own_step() -> None:
    """Checkpoints are written later, while steps go on."""
    calls = listed(Counting())
    calls.start()
    for step in range(6):
        calls.stepped(step, 1.0, 0.1)
    for steps in (2, 5, 6):
        assert calls.document_after(steps)["callbacks"]["states"] == {"Counting": {"steps": steps}}


def test_listeners_are_told_first_and_their_state_is_kept() -> None:
    told: list[str] = []

    class Told(mh.Callback):
        def on_validation(self, context: mh.CallbackContext) -> None:
            told.append(f"callback {context.metrics['loss']} at {context.step}")

    plateau = Plateau(told)
    calls = listed(Told(), listeners=(plateau,))
    calls.start()
    calls.stepped(0, 1.0, 0.1)
    calls.validated_at(1, {"loss": 0.5, "top2": 1.0})
    assert told == ["plateau", "callback 0.5 at 0"]
    document = calls.document_after(1)
    again = Plateau([])
    listed(listeners=(again,)).load(json.loads(json.dumps(document))["callbacks"], None)
    assert again.losses == [0.5]
    assert document["callbacks"]["validated"] == 1


def test_two_of_a_kind_have_a_state_each() -> None:
    first, second = Counting(), Counting()
    calls = listed(first, second)
    calls.load({"validated": 0, "states": {"Counting": {"steps": 3}, "Counting-2": {"steps": 4}}}, None)
    assert (first.steps, second.steps) == (3, 4)


def test_a_run_without_callbacks_keeps_nothing() -> None:
    calls = listed()
    calls.start()
    calls.stepped(0, 1.0, 0.1)
    assert calls.document_after(1) == {}


def test_a_callback_that_is_gone_is_told() -> None:
    said: list[str] = []
    listed().load({"validated": 2, "states": {"Counting": {"steps": 3}}}, said.append)
    assert said == ["The run had a callback Counting, which it now goes on without."]


@pytest.mark.parametrize("document", [{"validated": "a"}, {"states": []}, {"states": {"Counting": {}}}])
def test_a_state_that_does_not_fit_is_refused(document: Any) -> None:
    with pytest.raises(BadFile):
        listed(Counting()).load(document, None)


def test_another_monitor_than_before_is_refused() -> None:
    before = mh.EarlyStopping("loss")
    with pytest.raises(BadFile, match=r"it went by loss \(min\), and now goes by top2 \(max\)"):
        listed(mh.EarlyStopping("top2", mode="max")).load(
            {"validated": 2, "states": {"EarlyStopping": before.state_dict()}}, None
        )


def test_after_an_error_nothing_but_the_end_is_called() -> None:
    class Raising(Counting):
        def on_step(self, context: mh.CallbackContext) -> None:
            super().on_step(context)
            raise ValueError("never")

    ends: list[BaseException | None] = []

    class Ending(Counting):
        def on_end(self, context: mh.CallbackContext) -> None:
            ends.append(context.error)

    ending = Ending()
    calls = listed(Raising(), ending)
    calls.start()
    calls.stepped(0, 1.0, 0.1)
    calls.stepped(1, 1.0, 0.1)
    assert calls.is_stopping
    assert ending.steps == 0
    assert calls.failure is not None
    assert calls.failure.message == "The callback Raising raised in on_step, after step 0: ValueError: never"
    calls.end(error=calls.failure)
    calls.end()
    assert ends == [calls.failure]


def test_an_error_before_the_first_step_is_raised_at_once() -> None:
    class Raising(mh.Callback):
        def on_start(self, context: mh.CallbackContext) -> None:
            raise BadValue("no such server", hint="Start it.")

    with pytest.raises(ManyhandsError, match="The callback Raising in on_start, before the first step: no such server"):
        listed(Raising()).start()


def test_state_that_is_not_plain_ends_the_job() -> None:
    class Heavy(mh.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"when": {1, 2}}

    with pytest.raises(BadValue, match="state_dict of the callback Heavy cannot be stored as JSON"):
        listed(Heavy()).start()


def test_a_listener_that_raises_ends_the_job() -> None:
    calls = listed(listeners=(Plateau([]),))
    calls.start()
    calls.validated_at(1, {})
    assert calls.failure is not None
    assert "plateau" in calls.failure.message


@pytest.mark.parametrize("name", ["..", "a/b", ".best", "a" * 200])
def test_a_folder_outside_of_the_run_is_refused(name: str) -> None:
    with pytest.raises(BadValue, match="cannot be a folder of the run"):
        listed().checkpoint(name)


@pytest.mark.parametrize("name", ["checkpoints", "workers", "tensorboard", "plots", "adapter"])
def test_a_folder_of_the_runs_own_is_refused(name: str) -> None:
    with pytest.raises(BadValue, match="cannot be a folder of the run"):
        listed().checkpoint(name)


def test_a_recovery_is_told() -> None:
    counting = Counting()
    calls = listed(counting)
    calls.recovered({"how": "light", "devices": ["a"]})
    assert counting.recoveries == [{"how": "light", "devices": ["a"]}]


def test_a_monitor_that_does_not_exist() -> None:
    check_monitors([mh.EarlyStopping("map/mean", mode="max")], ["loss", "map"])
    with pytest.raises(UnknownName, match="'los'"):
        check_monitors([mh.EarlyStopping("los", mode="min")], ["loss"])
    with pytest.raises(BadValue, match="this job has none"):
        check_monitors([mh.BestCheckpoint()], [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: mh.EarlyStopping("top2"), lambda: mh.EarlyStopping(mode="least"), lambda: mh.EarlyStopping(patience=0),
        lambda: mh.EarlyStopping(patience=True), lambda: mh.EarlyStopping(min_delta=-1.0),
        lambda: mh.EarlyStopping(min_delta=float("nan")), lambda: mh.BestCheckpoint("top2"),
    ],
)  # fmt: skip
def test_bad_values_of_those_supplied(make: Any) -> None:
    with pytest.raises(BadValue):
        make()


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.one_of(st.floats(0, 1), st.just(float("nan"))), max_size=12), waits=st.integers(1, 4),
    delta=st.sampled_from([0.0, 0.1]), cut=st.integers(0, 12),
)  # fmt: skip
def test_early_stopping_stops_after_so_many_that_are_not_better(
    values: list[float], waits: int, delta: float, cut: int
) -> None:
    """Also where the run was resumed somewhere from its state."""
    best, since, expected = None, 0, None
    for place, value in enumerate(values):
        if is_better(value, best, "min", delta):
            best, since = value, 0
        else:
            since += 1
        if since >= waits:
            expected = place
            break
    stopped, state = None, None
    stopping = mh.EarlyStopping(patience=waits, min_delta=delta)
    for place, value in enumerate(values):
        if place == cut:
            state = json.loads(json.dumps(stopping.state_dict()))
            stopping = mh.EarlyStopping(patience=waits, min_delta=delta)
            stopping.load_state_dict(state)
        calls = listed(stopping)
        calls.validated_at(place + 1, {"loss": value})
        if calls.stopped_because is not None:
            stopped = place
            break
    assert stopped == expected


@pytest.mark.parametrize(
    ("value", "best", "mode", "delta", "expected"),
    [
        (1.0, None, "min", 0.5, True), (0.9, 1.0, "min", 0.0, True), (0.9, 1.0, "min", 0.1, False),
        (1.1, 1.0, "max", 0.0, True), (1.0, 1.0, "max", 0.0, False), (float("nan"), None, "max", 0.0, False),
    ],
)  # fmt: skip
def test_what_is_better(value: float, best: float | None, mode: str, delta: float, expected: bool) -> None:
    assert is_better(value, best, mode, delta) is expected
