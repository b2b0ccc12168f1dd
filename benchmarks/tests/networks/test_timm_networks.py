"""timm's list: spread over its families, fixed, and made of networks that timm has."""

from __future__ import annotations

import pytest

from manyhands_bench.networks.timm_networks import COUNT, TIMM_NAMES, spread, timm_names, timm_subject


def test_names_are_spread_over_families() -> None:
    families = [[f"a{i}" for i in range(9)], ["b0", "b1"], ["c0"]]
    chosen = spread(families, lambda name: name != "b1", 5, seed=0)
    assert len(chosen) == len(set(chosen)) == 5
    assert {name[0] for name in chosen} == {"a", "b", "c"}
    assert "b1" not in chosen
    assert chosen == spread(families, lambda name: name != "b1", 5, seed=0)
    assert len(spread(families, lambda name: True, 100, seed=0)) == 12


def test_the_list_is_long_enough() -> None:
    assert len(set(TIMM_NAMES)) == len(TIMM_NAMES) == COUNT >= 100


def test_a_network_of_timm_takes_its_batch() -> None:
    pytest.importorskip("timm")
    assert len(timm_names()) >= 100
    subject = timm_subject("test_resnet")
    assert subject.module(subject.batch(2)).shape[0] == 2
