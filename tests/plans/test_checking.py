"""The check of a network: what it says is what plans and their simulation do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.facts.errors import BadPlan, CaptureFailed
from manyhands.facts.network import Network
from manyhands.files.documents import write_document
from manyhands.graph.capture import capture
from manyhands.plans.checking import WAYS, check_model, check_network, refused
from manyhands.plans.local_cluster import threads_each
from manyhands.plans.networks import load_network
from manyhands.profiler.this_machine import identify, machine_path


class Mixing(nn.Module):
    """Centred over the batch, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = self.second(x - x.mean(0, keepdim=True))  # the line that is named
        out: Tensor = self.third(torch.relu(x))
        return out


class Deciding(nn.Module):
    """Control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        out: Tensor = self.linear(x)
        return out


def image_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)


def words() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "image": (image_network, (3, 16, 16)), "mixing": (Mixing, (6,)), "attention": (attention, (5, 16)),
    "words": (words, (5, 16)), "one layer": (lambda: nn.Linear(4, 2), (4,)),
}  # fmt: skip


def network_of(case: str) -> Network:
    make, shape = CASES[case]
    return capture(make(), torch.randn(4, *shape), name=case).network


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("case", CASES)
def test_a_way_applies_where_there_is_a_plan(case: str) -> None:
    network = network_of(case)
    result = check_network(network)
    assert [entry.by for entry in result.sharing] == list(WAYS)
    for way in ("single", "samples", "tiles"):
        refusal = ""
        try:
            mh.plan(network, mh.Cluster.local(2), batch_size=8, strategy=way)
        except BadPlan as error:
            refusal = error.message
        entry = result.sharing_by(way)
        assert entry.applies == (not refusal), refusal
        assert entry.applies == (entry.extent != "")
        assert entry.applies or entry.reason


def test_what_is_in_the_way_of_samples() -> None:
    result = check_network(network_of("mixing"))
    samples = result.sharing_by("samples")
    assert not samples.applies
    assert samples.obstacle is not None
    assert samples.obstacle.where.startswith("test_checking.py:")
    assert "x.mean(0" in _line(samples.obstacle.where)
    assert samples.obstacle.target in samples.reason
    pipeline = result.sharing_by("pipeline")
    assert pipeline.applies
    assert "one micro-batch at a time" in pipeline.reason


def _line(where: str) -> str:
    with open(__file__) as file:
        return file.read().splitlines()[int(where.rpartition(":")[2]) - 1]


def test_what_is_in_the_way_of_tiles_and_channels() -> None:
    image, text = check_network(network_of("image")), check_network(network_of("words"))
    tiles = image.sharing_by("tiles")
    assert tiles.applies
    assert image.sharing_by("channels").applies
    assert "for inference only" in image.sharing_by("channels").reason
    for entry in (text.sharing_by("tiles"), text.sharing_by("channels")):
        assert not entry.applies
        assert entry.layers == 0
        assert entry.obstacle is not None
        assert entry.obstacle.target in entry.reason
        assert entry.obstacle.layer in [layer.name for layer in network_of("words").layers]


def test_one_layer_is_no_pipeline() -> None:
    entry = check_network(network_of("one layer")).sharing_by("pipeline")
    assert (entry.applies, entry.reason) == (False, "it has one layer only, and a layer is not divided")


def test_sizes_and_memory_are_those_of_the_plan() -> None:
    network = load_network("tiny")
    result = check_network(network)
    assert (result.parameters, result.macs) == (40_506, network.macs)
    assert result.weight_bytes == sum(weight.bytes for weight in network.weights.values())
    assert result.saved_bytes == sum(op.saved_bytes for op in network.ops)
    for needs in result.training:
        cluster = mh.Cluster.local(1)
        plan = mh.plan(network, cluster, batch_size=needs.batch_size, strategy="single").plan
        device = mh.simulate(plan, network, cluster).devices["local-1"]
        assert needs.peak_bytes == pytest.approx(device.peak_bytes)
    assert [needs.batch_size for needs in result.training] == [1, 32]


def test_a_batch_that_cannot_be_trained() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    result = check_network(capture(module, torch.randn(4, 4)).network)
    assert result.training[0].peak_bytes is None
    assert "one value per channel" in result.training[0].reason
    assert result.training[1].peak_bytes is not None


def test_times_are_unknown_until_something_is_measured() -> None:
    network = network_of("image")
    machine = identify(threads_each(1))
    path = machine_path(machine)
    kept = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    try:
        before = check_network(network)
        assert before.times_source == ""
        assert "manyhands profile --model image" in before.times_note
        assert not path.exists()
        assert {needs.step_seconds for needs in before.training} == {None}
        write_document(path, {"machine": machine.text, "cluster": mh.Cluster.local(1).to_dict()})
        after = check_network(network)
        assert after.times_source == "estimated"
        assert after.times_note.startswith("Times: estimated")
        first, last = after.training
        assert first.forward_seconds is not None
        assert first.step_seconds is not None
        assert last.step_seconds is not None
        assert 0 < first.forward_seconds < first.step_seconds < last.step_seconds
    finally:
        path.unlink(missing_ok=True)
        if kept is not None:
            path.write_bytes(kept)


def test_a_network_that_is_not_captured() -> None:
    with pytest.raises(CaptureFailed) as failed:
        capture(Deciding(), torch.randn(2, 4))
    result = refused("mine", failed.value)
    assert not result.is_captured
    assert result.exit_code == CaptureFailed.exit_code
    assert "if x.sum() > 0:" in result.refusal
    assert asdict(result)["sharing"] == ()


@pytest.mark.slow
def test_by_name() -> None:
    result = check_model("tiny", (1, 24, 24))
    assert result.is_captured
    assert result.input == "1x24x24"
