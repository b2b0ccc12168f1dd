"""Real pictures with boxes: blood cells (BCCD), where they lie beside the repository."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from manyhands.data.data_sets import DataSets
from manyhands.data.sets import load

PACKED = Path(__file__).parents[2] / "shared" / "data" / "bccd.tar.gz"


def blood_cells(folder: Path, side: int) -> DataSets:
    """Unpacked into a folder and read as squares; the test is skipped where there are none."""
    if not PACKED.exists():
        pytest.skip("there is no ../shared/data/bccd.tar.gz")
    with tarfile.open(PACKED) as packed:
        packed.extractall(folder, filter="data")
    return load(folder, input_shape=(3, side, side))
