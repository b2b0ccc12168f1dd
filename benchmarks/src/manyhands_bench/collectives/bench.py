"""Figures of `manyhands bench collectives`: the seconds that sums of gradients take by messages and by process groups.

Every worker is a process with an endpoint of its own; messages go through shared memory or TCP as in a run on one
machine. Both ways take turns, block by block, each first in every other pair, and the slowest worker's median counts.
"""

from __future__ import annotations

import contextlib
import json
import queue
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.executor.measured_choice import MOST_TURNS, TRIAL_ROUNDS
from manyhands.facts.collectives import AUTO, BUILTIN, TORCH
from manyhands.facts.errors import TimedOut, WorkerLost
from manyhands.profiler.this_machine import identify
from manyhands.runtime.collective_store import store_at
from manyhands.transport.security import new_secret
from manyhands_bench.figures import Figures, Progress

ANSWER_SECONDS = 300.0
END_SECONDS = 10.0
AUTO_ROUNDS = MOST_TURNS * TRIAL_ROUNDS + 1
"""Rounds of `auto`, at most: the one after its trial is the last."""
MB = 1_000_000


@dataclass(frozen=True)
class CollectivesScope:
    """The amount of measuring."""

    workers: tuple[int, ...] = (2, 4, 8)
    megabytes: tuple[int, ...] = (1, 10, 100)
    blocks: int = 4
    """Times that each way has its turn."""
    rounds: int = 6
    """Sums in a turn."""
    uncounted: int = 2
    """The first sums of a turn, which are not counted: groups were just formed."""


DEFAULT = CollectivesScope()
QUICK = CollectivesScope(workers=(2,), megabytes=(1,), blocks=1, rounds=3, uncounted=1)


class _Member:
    """One process, which forms sums with the others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "manyhands_bench.collectives.member"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._complaints: list[str] = []
        for task in (self._listen, self._collect_complaints):
            threading.Thread(target=task, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._answers.put(line[1:])
        self._answers.put(None)

    def _collect_complaints(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._complaints = [*self._complaints[-20:], line]

    def tell(self, **command: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the answer says so
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        try:
            line = self._answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise TimedOut(f"The benchmark's {self.name} gave no answer within {ANSWER_SECONDS:g} s.") from None
        if line is None:
            raise WorkerLost(f"The benchmark's {self.name} ended:\n{''.join(self._complaints)}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)


@contextlib.contextmanager
def _connected(count: int) -> Iterator[list[_Member]]:
    """Yield processes that are connected to each other."""
    store, port = store_at("127.0.0.1")
    secret = new_secret()
    with contextlib.ExitStack() as ending:
        members = [_Member(f"w{number}") for number in range(count)]
        for member in members:
            ending.callback(member.close)
        for member in members:
            member.tell(name=member.name, secret=secret)
        addresses = {member.name: member.answer() for member in members}
        _all(members, addresses=addresses, store_port=port)
        yield members
    del store


def _all(members: Sequence[_Member], **command: object) -> list[Any]:
    for member in members:
        member.tell(**command)
    return [member.answer() for member in members]


def _rounds(members: Sequence[_Member], way: str, megabytes: int, rounds: int) -> list[Any]:
    _all(members, way=way, bytes=megabytes * MB)
    return _all(members, rounds=rounds)


def _slowest(answers: Sequence[dict[str, Any]], uncounted: int) -> list[float]:
    """Return the seconds of each counted round on the slowest process of that round."""
    return [max(each) for each in zip(*(answer["seconds"][uncounted:] for answer in answers))]


def _spread(seconds: Sequence[float]) -> float:
    """Return the distance between the quartiles, within which half of the rounds are."""
    first, _, third = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (0.0, 0.0, 0.0)
    return third - first


def bench_collectives(quick: bool = False, say: Progress = lambda text: None) -> Figures:
    """Return every figure of `manyhands bench collectives`, flat."""
    scope = QUICK if quick else DEFAULT
    figures: Figures = {
        "machine": identify(1).text, "quick": int(quick),
        "setting": f"float32 in buckets as in training; {scope.blocks} turns of each way, {scope.rounds} sums a turn, "
        "one thread a process",
    }  # fmt: skip
    all_right, worst_choice = True, 0.0
    for count in scope.workers:
        with _connected(count) as members:
            for megabytes in scope.megabytes:
                say(f"{count} workers, {megabytes} MB")
                seconds: dict[str, list[float]] = {BUILTIN: [], TORCH: []}
                for block in range(scope.blocks):
                    for way in (TORCH, BUILTIN) if block % 2 else (BUILTIN, TORCH):
                        answers = _rounds(members, way, megabytes, scope.rounds)
                        all_right = all_right and all(answer["right"] for answer in answers)
                        seconds[way] += _slowest(answers, scope.uncounted)
                chosen = _rounds(members, AUTO, megabytes, AUTO_ROUNDS)
                all_right = all_right and all(answer["right"] for answer in chosen)
                builtin, torch = (statistics.median(seconds[way]) for way in (BUILTIN, TORCH))
                place = f"{count}_workers_{megabytes}_mb"
                figures |= {
                    f"builtin_ms_{place}": 1000 * builtin, f"torch_ms_{place}": 1000 * torch,
                    f"builtin_spread_ms_{place}": 1000 * _spread(seconds[BUILTIN]),
                    f"torch_spread_ms_{place}": 1000 * _spread(seconds[TORCH]),
                    f"torch_over_builtin_{place}": torch / builtin,
                    f"auto_takes_torch_{place}": int(chosen[0]["torch"]),
                }  # fmt: skip
                faster = min(builtin, torch)
                worst_choice = max(worst_choice, (torch if chosen[0]["torch"] else builtin) / faster)
    return figures | {"sums_right": int(all_right), "auto_over_faster": worst_choice}
