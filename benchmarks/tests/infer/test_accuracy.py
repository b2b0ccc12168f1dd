"""Trainings of decoupled networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer_methods import TINY
from manyhands.plans.inference import plan_for
from manyhands_bench.infer.bench import bench_infer
from manyhands_bench.infer.networks import Library
from manyhands_bench.infer.simulated import (
    SCALING,
    devices_of,
)
from manyhands_bench.infer.site import interleaved
from manyhands_bench.parts import failed


@pytest.mark.slow
def test_the_drawn_networks_answer_with_numbers(library: Library) -> None:
    graph = library.graph(TINY, decoupled=True)
    assert all(bool(torch.isfinite(value).all()) for value in graph.state.values())
    plan = plan_for(graph.network, devices_of(SCALING), strategy="channels").plan
    both = interleaved(plan, 8)
    assert (both.order, both.steps_per_round, both.micro_batch_size) == ("interleave", 8, plan.micro_batch_size)


def test_without_pictures_nothing_is_trained(tmp_path: Path) -> None:
    figures = bench_infer(quick=True, only=["accuracy"], pictures=tmp_path / "none.npz", out=tmp_path)
    assert "--pictures" in str(figures["accuracy_setting"])
    assert not failed(figures)
