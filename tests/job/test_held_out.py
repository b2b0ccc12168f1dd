"""A run that will have no accuracy says so before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from manyhands.facts.cluster import Cluster
from manyhands.training import train as training
from manyhands.training.arguments import train_config
from manyhands.training.config import TrainConfig
from manyhands.training.named import train_by_name


class _Begun(Exception):
    """The run would begin now."""


@pytest.mark.parametrize("samples", [4, 5])
def test_too_few_samples_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    def train(config: TrainConfig, *_: Any) -> None:
        assert (config.test is None) is (samples == 4)
        raise _Begun

    monkeypatch.setattr(training, "train_with", train)
    file = tmp_path / "few.npz"
    numpy.savez(file, x=numpy.zeros((samples, 1, 16, 16), numpy.float32), y=numpy.arange(samples) % 2)
    said: list[str] = []
    config = train_config({"data": str(file), "batch_size": 2, "devices": "2"})
    with pytest.raises(_Begun):
        train_by_name(replace(config, say=said.append), Cluster.local(1))
    assert len(said) == (1 if samples == 4 else 0)
    if samples == 4:
        assert said[0].startswith("few has 4 sample(s), too few to hold one in five out: there will be no accuracy.")
