"""Segmentation without a lab."""

from __future__ import annotations

import pytest

from manyhands_bench.auto import memory


def test_without_a_lab_segmentation_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "missing", lambda: "you are not root.")
    assert "not root" in str(memory.bench_memory(memory.MemoryExtent(), lambda text: None)["unet_skipped"])
