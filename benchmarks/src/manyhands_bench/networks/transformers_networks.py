"""Small networks of transformers, built from configurations with random weights: nothing is downloaded.

Every family keeps its own defaults (dropout, tied weights, the kind of attention), with few layers, narrow ones, and a
vocabulary of 96 words. Three are not left as they are: a cache of keys and values is for generation, so `use_cache` is
off; and so are two regularisations of speech networks whose random numbers Python draws and decides by in the middle of
forward: masks of time (`apply_spec_augment`), and layers that are skipped (`layerdrop`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manyhands_bench.networks.subject import Subject

WORDS, LENGTH = 96, 12
"""The size of the vocabulary, and the length of a text."""
SIDE = 64
SOUND = 2000
"""Values of a piece of sound."""
Batch = Callable[[int], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class SmallConfig:
    """A network's class and configuration class in transformers, its options, and the batches that it takes."""

    model: str
    config: str
    batch: Batch
    options: Mapping[str, Any] = field(default_factory=dict)


def _words(samples: int) -> torch.Tensor:
    return torch.randint(3, WORDS, (samples, LENGTH))  # none of the special ones


def _text(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _words(samples), "attention_mask": torch.ones(samples, LENGTH, dtype=torch.int64)}


def _two_texts(samples: int) -> dict[str, torch.Tensor]:
    return {**_text(samples), "decoder_input_ids": _words(samples)}


def _pictures(samples: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(samples, 3, SIDE, SIDE)}


def _both(samples: int) -> dict[str, torch.Tensor]:
    return {**_text(samples), **_pictures(samples)}


def _words_and_pictures(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _words(samples), **_pictures(samples)}


def _sound(samples: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(samples, SOUND)}


def _spectra(samples: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(samples, 16, 2 * LENGTH), "decoder_input_ids": _words(samples)}


_NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": WORDS}
_READS = {**_NARROW, **_TOKENS, "max_position_embeddings": 64}
_WRITES = {**_READS, "use_cache": False}
_GROUPED = {**_WRITES, "num_key_value_heads": 2}
_BOTH_WAYS = {
    **_TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip
_T5 = {
    **_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    "use_cache": False,
}  # fmt: skip
_SEES = {**_NARROW, "image_size": SIDE, "patch_size": 16}
_WINDOWS = {
    "image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
_HEARS = {
    **_NARROW, "vocab_size": 32, "conv_dim": [16, 16, 16], "conv_stride": [5, 4, 4], "conv_kernel": [10, 8, 4],
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "layerdrop": 0.0,
}  # fmt: skip
_PAIR = {"text_config": {**_READS, "projection_dim": 16}, "vision_config": {**_SEES, "projection_dim": 16}}


def _reader(prefix: str, **options: Any) -> SmallConfig:
    return SmallConfig(f"{prefix}ForSequenceClassification", f"{prefix}Config", _text, {**_READS, **options})


def _writer(prefix: str, **options: Any) -> SmallConfig:
    return SmallConfig(f"{prefix}ForCausalLM", f"{prefix}Config", _text, {**_WRITES, **options})


def _translator(prefix: str, **options: Any) -> SmallConfig:
    options = {**_BOTH_WAYS, **options}
    return SmallConfig(f"{prefix}ForConditionalGeneration", f"{prefix}Config", _two_texts, options)


def _viewer(prefix: str, options: Mapping[str, Any]) -> SmallConfig:
    return SmallConfig(f"{prefix}ForImageClassification", f"{prefix}Config", _pictures, options)


def _only(options: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return the options of the vocabulary, with others."""
    return {**_TOKENS, **others, **options}


SMALL_CONFIGS: dict[str, SmallConfig] = {
    "bert": _reader("Bert"),
    "roberta": _reader("Roberta"),
    "camembert": _reader("Camembert"),
    "electra": _reader("Electra", embedding_size=16),
    "albert": _reader("Albert", embedding_size=16),
    "mpnet": _reader("MPNet"),
    "squeezebert": _reader("SqueezeBert", embedding_size=32),
    "deberta-v2": _reader("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "mobilebert": _reader("MobileBert", embedding_size=16, intra_bottleneck_size=16),
    "distilbert": SmallConfig(
        "DistilBertForSequenceClassification", "DistilBertConfig", _text,
        _only({"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}),
    ),
    "bert-masked": SmallConfig("BertForMaskedLM", "BertConfig", _text, _READS),
    "gpt2": SmallConfig(
        "GPT2LMHeadModel", "GPT2Config", _text,
        _only({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}),
    ),
    "gpt_neo": SmallConfig(
        "GPTNeoForCausalLM", "GPTNeoConfig", _text,
        _only({"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "use_cache": False},
              attention_types=[[["global", "local"], 1]], window_size=8),
    ),
    "gpt_neox": _writer("GPTNeoX"),
    "opt": SmallConfig(
        "OPTForCausalLM", "OPTConfig", _text,
        _only({"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False},
              max_position_embeddings=64, word_embed_proj_dim=32),
    ),
    "bloom": SmallConfig(
        "BloomForCausalLM", "BloomConfig", _text, _only({"hidden_size": 32, "n_layer": 2, "n_head": 4}, use_cache=False)
    ),
    "falcon": SmallConfig(
        "FalconForCausalLM", "FalconConfig", _text,
        _only({"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}),
    ),
    "mpt": SmallConfig(
        "MptForCausalLM", "MptConfig", _text, _only({"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64})
    ),
    "llama": SmallConfig("LlamaForCausalLM", "LlamaConfig", _text, _GROUPED),
    "qwen2": SmallConfig("Qwen2ForCausalLM", "Qwen2Config", _text, {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": SmallConfig("Qwen3ForCausalLM", "Qwen3Config", _text, {**_GROUPED, "head_dim": 8}),
    "mistral": SmallConfig("MistralForCausalLM", "MistralConfig", _text, _GROUPED),
    "gemma": SmallConfig("GemmaForCausalLM", "GemmaConfig", _text, {**_GROUPED, "head_dim": 8}),
    "gemma2": SmallConfig("Gemma2ForCausalLM", "Gemma2Config", _text, {**_GROUPED, "head_dim": 8}),
    "phi": _writer("Phi"),
    "phi3": SmallConfig("Phi3ForCausalLM", "Phi3Config", _text, _GROUPED),
    "stablelm": SmallConfig("StableLmForCausalLM", "StableLmConfig", _text, _GROUPED),
    "olmo": SmallConfig("OlmoForCausalLM", "OlmoConfig", _text, _GROUPED),
    "t5": SmallConfig("T5ForConditionalGeneration", "T5Config", _two_texts, _T5),
    "mt5": SmallConfig("MT5ForConditionalGeneration", "MT5Config", _two_texts, _T5),
    "bart": _translator("Bart"),
    "mbart": _translator("MBart"),
    "pegasus": _translator("Pegasus"),
    "whisper": SmallConfig(
        "WhisperForConditionalGeneration", "WhisperConfig", _spectra,
        {**{key: value for key, value in _BOTH_WAYS.items() if key != "max_position_embeddings"}, "num_mel_bins": 16,
         "max_source_positions": LENGTH, "max_target_positions": 64, "suppress_tokens": None,
         "begin_suppress_tokens": None},
    ),
    "wav2vec2": SmallConfig("Wav2Vec2ForCTC", "Wav2Vec2Config", _sound, _HEARS),
    "hubert": SmallConfig("HubertForCTC", "HubertConfig", _sound, _HEARS),
    "vit": _viewer("ViT", _SEES),
    "deit": _viewer("DeiT", _SEES),
    "beit": _viewer("Beit", _SEES),
    "dinov2": _viewer("Dinov2", {**_NARROW, "image_size": SIDE, "patch_size": 16}),
    "swin": _viewer("Swin", _WINDOWS),
    "swinv2": _viewer("Swinv2", _WINDOWS),
    "convnext": _viewer("ConvNext", {**_STAGES, "num_stages": 2}),
    "convnextv2": _viewer("ConvNextV2", {**_STAGES, "num_stages": 2}),
    "resnet": _viewer("ResNet", {**_STAGES, "embedding_size": 16}),
    "regnet": _viewer("RegNet", {**_STAGES, "embedding_size": 16, "groups_width": 8}),
    "poolformer": _viewer("PoolFormer", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}),
    "mobilevit": _viewer(
        "MobileViT",
        {"image_size": SIDE, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]},
    ),
    "segformer": SmallConfig(
        "SegformerForSemanticSegmentation", "SegformerConfig", _pictures,
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2],
         "decoder_hidden_size": 16},
    ),
    "clip": SmallConfig("CLIPModel", "CLIPConfig", _both, {**_PAIR, "projection_dim": 16}),
    "clip-vision": SmallConfig(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", _pictures, {**_SEES, "projection_dim": 16}
    ),
    "siglip": SmallConfig("SiglipModel", "SiglipConfig", _words_and_pictures, {
        "text_config": {**_READS, "max_position_embeddings": LENGTH, "projection_size": 32}, "vision_config": _SEES,
    }),
}  # fmt: skip


def transformers_names() -> list[str]:
    """Return the names of the configurations whose classes the installed version has."""
    import transformers

    return [name for name, small in SMALL_CONFIGS.items() if hasattr(transformers, small.model)]


def transformers_subject(name: str) -> Subject:
    """Return a small network of transformers with batches for it."""
    import transformers

    small = SMALL_CONFIGS[name]
    module: nn.Module = getattr(transformers, small.model)(getattr(transformers, small.config)(**small.options))
    return Subject(module, small.batch)
