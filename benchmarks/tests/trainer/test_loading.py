"""Training from a folder of pictures beside training on samples in memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from manyhands_bench.trainer.loading import BATCH, SAMPLES, LoadingSetting, data_loader, loader_rates, on_two_cores

pytest.importorskip("PIL.Image")
SMALL = LoadingSetting(steps=4, repeats=1, width=4)


def test_the_loader_gives_every_sample_once_an_epoch() -> None:
    loader = data_loader(TensorDataset(torch.arange(SAMPLES)))
    batches = [batch[0] for batch in loader]
    assert [len(batch) for batch in batches] == [BATCH] * (SAMPLES // BATCH)
    assert sorted(torch.cat(batches).tolist()) == list(range(SAMPLES))


@pytest.mark.slow
def test_all_are_trained_and_the_loaders_own_rate_is_known() -> None:
    said: list[str] = []
    rates = loader_rates(SMALL, say=said.append)
    assert rates.loader_ratio == pytest.approx(rates.loader_samples_per_second / rates.memory_samples_per_second)
    assert rates.loader_ratio_folder == pytest.approx(rates.folder_samples_per_second / rates.memory_samples_per_second)
    assert rates.loader_ratio_spread == 0
    assert rates.folder_alone_samples_per_second > 0
    assert rates.loader_keeps_up == (rates.loader_alone_samples_per_second > rates.memory_samples_per_second)
    assert 0 <= rates.loader_wait_share <= 1
    assert len(said) == 2


@pytest.mark.slow
def test_a_process_on_two_cores_prints_the_same_figures() -> None:
    assert on_two_cores(SMALL)["loader_ratio"] > 0
