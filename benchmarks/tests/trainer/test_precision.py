"""The measurement of precision: what it compares with, and that it would notice."""

from __future__ import annotations

import pytest
import torch

from manyhands_bench.trainer.precision import (
    bf16_bytes_ratio,
    bf16_noise_ratio,
    bf16_speedup_gpu,
    by_pytorch,
    distance,
    network,
    pictures,
)


def test_pytorch_itself_is_at_a_distance() -> None:
    data = pictures(0)
    exact = by_pytorch(network(0).double(), data, torch.float64)
    assert distance(exact, exact) == 0
    single = distance(by_pytorch(network(0), data, torch.float32), exact)
    assert 0 < 100 * single < distance(by_pytorch(network(0), data, torch.bfloat16), exact)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_no_speedup() -> None:
    assert bf16_speedup_gpu() is None


@pytest.mark.slow
def test_noise_and_bytes() -> None:
    found = bf16_noise_ratio(seeds=1)
    ways = {"bf16_noise_samples", "bf16_noise_pipeline", "bf16_noise_tiles"}
    assert set(found) == {*ways, "bf16_noise_ratio"}
    assert found["bf16_noise_ratio"] == max(found[way] for way in ways) <= 1.5
    assert bf16_bytes_ratio() <= 0.52
