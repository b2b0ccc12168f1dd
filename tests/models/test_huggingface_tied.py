"""Small language models of transformers whose embedding is the output layer too, on stages: as plain PyTorch."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import SGD, plan_for, run, shared
from manyhands.graph.capture import capture

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORDS, LENGTH, SAMPLES, STEPS, TOLERANCE = 32, 8, 4, 3, 1e-9
_SMALL = {
    "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    "tie_word_embeddings": True,
}  # fmt: skip
_LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16,
         "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_LAYERS, "max_position_embeddings": 16}),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0,
         "max_position_embeddings": 16, "word_embed_proj_dim": 16},
    ),
    "falcon": (
        "FalconForCausalLM", "FalconConfig", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
}  # fmt: skip


def made(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model, config, options = NETWORKS[name]
    torch.manual_seed(0)
    module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**_SMALL, **options))
    for key, weight in module.named_parameters():
        if key.endswith("bias"):  # one that begins and stays at zero would be compared by its rounding
            nn.init.normal_(weight)
    return module.double().train()


def batch(seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Sentences of several lengths, with masks; what pads them has the label -100."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return {"input_ids": words * mask, "attention_mask": mask.long()}, torch.where(mask, words, -100)


def next_word(output: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("shares", [[[2], [2]], [[1, 1], [2], [1, 1]]], ids=["two", "three"])
@pytest.mark.parametrize("name", NETWORKS)
def test_stages_that_share_the_embedding(name: str, shares: list[list[int]]) -> None:
    module, batches = made(name), [batch(seed) for seed in range(STEPS)]
    inputs, labels = batches[0]
    graph = capture(module, inputs, loss=next_word, target=labels, granularity="operators", name=name)
    count = len(graph.network.layers)
    middle = [count * place // len(shares) for place in range(1, len(shares))]
    stages = [shared(*between, *own) for between, own in zip(pairwise([0, *middle, count]), shares, strict=True)]
    ran = run(graph, plan_for(graph, stages, batch_size=SAMPLES, micro_batches=2), batches, SGD)
    ran.assert_as_planned(STEPS)
    plain, losses = copy.deepcopy(module), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for inputs, labels in batches:
        loss = next_word(plain(**inputs), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    state = {**graph.state, **dict(plain.named_parameters()), **dict(plain.named_buffers())}  # and constants
    ran.assert_equals({name: tensor.detach() for name, tensor in state.items()}, losses, TOLERANCE)
    tied = {name for sums in ran.schedule.lowering.tied_sums for name in sums.weights}
    assert tied & {graph.aliases.get(name, name) for name in ("lm_head.weight",)}
