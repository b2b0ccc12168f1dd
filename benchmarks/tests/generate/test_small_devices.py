"""Generation on devices that cannot hold the network: its parts, without a lab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.weights.mapped import is_mapped
from manyhands_bench.generate import small_devices
from manyhands_bench.generate.decoder import Decoder, DecoderSize, plain_texts
from manyhands_bench.generate.small_devices import SmallDevices, bench_small_devices, mapped, prompt_of, write_weights

TINY = SmallDevices(DecoderSize(2, 16, 2, 31, 16), prompt_tokens=3, new_tokens=4, repetitions=3)


def test_the_weights_in_the_file_generate_what_those_in_memory_do(tmp_path: Path) -> None:
    write_weights(TINY.size, tmp_path / small_devices.WEIGHTS_FILE)
    model = mapped(TINY.size, tmp_path)
    assert all(is_mapped(weight) for weight in model.parameters())
    expected = plain_texts(Decoder(TINY.size).eval(), [prompt_of(TINY)], TINY.new_tokens)
    assert plain_texts(model, [prompt_of(TINY)], TINY.new_tokens) == expected


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("is_equal", [True, False])
def test_ratios_are_taken_within_each_repetition(is_equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"paged": iter([1.0, 2.0, 4.0]), "devices": iter([2.0, 6.0, 16.0])}

    def process(task: str, settings: SmallDevices, folder: Path) -> dict[str, Any]:
        assert torch.is_tensor(mapped(settings.size, folder).words.weight)
        if task == "refused":
            return {"kind": "OutOfMemory", "error": "too large"}
        tokens = [1, 2, 3, 4] if is_equal or task == "paged" else [1, 2, 3, 5]
        return {"tokens": tokens, "tokens_per_second": next(rates[task]), "peak_bytes": 7}

    monkeypatch.setattr(small_devices, "_process", process)
    figures = bench_small_devices(TINY, lambda text: None)
    assert figures["small_2_devices_over_1"] == 3.0
    assert figures["small_2_devices_tokens_per_second"] == 6.0
    assert figures["small_tokens_equal"] == int(is_equal)
    assert figures["small_refused"] == 1
