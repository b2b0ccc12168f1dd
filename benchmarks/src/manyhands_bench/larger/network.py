"""A Qwen2-shaped language model whose weights lie in a file, and LoRA adapters on its attention.

The classes are those of transformers and peft where these are installed, else the same network written here: tensors
have the same names, so one file serves both.
"""

from __future__ import annotations

import importlib.util
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

RANK, ALPHA = 8, 16.0
ADAPTED = ("q_proj", "v_proj")
WEIGHTS_FILE = "model.safetensors"
_EPSILON = 1e-6
_BASE = 10_000.0


@dataclass(frozen=True)
class Size:
    """The sizes of a network, its batches, and the devices it is to be trained on."""

    vocabulary: int = 151_936
    hidden: int = 896
    layers: int = 24
    heads: int = 14
    key_value_heads: int = 2
    intermediate: int = 4864
    tokens: int = 128
    batch: int = 4
    steps: int = 20
    memory_bytes: int = 1_500_000_000
    devices: int = 4


FULL = Size()
QUICK = Size(
    vocabulary=20_000, hidden=512, layers=20, heads=8, intermediate=2048, tokens=32, steps=3, memory_bytes=540_000_000,
)  # fmt: skip


def has_packages() -> bool:
    """Return whether transformers and peft are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("transformers", "peft"))


def built(size: Size) -> nn.Module:
    """Return the network without adapters, with random weights unless it is built without any."""
    if not has_packages():
        return LanguageModel(size)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=size.vocabulary, hidden_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.key_value_heads,
        intermediate_size=size.intermediate, max_position_embeddings=max(512, size.tokens), rms_norm_eps=_EPSILON,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model: nn.Module = Qwen2ForCausalLM(config)
    return model


def adapted(model: nn.Module) -> nn.Module:
    """Return the network with adapters to be trained, everything else frozen; the same numbers each time."""
    torch.manual_seed(0)
    if has_packages():
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), lora_dropout=0.0, target_modules=list(ADAPTED))
        wrapped: nn.Module = get_peft_model(model, config)
        return wrapped
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in ADAPTED:
            if isinstance(child := getattr(module, name, None), nn.Linear):
                setattr(module, name, Adapted(child))
    return model


def without_memory(size: Size) -> nn.Module:
    """Return the network without memory for its weights."""
    with mh.without_weights():
        return built(size)


def write_weights(size: Size, path: Path) -> int:
    """Write random weights, one tensor at a time, and return their bytes. Tied weights are written once."""
    model = without_memory(size)
    tensors = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    header: dict[str, Any] = {}
    place = 0
    for name, shape in tensors.items():
        end = place + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    generator = numpy.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors.values():
            numbers = generator.standard_normal(prod(shape), numpy.float32)
            numbers *= 0.02
            if len(shape) == 1:  # norms and biases
                numbers += 1.0
            numbers.tofile(file)
    return place


def batches(size: Size) -> Tensor:
    """Return random sequences of tokens, enough for all steps."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(size.vocabulary, (size.batch * size.steps, size.tokens), generator=generator)


class Adapted(nn.Module):
    """A linear layer beside which a product of two thin matrices is trained (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x) + ALPHA / RANK * self.lora_B(self.lora_A(x))
        return made


class Norm(nn.Module):
    """Division by the root mean square, and a scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPSILON))


class Attention(nn.Module):
    """Causal attention with rotated queries and keys, several heads to one of keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.pairs, self.width = size.heads, size.key_value_heads, size.hidden // size.heads
        self.q_proj = nn.Linear(size.hidden, size.heads * self.width)
        self.k_proj = nn.Linear(size.hidden, size.key_value_heads * self.width)
        self.v_proj = nn.Linear(size.hidden, size.key_value_heads * self.width)
        self.o_proj = nn.Linear(size.heads * self.width, size.hidden, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        samples, tokens, _ = x.shape

        def split(made: Tensor, heads: int) -> Tensor:
            return made.view(samples, tokens, heads, self.width).transpose(1, 2)

        def rotated(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * cosines + torch.cat((-second, first), dim=-1) * sines

        queries = rotated(split(self.q_proj(x), self.heads))
        keys = rotated(split(self.k_proj(x), self.pairs)).repeat_interleave(self.heads // self.pairs, dim=1)
        values = split(self.v_proj(x), self.pairs).repeat_interleave(self.heads // self.pairs, dim=1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        made: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(samples, tokens, -1))
        return made


class Gated(nn.Module):
    """Two products, one of which gates the other, and a third."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Block(nn.Module):
    """A layer of the network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(size), Gated(size)
        self.input_layernorm, self.post_attention_layernorm = Norm(size.hidden), Norm(size.hidden)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class Body(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = Norm(size.hidden)
        width = size.hidden // size.heads
        steps = 1.0 / _BASE ** (torch.arange(0, width, 2).float() / width)
        angles = torch.arange(size.tokens).float()[:, None] * torch.cat((steps, steps))
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cosines, self.sines)
        made: Tensor = self.norm(x)
        return made


class LanguageModel(nn.Module):
    """A causal language model whose output layer is its embedding; given labels, it returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Body(size)
        self.lm_head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}
