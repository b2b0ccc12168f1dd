"""Simulated methods, and what they are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer_methods import TINY, methods
from manyhands.plans.inference import plan_for, sample_seconds
from manyhands_bench.everything import this_host
from manyhands_bench.infer.drawn import draw_simulated
from manyhands_bench.infer.networks import Library
from manyhands_bench.infer.simulated import (
    ALL,
    ALONE,
    BOTH,
    METHODS,
    MODNN_DECOUPLED,
    ONE,
    SCALING,
    WEAK,
    Case,
    MethodSeconds,
    ahead_of,
    bench_simulated,
    devices_of,
)


def test_ours_is_compared_with_the_best_baseline() -> None:
    own = methods(baseline=0.3, both=0.2, every=0.1)
    assert ahead_of(own) == pytest.approx((1.5, 3.0))
    own[MODNN_DECOUPLED] = MethodSeconds(0.1, 0.05)
    assert ahead_of(own) == pytest.approx((0.5, 0.5))
    assert ahead_of(own, (ONE,)) == pytest.approx((5.0, 10.0))


@pytest.mark.slow
def test_methods_over_a_weak_link(library: Library) -> None:
    original, decoupled = (library.profiled(TINY, decoupled=one) for one in (False, True))
    cluster = devices_of(WEAK)
    found = Case(cluster, original, decoupled, streams=1).methods()
    assert set(found) == set(METHODS)
    assert found[ONE].latency == pytest.approx(original.seconds)
    assert found[ALONE].interval == pytest.approx(decoupled.seconds)
    plan = plan_for(decoupled.network, cluster, decoupled.on(cluster), strategy="channels").plan
    assert found[BOTH].latency == pytest.approx(sample_seconds(plan, decoupled.network, cluster, decoupled.on(cluster)))
    assert found[ALL].interval < found[BOTH].interval
    assert found[ALL].latency >= found[BOTH].latency - 1e-9
    assert len(devices_of(SCALING, 2).names) == 2


@pytest.mark.slow
def test_figures_of_what_was_simulated(library: Library, tmp_path: Path) -> None:
    figures, found = bench_simulated(library, [TINY], TINY, (WEAK,), 1, lambda text: None)
    assert figures["profile_machine"] == this_host().slug
    assert figures["slower_factor"] == pytest.approx(0.3 / library.profiled(TINY, decoupled=False).seconds)
    rows = found.tables["tiny"]
    assert rows[WEAK][ONE].latency == pytest.approx(0.3)
    worst = min(min(ahead_of(own)) for own in rows.values())
    assert figures["worst_vs_rivals"] == pytest.approx(worst)
    assert figures["worst_vs_one_device"] == pytest.approx(min(min(ahead_of(own, (ONE,))) for own in rows.values()))
    assert figures["scheme3_gain"] == pytest.approx(rows[WEAK][BOTH].interval / rows[WEAK][ALL].interval)
    assert [path.name for path in draw_simulated(found, tmp_path)] == ["fig_8_tiny.png"]
