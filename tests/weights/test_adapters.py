"""Adapters as PEFT keeps them: names, configuration, what is refused; read by PEFT itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import manyhands as mh
from adapted_language import CONFIG, adapted
from language_model import batch, language
from manyhands.executor.checkpoint import Checkpoint
from manyhands.graph.graph import Graph
from manyhands.runtime.record import FROZEN, full_state, left_out, resumed_state
from manyhands.weights.adapters import peft_model_of, sampled_digest

WORDS, _ = batch(0)


def test_adapters_of_ones_own_are_written_under_pefts_names(tmp_path: Path) -> None:
    module = adapted("first", "second")
    assert peft_model_of(module) is None
    assert mh.save_adapter(module, tmp_path / "adapter", config=CONFIG) == tmp_path / "adapter"
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained = {f"base_model.model.{n}": p for n, p in module.named_parameters() if p.requires_grad}
    assert "base_model.model.second.reads.lora_A.weight" in trained
    assert tensors.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in tensors.items())
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written == {"inference_mode": True, **CONFIG}


def test_an_adapters_name_is_no_part_of_its_tensors_and_a_folder_is_written_anew(tmp_path: Path) -> None:
    module = nn.Module()
    module.base = nn.Linear(2, 2)
    module.base.requires_grad_(False)
    module.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})
    for number in (1.0, 2.0):
        nn.init.constant_(module.lora_A["default"].weight, number)
        mh.save_adapter(module, tmp_path, config=CONFIG)
        (name, tensor), *others = load_file(tmp_path / "adapter_model.safetensors").items()
        assert (name, others) == ("base_model.model.lora_A.weight", [])
        assert torch.equal(tensor, torch.full((1, 2), number))


def test_modules_without_adapters_are_refused(tmp_path: Path) -> None:
    for config in (None, {"r": 2}, {"peft_type": 3}):
        with pytest.raises(mh.ManyhandsError, match=r"TwoBlocks is not wrapped by PEFT") as refused:
            mh.save_adapter(adapted("first"), tmp_path / "a", config=config)
        assert "peft_type" in (refused.value.hint or "")
    for module, count in ((language(), 12), (language().requires_grad_(False), 0)):
        with pytest.raises(mh.ManyhandsError, match=rf"Language trains {count} of 12 parameters"):
            mh.save_adapter(module, tmp_path / "a", config=CONFIG)
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(mh.ManyhandsError, match="is a file"):
        mh.save_adapter(adapted("first"), tmp_path / "file", config=CONFIG)


def test_a_digest_tells_weights_apart() -> None:
    def digest(*numbers: float, count: int = 3 * 4096, dtype: torch.dtype = torch.float32) -> str:
        tensor = torch.zeros(count, dtype=dtype)
        for place, number in enumerate(numbers):
            tensor[[0, count // 2, -1][place]] = number
        return sampled_digest({"a": tensor, "scalar": torch.tensor(1.0), "none": torch.empty(0)})

    assert digest() == digest()
    assert len({digest(), digest(1), digest(0, 1), digest(0, 0, 1), digest(count=9), digest(dtype=torch.bfloat16)}) == 6


@pytest.mark.slow
def test_a_checkpoint_without_the_frozen_weights_goes_on_only_from_the_same(tmp_path: Path) -> None:
    """Those of a mapped file stay in it; another file of the same shapes is not what the run was started with."""
    graphs: list[Graph] = []
    states: list[dict[str, torch.Tensor]] = []
    for number in (0, 1):
        module = adapted("second")
        with torch.no_grad():
            module.get_parameter("places.weight").add_(number)
        places = module.get_submodule("places")
        save_file(places.state_dict(), tmp_path / f"{number}.safetensors")
        mh.map_weights(places, tmp_path / f"{number}.safetensors")
        graphs.append(mh.capture(module, WORDS))
        states.append(full_state(module, graphs[-1], graphs[-1].state))
    assert "places.weight" not in states[0]
    assert "words.weight" in states[0]
    digest = left_out(graphs[0], states[0])
    loaded = Checkpoint(0, states[0], {}, {}, mh.Optimizer("SGD", lr=0.1), 0, {FROZEN: digest})
    assert torch.equal(resumed_state(graphs[0], loaded).weights["places.weight"], graphs[0].state["places.weight"])
    with pytest.raises(mh.ManyhandsError, match="frozen weights are not those"):
        resumed_state(graphs[1], loaded)
    assert left_out(graphs[0], graphs[0].state) == ""


# With PEFT itself


def test_peft_loads_adapters_of_ones_own(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module = adapted("first", "second").eval()
    mh.save_adapter(module, tmp_path, config=CONFIG)
    loaded = peft.PeftModel.from_pretrained(language(), tmp_path).eval()
    torch.testing.assert_close(loaded(WORDS), module(WORDS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["default", "other"])
def test_a_wrapped_module_is_written_by_peft(tmp_path: Path, name: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["reads"], modules_to_save=["makes"], init_lora_weights=False)
    module = peft.get_peft_model(language(), config, adapter_name=name).double().eval()
    with pytest.raises(mh.ManyhandsError, match="has its own"):
        mh.save_adapter(module, tmp_path / "a", config=CONFIG)
    mh.save_adapter(nn.Sequential(module), tmp_path / "a")  # also inside of another module
    folder = tmp_path / "a" if name == "default" else tmp_path / "a" / name  # as PEFT lays them out
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {key.rpartition("reads.")[2] for key in tensors if "reads" in key} == {"lora_A.weight", "lora_B.weight"}
    assert {key.rpartition("makes.")[2] for key in tensors if "makes" in key} == {"weight", "bias"}
    loaded = peft.PeftModel.from_pretrained(language(), folder).double().eval()
    torch.testing.assert_close(loaded(WORDS), module(WORDS), rtol=1e-12, atol=1e-12)
