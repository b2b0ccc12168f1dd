"""A library of one small network, for all tests of this folder."""

from __future__ import annotations

import pytest

from infer_methods import HandMade
from manyhands_bench.infer.networks import Library


@pytest.fixture(scope="package")
def library() -> Library:
    return HandMade(0.01, lambda text: None)
