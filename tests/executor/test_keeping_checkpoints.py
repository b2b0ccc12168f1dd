"""A checkpoint under another name: whole, in place of an earlier one, and there when the first is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from manyhands.executor import checkpoint, checkpoint_files
from manyhands.executor.checkpoint_files import keep_as
from manyhands.facts.errors import BadFile
from manyhands.facts.optimizer import Optimizer


def saved(folder: Path, step: int) -> Path:
    return checkpoint.save(
        folder, checkpoint.Checkpoint(step, {"w": torch.full((3,), float(step))}, {}, {}, Optimizer("SGD", lr=0.1), 0)
    )


@pytest.mark.parametrize("has_links", [True, False])
def test_it_outlives_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    if not has_links:

        def refuse(*paths: object) -> None:
            raise OSError("no links here")

        monkeypatch.setattr(checkpoint_files.os, "link", refuse)
    for step in (2, 4):
        keep_as(saved(tmp_path, step), tmp_path / "best")
    checkpoint.prune(tmp_path, 1)
    saved(tmp_path, 4)
    assert checkpoint.load(tmp_path / "best").step == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoints"]


def test_one_that_is_not_there_leaves_the_earlier(tmp_path: Path) -> None:
    keep_as(saved(tmp_path, 2), tmp_path / "best")
    with pytest.raises(BadFile):
        keep_as(tmp_path / "checkpoints" / "step-000009", tmp_path / "best")
    assert checkpoint.load(tmp_path / "best").step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoints"]
