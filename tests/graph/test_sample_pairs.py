"""Tensors with two axes of samples, such as the similarities of every picture to every text: captured, exact at any
number of samples, computed where all samples are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from graph_checks import assert_same, by_module, by_pieces
from torch import Tensor, nn

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadGraph, BadPlan, BadValue, CaptureFailed, ManyhandsError
from manyhands.facts.network import TensorSpec
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.batching import refuse_pairs
from manyhands.graph.capture import capture
from manyhands.graph.check import check_graph
from manyhands.graph.document import to_document
from manyhands.graph.document_reader import read_document
from manyhands.graph.graph import Graph
from manyhands.graph.store import load, save
from manyhands.plans.planning import plan as make_plan


class TwoTowers(nn.Module):
    """As CLIP does, with its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        self.picture = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.double()

    def forward(self, text: Tensor, picture: Tensor) -> dict[str, Tensor]:
        texts = F.normalize(self.text(text), dim=-1)
        pictures = F.normalize(self.picture(picture), dim=-1)
        per_text = texts @ pictures.t() * self.scale.exp()
        return {"per_picture": per_text.t(), "per_text": per_text, "texts": texts}


def softmax_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    places = torch.arange(target.shape[0])
    return (F.cross_entropy(output["per_text"], places) + F.cross_entropy(output["per_picture"], places)) / 2


def sigmoid_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """As SigLIP's."""
    logits = output["per_text"]
    eye = torch.eye(logits.shape[0], dtype=logits.dtype)
    return -F.logsigmoid((2 * eye - torch.ones_like(logits)) * logits).sum(-1).mean()


