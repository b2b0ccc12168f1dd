"""Some thousand hostile inputs over all parsers, and the proof that one which misbehaves is found.

The million: python -m tests.fuzz (see running.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuzz import drawing, running
from fuzz.judging import Judge, Target, clock, judge_some
from fuzz.misbehaving import broken, build_of, endless, hungry, right, wordy
from fuzz.running import BUILDS, built, scratch
from manyhands.facts.errors import ManyhandsError

ROOT = Path(__file__).parents[2]
INPUTS = 80
DRAWN = 8
SEED = 20_26


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    before = dict(os.environ)
    with scratch() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield {target.name: target for target in built(folder)}
    os.environ.clear()
    os.environ.update(before)


def in_this_process(targets: dict[str, Target]) -> list[Target]:
    """Those that cannot end it; the others have a process of their own (test_operators.py)."""
    return [target for target in targets.values() if not target.may_crash]


@pytest.mark.slow
@pytest.mark.xdist_group("fuzz")
def test_good_inputs_are_good(targets: dict[str, Target]) -> None:
    """Else nothing of what lies behind the first check would be reached."""
    for target in in_this_process(targets):
        taken = 0
        for seed in target.seeds:
            try:
                target.run(seed)
                taken += 1
            except target.allowed:
                continue
        assert taken > 0 or not target.takes_seeds, target.name


@pytest.mark.slow
@pytest.mark.xdist_group("fuzz")
def test_parsers_stand_hostile_inputs(targets: dict[str, Target]) -> None:
    judge, bad = Judge(seconds=10.0), []
    with warnings.catch_warnings(), clock():
        warnings.simplefilter("ignore")
        for target in in_this_process(targets):
            target.warm_up()
            faults, _ = judge_some(judge, target, SEED, INPUTS)
            bad += [*faults, *drawing.judge_drawn(judge, target, SEED, DRAWN)]
    assert not bad, "\n".join(f"{one.target}, input {one.number}: {one.what}\n{one.trace}" for one in bad)
    assert judge.refused > len(targets) * INPUTS // 2, "most are hostile"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_inputs(targets: dict[str, Target]) -> None:
    for target in targets.values():
        first, again = ([target.input(SEED, number) for number in range(20)] for _ in range(2))
        assert first == again
        assert first != [target.input(SEED + 1, number) for number in range(20)]
        assert len(set(first)) > 10


# Parsers that misbehave


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("run", "what"),
    [
        (broken, "KeyError came out: 'stages'"), (endless, "takes longer than 0.3 s"), (hungry, "the process grew by"),
        (wordy, "has a text of 100000 letters"),
    ],
)  # fmt: skip
def test_a_parser_that_misbehaves_is_found(tmp_path: Path, run: Callable[[bytes], object], what: str) -> None:
    judge = Judge(seconds=0.3 if run is endless else 20.0, most_bytes=64 * 2**20)
    with clock():
        fault = judge.judge(build_of(run)(tmp_path), b'{"a": 1}', 7)
        assert fault is not None
        assert what in fault.what
        assert judge.judge(build_of(right)(tmp_path), b"{") is None


def misbehaving(*words: str) -> tuple[int, str]:
    """The command over parsers that misbehave: its exit code, and what it says. In a process of its own: it forks."""
    program = [sys.executable, str(Path(__file__).with_name("misbehaving.py")), *words]
    found = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    return found.returncode, found.stdout


@pytest.mark.slow
def test_the_command_says_what_misbehaves_and_how_to_see_it_again(tmp_path: Path) -> None:
    """Also of one that ends its process, and of one that never comes back."""
    failures = tmp_path / "failures"
    code, told = misbehaving("--failures", str(failures), "--processes", "2", "--inputs", "200")
    assert code == 1
    assert "KeyError came out" in told
    assert "ended its process (exit code -9)" in told
    assert "does not come back within 0.5 s" in told
    assert "4 parsers" in told
    kept = sorted(failures.glob("broken-*.bin"))
    assert kept
    assert f"--target 'broken' --file {kept[0]}" in told
    code, told = misbehaving("--target", "broken", "--file", str(kept[0]))
    assert code == 1
    assert "KeyError" in told


def test_the_inputs_are_shared_out(targets: dict[str, Target]) -> None:
    chunks = running.chunks_of(list(targets.values()), 1_000_000)
    assert sum(chunk.count for chunk in chunks) >= 1_000_000
    assert {chunk.target for chunk in chunks} == set(targets)
    assert len(targets) == len(BUILDS) >= 45
    numbers = [
        (chunk.target, chunk.drawn, number) for chunk in chunks for number in range(chunk.first, chunk.first + 1)
    ]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.slow
def test_the_command_from_the_root_of_the_repository(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.fuzz", "--inputs", "40000", "--seed", "11", "--failures", str(tmp_path)]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 faults" in found.stdout.splitlines()[-1]


def test_only_errors_for_people_are_allowed(targets: dict[str, Target]) -> None:
    """What a parser may say is its own kind of error, never one of Python's."""
    own = {error for target in targets.values() for error in target.allowed}
    for error in own - {ManyhandsError}:
        assert error.__module__.startswith(("manyhands.", "fuzz.")), error
