"""A small causal language model of which only adapters are trained (LoRA), written without PEFT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from language_model import Block, Language, language

RANK, ALPHA = 2, 3.0
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["reads"]}


class Adapted(nn.Module):
    """A linear layer beside which a product of two thin matrices is trained."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x) + ALPHA / RANK * self.lora_B(self.lora_A(self.lora_dropout(x)))
        return made


class TwoBlocks(Language):
    """The language model with each block once: there is a part below all adapters."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        out: Tensor = self.head(self.second(self.first(x)))
        return out


def adapted(*blocks: str, dropout: float = 0.0) -> nn.Module:
    """The language model, frozen, with adapters in some of its blocks: "first", "second"."""
    torch.manual_seed(0)
    module = language() if len(blocks) == 2 else TwoBlocks().double()
    module.requires_grad_(False)
    for name in blocks:
        block = getattr(module, name)
        assert isinstance(block, Block)
        block.reads = Adapted(block.reads, dropout)  # type: ignore[assignment]
    return module.double()
