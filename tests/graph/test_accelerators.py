"""GPUs of any kind: what is asked of PyTorch, played here, as there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from manyhands.facts.errors import Refused
from manyhands.graph import accelerators
from manyhands.graph.accelerators import check_gpu, free_bytes, memory_bytes, release_memory, synchronize


@pytest.mark.parametrize("compute", ["xpu:7", "mps", "cuda:63"])
def test_a_gpu_that_is_not_there_is_refused(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(Refused, match=f"--compute {compute} was asked for; torch sees \\d+ GPU"):
        check_gpu(compute)


def test_each_kind_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    played = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, synchronize=lambda: asked.append("synchronize"),
        empty_cache=lambda: asked.append("empty_cache"), mem_get_info=lambda device: (3, 8),
        get_device_properties=lambda device: SimpleNamespace(total_memory=8),
    )  # fmt: skip
    monkeypatch.setattr(accelerators, "_module", lambda kind: played)
    check_gpu("xpu:1")
    device = torch.device("xpu:1")
    synchronize(device)
    release_memory(device)
    assert asked == ["synchronize", "empty_cache"]
    assert (memory_bytes(device), free_bytes(device)) == (8, 3)
    with pytest.raises(Refused):
        check_gpu("xpu:2")
    assert memory_bytes(torch.device("mps")) is None


def test_nothing_is_asked_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "_module", None)
    device = torch.device("cpu")
    synchronize(device)
    release_memory(device)
    assert memory_bytes(device) is None
    assert free_bytes(device) is None