def supervised(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The labels of every two samples are compared."""
    alike = (target[:, None] == target[None, :]).to(output["texts"].dtype)
    scores = (output["texts"] @ output["texts"].t()).log_softmax(1)
    return -(alike * scores).sum() / alike.sum()


class Squared(TwoTowers):
    """Samples meet in the middle of the network, and part again; a view of the pairs is written to."""

    def forward(self, text: Tensor, picture: Tensor) -> dict[str, Tensor]:
        texts = self.text(text)
        apart = texts[:, None, :] - texts[None, :, :]
        apart[:, :, 0] = 0.5
        nearest = apart.square().sum(-1)
        nearest = nearest.masked_fill(torch.eye(text.shape[0], dtype=torch.bool), 100.0)
        return {"texts": nearest.softmax(1) @ self.picture(picture)}


LOSSES: dict[str, Callable[[dict[str, Tensor], Tensor], Tensor]] = {
    "softmax": softmax_loss, "sigmoid": sigmoid_loss, "supervised": supervised,
}  # fmt: skip


def batch(samples: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(samples)
    text, picture = (torch.randn(samples, size, generator=draw, dtype=torch.float64) for size in (5, 6))
    return (text, picture), torch.randint(0, 3, (samples,), generator=draw)


def captured(loss: str = "softmax", make: type[TwoTowers] = TwoTowers) -> tuple[TwoTowers, Graph]:
    module, (inputs, target) = make(), batch(4)
    return module, capture(module, inputs, loss=LOSSES[loss], target=target, verify=True)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", LOSSES)
def test_a_contrastive_loss_is_exact_at_any_number_of_samples(name: str, tmp_path: Path) -> None:
    module, graph = captured(name)
    assert graph.loss_combination == "whole"
    save(graph, tmp_path / "stored")
    for known in (graph, load(tmp_path / "stored")):
        for samples in (1, 2, 4, 7):
            inputs, target = batch(samples)
            wanted = by_module(module, known, inputs, target, LOSSES[name])
            for cuts in ((), (3, 5)):
                assert_same(by_pieces(known, cuts, inputs, target), wanted)


@pytest.mark.slow
def test_samples_that_meet_inside_the_network() -> None:
    module, (inputs, target) = Squared(), batch(4)
    loss = lambda output, target: F.cross_entropy(output["texts"], target)  # noqa: E731
    graph = capture(module, inputs, loss=loss, target=target, verify=True)
    assert graph.loss_combination == "mean"
    inputs, target = batch(5)
    assert_same(by_pieces(graph, (2, 4), inputs, target), by_module(module, graph, inputs, target, loss))
    refuse_pairs(graph)  # what it returns is each sample's own
    with pytest.raises(ManyhandsError, match="mixes samples"):
        make_plan(graph.network, Cluster.local(2), batch_size=4, strategy="samples")


def test_no_share_of_the_samples_and_no_cut_carries_pairs() -> None:
    _, graph = captured()
    network = graph.network
    pairs = {name for name, spec in network.tensors.items() if spec.pairs_samples}
    assert pairs
    touching = [op for op in network.ops if pairs & {*op.inputs, *op.outputs}]
    assert touching
    assert all(op.mixes_samples for op in touching)
    assert len(network.layers) > 2
    for layer in range(len(network.layers)):
        assert not pairs & {spec.name for spec in network.cut(layer)}
    everything = Stage((0, len(network.layers)), ("a", "b"), BySamples((2, 2)))
    with pytest.raises(BadPlan, match=r"mixes samples[\s\S]*one device"):
        resolve(Plan(network.name, 4, (everything,)), network)
    cluster = Cluster.local(2)
    piped = make_plan(network, cluster, batch_size=4, strategy="pipeline").plan
    assert len(piped.stages) == 2
    assert piped.micro_batches == 1
    assert sum(spec.bytes_for(5) for spec in graph.network.tensors.values() if spec.name in pairs) == sum(
        25 * spec.bytes_per_sample for spec in graph.network.tensors.values() if spec.name in pairs
    )


def test_answers_to_single_samples_are_refused() -> None:
    _, graph = captured()
    with pytest.raises(BadValue, match=r"every two samples \(.*batch x batch\)[\s\S]*test_sample_pairs.py:\d+"):
        refuse_pairs(graph)


@pytest.mark.slow
def test_random_numbers_for_pairs_and_three_axes_are_refused_by_their_line() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x @ x.t(), 0.5)

    class Triples(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x[:, None, None] * x[None, :, None] * x[None, None]).sum(-1)

    for module, text in ((Dropped(), "draws for every two samples"), (Triples(), "3 axes that grow")):
        with pytest.raises(CaptureFailed, match=rf"{text}[\s\S]*test_sample_pairs.py:\d+"):
            capture(module, torch.randn(4, 3))


# From outside


def _changed(graph: Graph, change: Callable[[dict[str, Any]], None]) -> Any:
    document = msgspec.json.decode(msgspec.json.encode(to_document(graph)))
    change(document)
    return document


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("axis", [0, 2, -1, 10**9, "1", 1.5, True])
def test_an_absurd_second_axis_is_refused(axis: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        for node in document["nodes"]:
            for spec in node["outputs"]:
                if spec["second_batch_axis"] is not None:
                    spec["second_batch_axis"] = axis

    with pytest.raises(BadGraph):
        check_graph(read_document(_changed(captured()[1], change)))


def test_a_second_axis_that_is_not_there_is_refused() -> None:
    """Of an input, of a target, of an output that has one axis, and left out where there are two."""

    def of_input(document: dict[str, Any]) -> None:
        document["inputs"][0]["second_batch_axis"] = 1

    def of_target(document: dict[str, Any]) -> None:
        target = document["loss"]["inputs"][-1]
        target |= {"shape": [1, 1], "second_batch_axis": 1}

    def of_output(document: dict[str, Any]) -> None:
        document["nodes"][0]["outputs"][0]["second_batch_axis"] = 1

    def left_out(document: dict[str, Any]) -> None:
        for node in document["nodes"]:
            for spec in node["outputs"]:
                spec["second_batch_axis"] = None

    graph = captured()[1]
    check_graph(read_document(_changed(graph, lambda document: None)))
    for change in (of_input, of_target, of_output, left_out):
        with pytest.raises(BadGraph):
            check_graph(read_document(_changed(graph, change)))


def test_sizes() -> None:
    spec = TensorSpec("x", (1, 3, 2), "float32", 0, second_batch_axis=2)
    assert spec.shape_for(4) == (4, 3, 8)
    assert spec.bytes_for(4) == 4 * 3 * 8 * 4
    assert spec.shape_text == "batch x 3 x 2 batch"
