"""Training from a folder of pictures beside training on samples in memory."""

from __future__ import annotations

import pytest

from manyhands_bench.trainer.loading import loader_ratio

pytest.importorskip("PIL.Image")


@pytest.mark.slow
def test_both_are_trained_and_the_loaders_own_rate_is_known() -> None:
    said: list[str] = []
    rates = loader_ratio(steps=4, repeats=1, width=4, say=said.append)
    assert rates.loader_ratio == pytest.approx(rates.from_folder / rates.from_memory)
    assert rates.spread == 0
    assert rates.loader_alone > 0
    assert 0 <= rates.data_wait_share <= 1
    assert len(said) == 2
