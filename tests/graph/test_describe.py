"""What describe() says of a network: bytes saved for backward, layers, cuts, sums."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from graph_checks import BUILD, SMALL_INPUTS
from torch import Tensor, nn

from groups import by_name
from manyhands.facts.errors import BadValue
from manyhands.facts.network import Network
from manyhands.graph.capture import capture
from manyhands.graph.describe import _without_onednn, describe
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece, run_steps
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights
from manyhands.models import registry

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes")
NAMES = ("tiny", "resnet18", "mobilenetv3-large", "unet", "bert-small", "bilstm", "chair", "din")


@lru_cache
def captured(name: str) -> Graph:
    """In float32, as people train: oneDNN's kernels take that and not float64."""
    module = registry.build(name, **BUILD.get(name, {}))
    return capture(module, registry.example_batch(name, 2, input_shape=SMALL_INPUTS.get(name, (3, 64, 64))), name=name)


@lru_cache
def network(name: str, granularity: str) -> Network:
    return describe(captured(name), granularity)


def held_by_autograd(graph: Graph, batch: Any, samples: int) -> list[int]:
    """Per node, bytes that a real run newly holds for backward: each storage once, weights not counted."""
    weights = Weights.copied(graph)
    known = {tensor.untyped_storage().data_ptr(): tensor for tensor in weights.tensors.values()}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known[storage.data_ptr()] = tensor
            total += storage.nbytes()
        return tensor

    piece = Piece(graph, weights)
    steps, slots = piece.steps(training=True), piece.fresh_slots()
    given = bind_inputs(graph, batch)
    for place, name in enumerate(piece.inputs):
        slots[place] = given[name]
    held, keep = [], []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for step in steps:
            before = total
            run_steps([step], slots, samples, Context(samples=samples))
            keep.extend(slots[place] for place in step.outputs)
            held.append(total - before)
    return held


