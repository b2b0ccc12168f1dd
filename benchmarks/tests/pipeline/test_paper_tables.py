"""ASTEROID's Table 4 and Fig. 13."""

from __future__ import annotations

import math

import pytest

from manyhands.facts.cluster import preset
from manyhands.facts.profile import estimate_cluster
from manyhands.simulator.simulate import simulate
from manyhands_bench.papers import ASTEROID_TABLE_4
from manyhands_bench.pipeline import paper_tables
from manyhands_bench.pipeline.paper_tables import SUBJECTS, TABLE_4_ENVIRONMENTS, TABLE_4_SIDES, within


def quiet(text: str) -> None:
    pass


def as_the_paper(factor: float) -> dict[str, float]:
    return {
        f"speedup_{side}_{subject.key(environment)}": factor * ratio
        for subject in SUBJECTS
        for environment in TABLE_4_ENVIRONMENTS
        for side, ratio in zip(TABLE_4_SIDES, ASTEROID_TABLE_4[subject.paper, environment], strict=True)
    }


def test_ratios_near_the_papers_are_counted_all_of_them() -> None:
    assert len(as_the_paper(1.0)) == 36
    assert [within(as_the_paper(factor), 0.3) for factor in (0.69, 0.71, 1.29, 1.31)] == [0.0, 1.0, 1.0, 0.0]
    figures = as_the_paper(1.0)
    figures["speedup_pp_resnet50_env_b"] = math.nan
    del figures["speedup_device_resnet50_env_a"]
    assert within(figures, 0.3) == pytest.approx(34 / 36)


@pytest.mark.slow
def test_tables_of_one_network() -> None:
    figures = paper_tables.bench_paper_tables(True, quiet)
    assert 0 <= float(figures["table4_within_30_percent"]) <= 1
    assert float(figures["volume_mb_hpp_mobilenetv2"]) > 0
    for environment in ("env_b", "env_c"):
        assert float(figures[f"fig13_pipedream_mobilenetv2_{environment}"]) >= 1 - 1e-9
    assert "speedup_device_mobilenetv2_env_c" not in figures, "Table 4 has no environment C"
    assert "inferred" in str(figures["paper_inputs"])


@pytest.mark.slow
def test_data_parallel_through_one_port_sends_what_table_1_implies() -> None:
    """2(N-1)P bytes one after another, and none beside computing."""
    subject, cluster = SUBJECTS[1], preset("env-a")
    network = paper_tables.network_of(subject)
    plan = paper_tables.compared(subject, "env-a").row(paper_tables.ONE_PORT).plan
    assert plan is not None
    profile = estimate_cluster(network, cluster)
    result = simulate(plan, network, cluster, profile)
    sums = 2 * 4 * network.trained_bytes / cluster.devices[0].up_bytes_per_second
    assert result.total_bytes == 2 * 4 * network.trained_bytes
    computing = max(
        plan.micro_batches * sum(sum(profile.of(name).layer_seconds(i, count)) for i in range(len(network.layers)))
        for name, count in zip(plan.stages[0].devices, plan.stages[0].share.sample_counts(plan.micro_batch_size, 5))
    )
    assert result.seconds == pytest.approx(computing + sums, rel=0.05)
