"""Every kind of fault can be made."""

from __future__ import annotations

from pathlib import Path

from manyhands_bench.chaos.draw import (
    KINDS,
)
from manyhands_bench.chaos.faults import _COURSES

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "chaos.md"


def test_every_kind_can_be_made_and_is_explained() -> None:
    assert set(_COURSES) == set(KINDS)
    text = PAGE.read_text()
    assert [kind for kind in KINDS if f"| `{kind}` |" not in text] == []
