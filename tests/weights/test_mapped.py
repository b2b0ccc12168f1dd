"""Weights that stay in their files: built without memory, mapped, refused by name where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import manyhands as mh
from manyhands.facts.errors import CaptureFailed
from manyhands.graph import verify
from manyhands.graph.weights import Weights
from manyhands.weights.mapped import give_back_pages, is_mapped, refuse_without_values, stored_tensors


class Network(nn.Module):
    """A network with all that a file may not hold: a computed buffer, tied weights, parameters that begin as ones."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(width))
        self.output = nn.Linear(width, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("places", 1.0 / (2.0 ** torch.arange(0, width)), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale + self.places
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.output(x)


@pytest.fixture
def real() -> Network:
    torch.manual_seed(1)
    return Network()


@pytest.fixture
def file(real: Network, tmp_path: Path) -> Path:
    state = {name: tensor for name, tensor in real.state_dict().items() if name != "output.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def mapped(path: Path) -> Network:
    with mh.without_weights():
        module = Network()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not module.places.is_meta
    mh.map_weights(module, path)
    return module


TOKENS = torch.arange(10).view(2, 5)


def test_a_module_is_built_without_memory_and_computes_from_its_file(real: Network, file: Path) -> None:
    module = mapped(file)
    assert all(is_mapped(parameter) for parameter in module.parameters())
    assert module.output.weight is module.embedding.weight
    assert torch.equal(module(TOKENS), real(TOKENS))
    give_back_pages(0)
    assert torch.equal(module(TOKENS), real(TOKENS))


def test_what_is_written_stays_when_pages_are_given_back_and_never_reaches_the_file(file: Path) -> None:
    before, module = file.read_bytes(), mapped(file)
    with torch.no_grad():
        module.scale.mul_(2)
    give_back_pages(0)
    assert torch.equal(module.scale, torch.full((8,), 2.0))
    assert file.read_bytes() == before


def test_a_file_written_in_parts_is_read_by_its_index(real: Network, tmp_path: Path) -> None:
    names = [name for name in real.state_dict() if name != "output.weight"]
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for part, held in parts.items():
        save_file({name: real.state_dict()[name] for name in held}, tmp_path / part)
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(stored_tensors(tmp_path)) == set(names)
    assert torch.equal(mapped(tmp_path)(TOKENS), real(TOKENS))


def test_missing_tensors_are_refused_by_name(real: Network, tmp_path: Path) -> None:
    save_file({"embedding.weight": real.embedding.weight.detach()}, tmp_path / "w.safetensors")
    with pytest.raises(mh.ManyhandsError, match=r"layers\.0\.weight.*and 2 more"):
        mapped(tmp_path / "w.safetensors")


def test_computed_buffers_on_the_meta_device_are_refused_with_what_to_do(file: Path) -> None:
    with torch.device("meta"):
        module = Network()
    with pytest.raises(mh.ManyhandsError, match="places") as refused:
        mh.map_weights(module, file)
    assert "mh.without_weights()" in (refused.value.hint or "")


@pytest.mark.parametrize("change", [{"width": 4}, {}])
def test_another_shape_or_type_is_refused(file: Path, change: dict[str, int]) -> None:
    module = Network(**change) if change else Network().double()
    with pytest.raises(mh.ManyhandsError, match="'scale' is float32"):
        mh.map_weights(module, file)


SHORT = b"\x48" + bytes(7) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(72)
"""A header of a tensor that the file is too short for."""


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x10" + bytes(7) + b'{"a": 5}        ', SHORT])
def test_files_that_are_something_else_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(mh.ManyhandsError, match=r"w\.safetensors"):
        stored_tensors(tmp_path)


@pytest.mark.slow
def test_a_module_on_the_meta_device_is_captured_alike_and_has_no_values(real: Network, file: Path) -> None:
    with mh.without_weights():
        empty = Network()
    graphs = [mh.capture(module, TOKENS, loss=F.mse_loss, target=torch.zeros(2, 5, 11)) for module in (real, empty)]
    assert graphs[0].nodes == graphs[1].nodes
    assert graphs[0].weights == graphs[1].weights
    assert empty.embedding.weight.is_meta
    with pytest.raises(mh.ManyhandsError, match=r"embedding\.weight"):
        refuse_without_values(graphs[1].state)
    refuse_without_values(mh.capture(mapped(file), TOKENS).state)


def test_trained_weights_are_put_back_without_touching_the_others(real: Network, file: Path) -> None:
    module = mapped(file)
    graph = mh.capture(module, TOKENS)
    trained = Weights({**graph.state, "scale": torch.full((8,), 3.0)})
    trained.load_into(module, graph)
    assert torch.equal(module.scale, torch.full((8,), 3.0))
    assert torch.equal(module.embedding.weight, real.embedding.weight)


@pytest.mark.slow
def test_a_part_of_mapped_weights_trains_as_from_memory_and_the_rest_stays_in_its_file(
    real: Network, file: Path, tmp_path: Path
) -> None:
    data = torch.utils.data.TensorDataset(torch.randint(11, (8, 5)), torch.randn(8, 5, 11))
    losses, results = [], []
    for place, module in enumerate((real, mapped(file))):
        for parameter in module.layers.parameters():
            parameter.requires_grad_(False)
        result = mh.train(
            module, data, loss=F.mse_loss, optimizer=mh.Optimizer("Adam", lr=0.1), batch_size=4, steps=3,
            cluster=mh.Cluster.local(1), folder=tmp_path / str(place), verify=True,
        )  # fmt: skip
        losses.append(result.losses)
        results.append(result)
    assert losses[0] == losses[1]
    stored = [set(stored_tensors(result.checkpoint / "model.safetensors")) for result in results]
    assert {"layers.0.weight"} < stored[0]
    assert not any(name.startswith("layers.") for name in stored[1])
    assert {"embedding.weight", "scale"} <= stored[1]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("factor", "is_refused"), [(1 + 1e-5, False), (1.01, True)])
def test_the_self_check_reads_mapped_weights_in_their_own_type(
    file: Path, factor: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 it would need memory for all of them."""
    module = mapped(file)
    module.layers[1].weight.register_hook(lambda gradient: gradient * factor)
    loss = torch.nn.functional.mse_loss
    target = torch.randn(2, 5, module.output.out_features)
    graph = mh.capture(module, TOKENS, loss=loss, target=target)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the weights were copied")

    monkeypatch.setattr(verify, "cast_to_double", cast)
    if is_refused:
        with pytest.raises(CaptureFailed, match="does not train as the module does"):
            verify.verify(graph, module, loss, TOKENS, target)
    else:
        assert verify.verify(graph, module, loss, TOKENS, target).difference == pytest.approx(1e-5, rel=0.1)
