"""How a worker keeps memory follows from what its part takes and what is free."""

from __future__ import annotations

import pytest

from hand_made import chain
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.runtime import part_builder
from manyhands.runtime.part_builder import SPARE, settle_allocator
from manyhands.schedule.checker import check
from manyhands.schedule.policy import Schedule

CHAIN = chain(4, statistics=[1])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    for name in ("give_back_memory", "return_memory", "keep_memory"):
        monkeypatch.setattr(part_builder, name, lambda name=name: noted.append(name))
    return noted


@pytest.mark.parametrize(
    ("spare", "expected"),
    [(SPARE * 1.01, ["keep_memory"]), (SPARE * 0.99, ["give_back_memory", "return_memory"])],
    ids=["roomy", "tight"],
)
def test_freed_memory_is_kept_where_there_is_enough(spare: float, expected: list[str], calls: list[str]) -> None:
    stages = (Stage((0, 2), ("d0",)), Stage((2, 4), ("d1",)))
    schedule = Schedule(resolve(Plan("chain", 4, stages, 4), CHAIN), CHAIN)
    settle_allocator(schedule, "d1", round(spare * check(schedule).peak_bytes["d1"]))
    assert calls == expected
