"""Networks of transformers by type or configuration: small by type, as described by file, nothing from elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fake_transformers
import pytest
import torch

from manyhands.facts.errors import BadFile, NotInstalled, OutOfMemory, UnknownName
from manyhands.models import registry
from manyhands.models.huggingface import TOKENS

HOSTILE = {
    "model_type": "toy", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 50,
    "auto_map": {"AutoModel": "evil.Model"}, "_name_or_path": "evil/evil", "_attn_implementation": "evil/kernel",
    "attn_implementation": "evil/kernel", "backbone": "evil/backbone", "model_args": {"checkpoint_path": "evil.pth"},
    "quantization_config": {"quant_method": "evil"}, "use_kernels": True,
    "parts": [{"auto_map": {}, "width": 3}], "text_config": {"_attn_implementation_internal": "evil", "depth": 1},
}  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_transformers.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def configured(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", **fields}))
    return f"hf:{folder}"


@pytest.mark.usefixtures("fake")
def test_a_type_is_small() -> None:
    model: Any = registry.build("hf:toy")
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size) == (64, 2, 1000)
    assert model.config.pad_token_id == 0
    assert model.config.depths == (9, 9)
    assert registry.build("hf:toy", num_hidden_layers=3).config.num_hidden_layers == 3  # type: ignore[union-attr]
    batch = registry.example_batch("hf:toy", 2)
    assert isinstance(batch, dict)
    assert batch["input_ids"].shape == (2, TOKENS)
    assert int(batch["input_ids"].max()) < 1000
    shorter = registry.example_batch("hf:toy", 2, input_shape=(7,))
    assert isinstance(shorter, dict)
    assert shorter["input_ids"].shape == (2, 7)


@pytest.mark.usefixtures("fake")
def test_a_configuration_is_built_as_it_stands(tmp_path: Path) -> None:
    name = configured(tmp_path, hidden_size=24, vocab_size=70, num_hidden_layers=4, architectures=["ToyForCausalLM"])
    for model in (registry.build(name), registry.build(f"{name}/config.json")):
        assert sum(weight.numel() for weight in model.parameters()) == 70 * 24 + 4 * (24 * 24 + 24)


@pytest.mark.usefixtures("fake")
def test_no_field_names_code_kernels_or_weights(tmp_path: Path) -> None:
    model: Any = registry.build(configured(tmp_path, **HOSTILE))
    fields = model.config.to_dict()
    assert "evil" not in repr(fields)
    assert fields["text_config"] == {"depth": 1}
    assert fields["parts"] == [{"width": 3}]
    assert not fields["use_pretrained_backbone"]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("named", ["Trainer", "CONFIG_MAPPING", "evil.Model", "__loader__", "Missing"])
def test_a_configuration_chooses_networks_only(tmp_path: Path, named: str) -> None:
    with pytest.raises(UnknownName, match="is no network of the installed transformers"):
        registry.build(configured(tmp_path, architectures=[named]))


@pytest.mark.usefixtures("fake")
def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="no type of networks called 'tay'") as misspelt:
        registry.build("hf:tay")
    assert "toy" in misspelt.value.hint
    assert "Nothing is downloaded" in misspelt.value.hint
    with pytest.raises(UnknownName, match="a part of others"):
        registry.build("hf:toy-part")
    with pytest.raises(BadFile, match="no such folder"):
        registry.build("hf:someone/model")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadFile, match="no model_type"):
        registry.build(f"hf:{tmp_path}")
    with pytest.raises(OutOfMemory, match="The weights of hf:"):
        registry.build(configured(tmp_path, hidden_size=10**6, vocab_size=10**9))


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NotInstalled, match="needs transformers") as missing:
        registry.build("hf:bert")
    assert missing.value.hint == "pip install transformers"


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2", "t5", "vit", "whisper"])
def test_the_real_ones_run(kind: str) -> None:
    pytest.importorskip("transformers")
    model = registry.build(f"hf:{kind}")
    assert sum(weight.numel() for weight in model.parameters()) < 20_000_000
    batch = registry.example_batch(f"hf:{kind}", 2)
    assert isinstance(batch, dict)
    with torch.no_grad():
        assert torch.isfinite(next(iter(model(**batch).values()))).all()
