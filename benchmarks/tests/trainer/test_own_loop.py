"""What a loop of one's own costs: in lines, and in time."""

from __future__ import annotations

import pytest

from manyhands_bench.trainer.own_loop import LoopSetting, lines_changed, lines_changed_max, loop_overhead


def test_a_changed_line_is_one_that_is_written_added_or_taken_out() -> None:
    assert lines_changed("a\nb\nc\n", "a\nb\nc\n") == 0
    assert lines_changed("a\nb\nc\n", "a\n\nb2\nc\n") == 1
    assert lines_changed("a\nb\nc\n", "c\n") == 2
    assert lines_changed("a\nb\nc\n", "x\na\nb\nc\ny\n") == 2
    assert lines_changed("a\nb\nc\nd\n", "a\ne\nd\n") == 2


def test_no_script_changes_more_than_five_lines() -> None:
    assert 1 <= lines_changed_max() <= 5


def test_what_a_loop_costs_is_a_ratio() -> None:
    figures = loop_overhead(LoopSetting(repeats=1, steps=10, width=8, size=8, batch_size=8))
    assert figures["loop_overhead"] == pytest.approx(figures["loop_step_seconds"] / figures["train_step_seconds"])
    assert figures["loop_overhead_spread"] == 0
