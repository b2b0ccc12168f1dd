"""The exchanges of ResNet-50 on four devices equal those of DECNN Table 1."""

from __future__ import annotations

import pytest

from manyhands.plans.networks import load_network
from manyhands_bench.infer.window_exchanges import window_exchanges


@pytest.mark.slow
def test_the_papers_table_1() -> None:
    """17 convolutions with a window, each an exchange among all neighbours: as the paper counts, exactly."""
    resnet50 = load_network("resnet50")
    grid, rows = window_exchanges(resnet50, 2, 2), window_exchanges(resnet50, 4, 1)
    assert (grid.points, grid.messages) == (17, 204)
    assert (rows.points, rows.messages) == (17, 102)
    assert grid.bytes == pytest.approx(1.2e6, rel=0.05)
    assert rows.bytes == pytest.approx(1.8e6, rel=0.1)
