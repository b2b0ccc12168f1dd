"""A network in tiles and two workers, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manyhands.session.session import Session
from manyhands_bench.tile.setup import TiledNetwork, workers


@pytest.fixture(scope="package")
def subject() -> TiledNetwork:
    return TiledNetwork.of((3, 96, 96))


@pytest.fixture(scope="package")
def session() -> Iterator[Session]:
    with workers(2) as found:
        yield found
