"""Summaries: short, whatever they are of, and safe to show."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.facts.summary import MOST_LETTERS, Summarized


@dataclass(repr=False)
class Thing(Summarized):
    text: str

    def summary(self) -> dict[str, str]:
        return {"text": self.text, "<b>": "bold"}


def test_a_summary_is_one_line_and_a_table() -> None:
    assert repr(Thing("here")) == "<Thing: text here, <b> bold>"
    assert "<td style='text-align:left'>here</td>" in Thing("here")._repr_html_()
    assert "<th style='text-align:left'>&lt;b&gt;</th>" in Thing("here")._repr_html_()
    assert "<script>" not in Thing("<script>")._repr_html_()
    assert len(repr(Thing("x" * 10_000))) < MOST_LETTERS + 50


def test_a_plan_has_a_row_for_each_stage() -> None:
    plan = Plan("net", 8, (Stage((0, 2), ("a", "b"), BySamples((3, 5))), Stage((2, "end"), ("c",))))
    text = plan._repr_html_()
    assert "layers 0 to 2, samples: a, b" in text
    assert "layers 2 to end, single: c" in text
