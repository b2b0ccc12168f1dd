"""A package that looks like transformers as far as manyhands uses it, for where that is not installed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class Config:
    def __init__(
        self, hidden_size: int = 4096, num_hidden_layers: int = 32, vocab_size: int = 32_000, depths: Any = (9, 9),
        **others: Any,
    ) -> None:  # fmt: skip
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.vocab_size, self.depths, self.pad_token_id = vocab_size, depths, 31_999
        self.use_pretrained_backbone = True
        self.__dict__.update(others)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class PreTrainedModel(nn.Module):
    main_input_name = "input_ids"


class ToyForCausalLM(PreTrainedModel):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_hidden_layers)
        )

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return {"logits": hidden @ self.embedding.weight.T}


class Trainer:
    """What a configuration may not choose."""


def modules() -> dict[str, ModuleType]:
    """The package's modules by name."""
    package, tables = ModuleType("transformers"), ModuleType("transformers.models.auto.modeling_auto")
    package.CONFIG_MAPPING = {"toy": Config, "toy-part": Config}  # type: ignore[attr-defined]
    for public in (PreTrainedModel, ToyForCausalLM, Trainer):
        setattr(package, public.__name__, public)
    tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = {"toy": "ToyForCausalLM"}  # type: ignore[attr-defined]
    names = ("transformers.models", "transformers.models.auto")
    return {"transformers": package, tables.__name__: tables, **{name: ModuleType(name) for name in names}}
