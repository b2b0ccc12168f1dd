"""The studies of `manyhands bench pipeline` are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands_bench.pipeline.studies import draw_accuracy, draw_pipeline_studies, draw_scaling


def quiet(text: str) -> None:
    pass


@pytest.mark.slow
def test_studies_are_drawn(tmp_path: Path) -> None:
    figures = draw_pipeline_studies(tmp_path, True, quiet)
    figures |= draw_scaling(tmp_path, True, quiet) | draw_accuracy(tmp_path, True, quiet)
    for name in ("fig_15a", "fig_15b_policies", "fig_15b_memory", "fig_18_mobilenetv2_32", "fig_14_env-c"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert float(figures["policy_ours_peak_mb"]) < float(figures["policy_c_peak_mb"])
    assert float(figures["policy_ours_samples_per_second"]) > 0.95 * float(figures["policy_c_samples_per_second"])
    assert float(figures["joules_ratio"]) > 1
