"""Outcomes: what counts as a bare error, and the file that a walk goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.facts.errors import BadPlan, CaptureFailed, ManyhandsError
from manyhands_bench.networks.outcome import NetworkOutcome, Step, append_outcome, read_outcomes


@pytest.mark.parametrize(
    ("step", "error", "is_bare"),
    [
        ("capture", CaptureFailed("no\n  at /home/me/net.py:12, in forward:"), False),
        ("capture", CaptureFailed("no, and nobody knows where"), True),
        ("capture", KeyError("submod_3"), True),
        ("tiles", BadPlan("It cannot be tiled."), False),
        ("tiles", AssertionError(), True),
    ],
)
def test_bare_errors(step: Step, error: Exception, is_bare: bool) -> None:
    outcome = NetworkOutcome("timm:a")
    outcome.add_problem(step, error)
    (problem,) = outcome.problems
    assert problem.is_bare == is_bare
    assert problem.kind == type(error).__name__
    assert problem.text


def test_a_bare_error_says_where_it_was_raised() -> None:
    outcome = NetworkOutcome("timm:a")
    try:
        {}["submod_3"]
    except KeyError as error:
        outcome.add_problem("capture", error)
    first, *rest = outcome.problems[0].text.splitlines()
    assert first == "'submod_3'"
    assert "test_outcome.py" in rest[0]


def test_an_end_from_outside_is_bare_and_of_the_step_under_way() -> None:
    outcome = NetworkOutcome("hf:a", step="pipeline")
    outcome.add_end("timeout", "late")
    assert (outcome.problems[0].step, outcome.problems[0].kind, outcome.problems[0].is_bare) == (
        "pipeline", "timeout", True,
    )  # fmt: skip


def test_two_outcomes_do_not_share_their_problems() -> None:
    first, second = NetworkOutcome("hf:a"), NetworkOutcome("hf:b")
    first.add_problem("build", ManyhandsError("no"))
    assert second.problems == []


def test_stored_outcomes_are_read_if_they_are_whole_and_of_the_same_sources(tmp_path: Path) -> None:
    path = tmp_path / "new" / "networks.jsonl"
    assert read_outcomes(path, "1") == {}
    first = NetworkOutcome("timm:a", is_complete=True)
    append_outcome(path, first, "1")
    append_outcome(path, NetworkOutcome("timm:b", is_complete=True), "2")
    append_outcome(path, NetworkOutcome("timm:c"), "1")
    again = NetworkOutcome("timm:a", captured=True, shares={"tiles": False}, is_complete=True)
    again.add_problem("tiles", BadPlan("no"))
    append_outcome(path, again, "1")
    with open(path, "ab") as file:
        file.write(b'{"made_with": "1", "outc')
    assert read_outcomes(path, "1") == {"timm:a": again}
    assert list(read_outcomes(path, "2")) == ["timm:b"]
