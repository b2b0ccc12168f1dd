"""mh.generate equals transformers' own `generate`, token for token, over worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.facts.errors import BadValue
from manyhands.inference.config import InferConfig
from manyhands.inference.generate import generate_on, token_network
from manyhands.runtime.coordinator import Coordinator
from real_runs import names, workers

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("generating")]

NEW = 8
_SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
KINDS = {
    "llama": ("LlamaConfig", _SIZES),
    "qwen2": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
                            "bos_token_id": 1, "eos_token_id": None}),
}  # fmt: skip
PROMPTS = [[5, 17, 3, 80, 42, 9, 33], [64, 2], [11, 12, 13, 14]]


def model_of(kind: str) -> Any:
    name, fields = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**fields, initializer_range=0.3)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(3) as coordinator:
        yield coordinator


def own(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0, **options)
    return list(generated[0, len(prompt) :].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_and_drawn_tokens_on_two_and_three_workers(cluster: Coordinator, kind: str) -> None:
    model = model_of(kind)
    expected = [own(model, prompt, do_sample=False) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    config = InferConfig(max_new_tokens=NEW)
    network = token_network(config, model, len(PROMPTS), max(map(len, PROMPTS)) + NEW)
    for count in (2, 3):
        layers = len(network.graph.layers)
        bounds = [round(place * layers / count) for place in range(count + 1)]
        stages = [mh.Stage((a, b), (name,)) for a, b, name in zip(bounds, bounds[1:], names(cluster))]
        plan = mh.Plan(network.graph.name, 1, tuple(stages), order="stream")
        generated = generate_on(InferConfig(cluster=cluster, plan=plan, max_new_tokens=NEW), network, PROMPTS)
        assert [list(tokens) for tokens in generated.tokens] == expected
    drawing = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    torch.manual_seed(3)
    drawn = own(model, PROMPTS[0], do_sample=True, **drawing)
    generated = mh.generate(model, PROMPTS[0], cluster=cluster, plan="pipeline", max_new_tokens=NEW, seed=3, **drawing)
    assert list(generated.tokens[0]) == drawn
    assert drawn != expected[0]


def test_padded_prompts_and_an_end_token(cluster: Coordinator) -> None:
    """As transformers does with the same padding and mask."""
    model = model_of("llama")
    width = max(map(len, PROMPTS))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    end = own(model, PROMPTS[0], do_sample=False)[3]
    model.generation_config.eos_token_id = end
    whole = model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    generated = mh.generate(model, tokens, mask, cluster=cluster, plan="pipeline", max_new_tokens=NEW)
    for row, new in zip(whole[:, width:].tolist(), generated.tokens, strict=True):
        assert row[: len(new)] == list(new)
        assert not any(row[len(new) :])
    assert len(generated.tokens[0]) == 4


def test_what_cannot_be_generated_is_refused() -> None:
    small = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**small, intermediate_size=64))
    with pytest.raises(BadValue, match="predicts no next token"):
        mh.generate(bert, [1])
    with pytest.raises(BadValue, match="has 64 positions"):
        mh.generate(model_of("gpt2"), [1], max_new_tokens=64)
    name, fields = "MistralConfig", {**_SIZES, "sliding_window": 8}
    mistral = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields))
    with pytest.raises(BadValue, match="look back on 8 only"):
        mh.generate(mistral, [1], max_new_tokens=8)