@pytest.mark.quick("2-tiny")
@pytest.mark.parametrize("name", by_name("described", NAMES, slow=("mobilenetv3-large",)))
@pytest.mark.parametrize("samples", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_saved_bytes_are_what_autograd_holds(name: str, samples: int) -> None:
    graph = captured(name)
    batch = registry.example_batch(name, samples, input_shape=SMALL_INPUTS.get(name, (3, 64, 64)))
    held = held_by_autograd(graph, batch, samples)
    said_in_all = [op.saved_fixed_bytes + samples * op.saved_bytes for op in network(name, "operators").ops]
    if name == "bilstm":  # oneDNN's recurrent kernels hold a workspace that only measuring tells (saved_bytes)
        workspace = sum(held) - sum(said_in_all)
        assert workspace >= 0
        with _without_onednn():
            held = held_by_autograd(graph, batch, samples)
    for op, real in zip(network(name, "operators").ops, held, strict=True):
        said = op.saved_fixed_bytes + samples * op.saved_bytes
        assert said == real, f"{op.name} ({op.target}, {op.where}): said {said}, held {real}"
    layers = network(name, "blocks").layers
    assert sum(layer.saved_fixed_bytes + samples * layer.saved_bytes for layer in layers) == sum(held)


@pytest.mark.quick("tiny-blocks")
@pytest.mark.parametrize("granularity", ["blocks", "operators"])
@pytest.mark.parametrize("name", by_name("described", NAMES, slow=("mobilenetv3-large",)))
def test_every_cut_carries_one_row_per_sample(name: str, granularity: str) -> None:
    net = network(name, granularity)
    for index in range(len(net.layers) + 1):
        for spec in net.cut(index):
            assert spec.rows_per_sample <= 1, (index, spec)
    assert net.cut(0) == ()
    assert {spec.name for spec in net.cut(len(net.layers))} >= set(net.outputs)


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("name", by_name("described", NAMES, slow=("mobilenetv3-large",)))
def test_layers_tile_the_operators_and_sums_add_up(name: str) -> None:
    blocks, operators = network(name, "blocks"), network(name, "operators")
    assert len(blocks.layers) <= len(operators.layers)
    assert {layer.first for layer in blocks.layers} <= {layer.first for layer in operators.layers}
    for net in (blocks, operators):
        bounds = [layer.first for layer in net.layers] + [net.layers[-1].last]
        assert bounds[0] == 0
        assert bounds[-1] == len(net.ops)
        assert all(layer.first < layer.last for layer in net.layers)
        assert [layer.last for layer in net.layers] == bounds[1:]
        assert len({layer.name for layer in net.layers}) == len(net.layers)
        assert sum(layer.macs for layer in net.layers) == sum(op.macs for op in net.ops) == net.macs
        assert sum(layer.saved_bytes for layer in net.layers) == sum(op.saved_bytes for op in net.ops)
        read = {name for layer in net.layers for name in layer.weights}
        assert sum(weight.bytes for n, weight in net.weights.items() if n in read and not weight.buffer) <= sum(
            layer.parameter_bytes for layer in net.layers
        )
    assert blocks.macs == operators.macs
    assert blocks.fingerprint == operators.fingerprint


@pytest.mark.quick("tiny")
@pytest.mark.parametrize("name", ["tiny", "resnet18", "chair", "din"])
def test_macs_and_parameters_are_the_registry_s(name: str) -> None:
    module, entry = registry.build(name), registry.ZOO[name]
    graph = capture(module, registry.example_batch(name, 2, input_shape=entry.input_shape))
    assert describe(graph).parameter_count == entry.parameters
    assert describe(graph).macs == entry.macs


@pytest.mark.slow
def test_a_cut_under_a_skip_connection_carries_both_tensors() -> None:
    resnet, unet = network("resnet18", "operators"), network("unet", "blocks")
    assert max(len(resnet.cut(index)) for index in range(len(resnet.layers))) >= 2
    widest = max(len(unet.cut(index)) for index in range(len(unet.layers)))
    assert widest >= 4, "at the bottom of the U every level's features cross"
    blocks = network("resnet18", "blocks")
    for index in range(1, len(blocks.layers)):
        assert len(blocks.cut(index)) == 1, "a residual block is one layer"
        assert blocks.cut_bytes(index, 3) == 3 * blocks.cut(index)[0].bytes_per_sample


def test_what_leaves_a_layer_is_what_later_layers_read() -> None:
    net = network("unet", "operators")
    for index, layer in enumerate(net.layers):
        later = {name for other in net.layers[index + 1 :] for name in other.inputs} | set(net.outputs)
        assert set(layer.outputs) == {n for op in net.ops[layer.first : layer.last] for n in op.outputs if n in later}


@pytest.mark.slow
def test_batch_statistics_are_told_from_mixing() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.frozen, self.head = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.frozen(self.head(self.norm(x)))
            return x - x.mean(0, keepdim=True) + x.softmax(1) + torch.cat((x, x), 1)[:, :4] + x.sum()

    module = Mixes()
    module.frozen.eval()
    net = describe(capture(module, torch.randn(3, 4)))
    assert [op.statistics for op in net.ops if "batch_norm" in op.target] == [4, 0]
    mixing = [op.target for op in net.ops if op.mixes_samples]
    assert mixing == ["aten.mean.dim", "aten.sum.default"]


def test_differentiable_tensors_depend_on_trainable_weights() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.free = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.frozen(x)
            z = self.free(y)
            return z, z.detach() + 1, z.argmax(1)

    graph = capture(Half(), torch.randn(2, 3))
    net = describe(graph)
    flags = [net.tensors[name].differentiable for name in net.outputs]
    assert flags == [True, False, False]
    assert not any(spec.differentiable for spec in net.cut(1) if "linear_1" not in spec.name and spec.name == "linear")


def test_fingerprints_tell_shapes_apart_and_not_weights() -> None:
    def made(size: int) -> Graph:
        return capture(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), torch.randn(2, 1, size, size))

    assert describe(made(8)).fingerprint == describe(made(8)).fingerprint
    assert describe(made(8)).fingerprint != describe(made(9)).fingerprint


def test_unknown_granularity() -> None:
    with pytest.raises(BadValue, match="atoms"):
        describe(captured("tiny"), "atoms")


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("equation", "shape", "macs"),
    [
        ("bij,jk->bik", (5, 4), 6 * 5 * 4),
        ("...ij,jk->...ik", (5, 4), 6 * 5 * 4),
        ("b...j,jk->b...k", (5, 4), 6 * 5 * 4),
    ],
)
def test_einsum_counts_every_index_once(equation: str, shape: tuple[int, ...], macs: int) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(equation, x, self.weight)

    assert capture(Product(), torch.randn(2, 6, 5)).network.macs == macs


class Transposed(nn.Module):
    """Products with weights that are transposed first, and one that is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Parameter(torch.randn(6, 6))
        self.inner = nn.ParameterList(torch.randn(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.ends.T)
        for weight in self.inner:
            x = torch.tanh(x @ weight.T)
        return x @ self.ends


def test_a_product_with_a_transposed_weight_is_work() -> None:
    network = describe(capture(Transposed(), torch.randn(3, 6)))
    assert [layer.macs for layer in network.layers] == [36] * 4
    assert network.layers[0].weights == network.layers[3].weights == ("ends",)
