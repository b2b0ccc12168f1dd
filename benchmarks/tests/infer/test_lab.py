"""Methods measured in the lab."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from infer_methods import TINY, measured
from manyhands.facts.cluster import preset
from manyhands_bench.infer import lab
from manyhands_bench.infer.lab import InferLabExtent, bench_lab, lab_figures, lab_of
from manyhands_bench.infer.networks import GROUPS, RESNET50, Library
from manyhands_bench.infer.simulated import (
    ALL,
    BOTH,
    SCALING,
    TILED,
)


def test_the_lab_says_how_far_off_the_simulation_was() -> None:
    own = {name: measured(0.4, 0.4) for name in TILED}
    own |= {BOTH: measured(0.2, 0.25), ALL: measured(0.1, 0.2, math.nan)}
    figures = lab_figures({"240_20": own})
    assert figures["lab_worst_vs_rivals"] == pytest.approx(2.0)
    assert figures["lab_vs_rivals_throughput_240_20"] == pytest.approx(4.0)
    assert figures["lab_scheme3_gain_240_20"] == pytest.approx(2.0)
    # eight of the baselines, two of schemes 1+2, one of all: a latency that was not measured is none
    assert figures["lab_sim_error_worst"] == pytest.approx(0.5)
    assert figures["lab_sim_error"] == pytest.approx(0.0)
    assert own[ALL].errors == pytest.approx([0.5])


def test_devices_of_the_lab_are_as_fast_as_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        gflops = 40.0

    monkeypatch.setattr(lab, "this_machine", lambda threads: Core)
    subject = replace(RESNET50, paper_seconds=2.0)
    asked = lab_of("240_20", 0.2, subject, "x")
    assert [device.gflops for device in asked.cluster.devices] == pytest.approx([4.0] * GROUPS)
    assert asked.cluster.link == preset("decnn-240-20").link
    assert asked.scale == pytest.approx(lab.SCALE)
    slower = lab_of("240_20", 1.0, subject, "x")
    assert slower.scale == pytest.approx(0.5 / lab.LARGEST_SHARE)


def test_where_there_can_be_no_lab_that_is_said(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(lab, "missing", lambda: "only root may do that")
    assert bench_lab(library, TINY, InferLabExtent((SCALING,), 3, 3, 0.1), lambda text: None) == (
        {"lab_skipped": "only root may do that"}, {},
    )  # fmt: skip
