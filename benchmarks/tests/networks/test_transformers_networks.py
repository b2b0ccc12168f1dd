"""Small configurations of transformers."""

from __future__ import annotations

import pytest

from manyhands_bench.networks.subject import call, main_output
from manyhands_bench.networks.transformers_networks import SMALL_CONFIGS, transformers_names, transformers_subject


def test_there_are_enough() -> None:
    assert len(SMALL_CONFIGS) >= 30
    assert {"bert", "gpt2", "llama", "t5", "whisper", "wav2vec2", "clip"} <= set(SMALL_CONFIGS)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "wav2vec2", "swin", "clip"])
def test_a_configuration_takes_its_batch(name: str) -> None:
    pytest.importorskip("transformers")
    assert name in transformers_names()
    subject = transformers_subject(name)
    assert sum(weight.numel() for weight in subject.module.parameters()) < 10**6
    assert main_output(call(subject.module, subject.batch(3))).shape[0] == 3
