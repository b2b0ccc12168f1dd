from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.models.registry import build, example_batch


@pytest.fixture(scope="session")
def tiny() -> Graph:
    return capture(build("tiny"), example_batch("tiny", 2), name="tiny")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def threads_and_flags_stay() -> Iterator[None]:
    before = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    yield
    assert (torch.get_num_threads(), torch._C._get_mkldnn_enabled()) == before
