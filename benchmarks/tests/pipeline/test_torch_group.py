"""PyTorch's processes run every variant, and are named when they die."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from manyhands.facts.errors import ManyhandsError
from manyhands_bench.pipeline.torch_group import TorchGroup
from manyhands_bench.pipeline.torch_setting import TorchSetting, TorchVariant

pytestmark = pytest.mark.xdist_group("bench_pipeline")


TINY = TorchSetting("mobilenetv2", (3, 64, 64), 4, 2)


UNITS = 34


@pytest.mark.slow
def test_torch_runs_every_way_and_is_named_when_it_dies() -> None:
    pipelines = [TorchVariant("1f1b", (0, 1), (0, 20, UNITS), 2), TorchVariant("gpipe", (0, 1), (0, 9, UNITS), 2)]
    ways = [TorchVariant("ddp", (0, 1), shares=(3, 1)), *pipelines]
    ways += [replace(way, channels_last=True) for way in ways]
    with TorchGroup(TINY, [(), ()], cores=sorted(os.sched_getaffinity(0))[:1] * 2) as group:
        for way in ways:
            seconds = group.run(way, 2)
            assert len(seconds) == 2, way
            assert min(seconds) > 0
        units = group.units(2)
        assert len(units) == UNITS
        assert all(taken > 0 and size > 0 for taken, size in units)
        bare = group.bare((0, 20, UNITS), 2, 0.01)
        assert len(bare) == 2
        for one in (one for stage in bare for one in stage):
            assert len(one.forward) == len(one.backward) == TINY.micro_batches
            assert min(*one.forward, *one.backward, one.step) > 0
        processes = group.processes
        processes[1].send_signal(signal.SIGKILL)
        with pytest.raises(ManyhandsError, match=r"Torch rank [01] (ended|could not)"):
            group.run(pipelines[0], 1)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_torch_says_what_it_cannot_do() -> None:
    setting = TorchSetting("mobilenetv2", (3, 64, 64), 4, 1)
    with (
        TorchGroup(setting, [()]) as group,
        pytest.raises(ManyhandsError, match=r"Torch rank 0 could not run Schedule1F1B.*: \w+: "),
    ):
        group.run(TorchVariant("1f1b", (0,), (0, 0), 1), 1)  # a stage of nothing


@pytest.mark.slow
def test_torch_that_does_not_start_is_named() -> None:
    with pytest.raises(ManyhandsError, match="Torch rank 0 ended"):
        TorchGroup(TorchSetting("nothing", (3, 64, 64), 4, 1), [()])
