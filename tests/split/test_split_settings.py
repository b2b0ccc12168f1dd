"""Settings of a split: generators whose pictures stay at the edge, transfer learning, the paper's networks by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from manyhands.data.sets import load
from manyhands.facts.errors import BadFile, BadValue, UnknownName
from manyhands.graph.capture import capture
from manyhands.job.base import Job
from manyhands.job.evaluation import captured
from manyhands.planner.split_profile import candidate_cuts
from manyhands.session import measuring
from manyhands.split import training as splitting
from manyhands.split.config import SplitConfig
from manyhands.split.job import SplitResult
from manyhands.split.named import split_by_name
from manyhands.split.session import Two, open_two
from manyhands.split.training import split_train
from manyhands.split.transfer import begin_with, frozen
from real_runs import BATCH, SGD, Pictures, assert_close, network
from split_bytes import bytes_of_step

STEPS = 12


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "write_pictures", lambda *_: None)
        patch.setattr(measuring, "MEASURE_SECONDS", 0.1)
        with open_two() as found:
            yield found


def split(two: Two, folder: Path, model: nn.Module, data: Dataset[Any], **options: Any) -> SplitResult:
    given = {
        "loss": functional.cross_entropy, "optimizer": SGD, "batch_size": BATCH, "seed": 5, "steps": STEPS, "bits": 32,
        "k": 0, **options,
    }  # fmt: skip
    return split_train(model, data, cloud=two, folder=folder, **given)


class Drawings(Dataset[tuple[Tensor, Tensor]]):
    """A description, and the picture that is to come of it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randn(4 * BATCH, 5, generator=generator, dtype=torch.float64)
        self.pictures = torch.randn(4 * BATCH, 1, 8, 8, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index], self.pictures[index]


def generator() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU()),
        nn.Sequential(nn.Unflatten(1, (4, 2, 2)), nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.ConvTranspose2d(4, 1, 4, 2, 1)),
    ).double()


@pytest.mark.slow
def test_what_a_generator_makes_stays_at_the_edge(two: Two, tmp_path: Path) -> None:
    """Exact at K=0. Pictures, drawn and true, are at the edge only; the server, upstream, replays and logs how late."""
    data, models = Drawings(), {}
    found = {}
    for k, cut in ((0, 1), (0, "edge"), (3, 1)):
        models[k, cut] = generator()
        found[k, cut] = split(
            two, tmp_path / f"{k}-{cut}", models[k, cut], data, loss=functional.mse_loss, edge_side="downstream", k=k,
            cut=cut,
        )  # fmt: skip
    assert_close(models[0, 1].state_dict(), models[0, "edge"].state_dict())
    for result in (found[0, 1], found[3, 1]):
        assert [stage.devices for stage in result.plan.stages] == [(two.server,), (two.edge,)]
        received = {name: log.received_bytes["coordinator"] for name, log in result.logs.items()}
        assert received == {two.server: STEPS * BATCH * 5 * 8, two.edge: STEPS * BATCH * 64 * 8}
        step = bytes_of_step(result.plan, capture(generator(), torch.zeros(4, 5, dtype=torch.float64)).network)
        assert result.bytes_between == {pair: STEPS * size for pair, size in step.items()}
        assert step[(two.edge, two.server)] == step[(two.server, two.edge)] == BATCH * 16 * 8, "features, gradients"
    assert found[0, 1].staleness == [0] * STEPS
    assert 0 < max(found[3, 1].staleness) <= 3
    assert two.server not in found[0, "edge"].logs
    assert found[0, "edge"].plan.devices == (two.edge,)


@pytest.mark.slow
def test_nothing_comes_back_to_frozen_layers(two: Two, tmp_path: Path) -> None:
    """Features run ahead, the frozen part stays as it was, and the rest is what one device makes of it."""
    before = network().state_dict()
    models = [network(), network()]
    found = [
        split(two, tmp_path / str(cut), model, Pictures(), freeze=1, cut=cut, k=5)
        for cut, model in zip((1, "edge"), models)
    ]
    assert_close(models[0].state_dict(), models[1].state_dict())
    after = models[0].state_dict()
    own = [name for name, _ in network()[0].named_parameters(prefix="0")]
    assert all(torch.equal(after[name], before[name]) for name in own)
    assert not torch.equal(after["2.2.weight"], before["2.2.weight"])
    assert found[0].bytes_down == 0
    assert found[0].bytes_up == STEPS * BATCH * 4 * 64 * 8
    assert all(one.requires_grad for one in models[0].parameters()), "afterwards it is as it was"


@pytest.mark.slow
def test_a_run_begins_where_another_ended(two: Two, tmp_path: Path) -> None:
    first, second, third = network(), network(seed=8), network(seed=9)
    trained = split(two, tmp_path / "first", first, Pictures(), cut=1, steps=4)
    said: list[str] = []
    split(two, tmp_path / "second", second, Pictures(), cut=1, steps=1, weights=tmp_path / "first", say=said.append)
    save_file({name: one.contiguous() for name, one in first.state_dict().items()}, tmp_path / "one.safetensors")
    split(two, tmp_path / "third", third, Pictures(), cut=1, steps=1, weights=tmp_path / "one.safetensors")
    assert_close(second.state_dict(), third.state_dict())
    assert any("15 of 15 weights" in text or "weights are those of" in text for text in said)
    other = network(seed=10)
    other[2][2] = nn.Linear(64, 7).double()
    assert begin_with(other, trained.checkpoint) == ["2.2.weight", "2.2.bias"]
    assert torch.equal(other[0][0].weight, first[0][0].weight)


def test_what_cannot_be_begun_with_or_frozen(tmp_path: Path) -> None:
    save_file({"strange": torch.zeros(3)}, tmp_path / "strange.safetensors")
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x02.")
    for path, error, words in (
        ("strange.safetensors", BadValue, "none of its 1 weights"),
        ("pickle.pt", BadFile, "cannot be read as .safetensors"),
        ("nothing", BadFile, "no such file"),
        (".", BadFile, "no complete checkpoint"),
    ):
        with pytest.raises(error, match=words):
            begin_with(network(), tmp_path / path)
    for freeze, kind, words in ((9, BadValue, "nothing would be left"), ("where", UnknownName, "freeze up to")):
        with (
            pytest.raises(kind, match=words),
            frozen(network(), Pictures(), freeze, granularity="blocks", name=""),
        ):
            pass


def test_half_of_the_classes_by_name() -> None:
    """To learn first, and to transfer to: each has its own classes, numbered from 0."""
    halves = [load(f"digits:{classes}") for classes in ("0-4", "5-9")]
    whole = load("digits")
    assert sum(len(half.train) for half in halves) == len(whole.train)  # type: ignore[arg-type]
    for half, names in zip(halves, (whole.classes[:5], whole.classes[5:])):
        assert (half.num_classes, half.classes) == (5, names)
        assert {int(half.train[index][1]) for index in range(60)} == set(range(5))
    with pytest.raises(BadValue, match="names no classes"):
        load("digits:4-2")


NETWORKS = {
    "resnet50": "synthetic-cifar10", "vgg19": "synthetic-cifar10", "mobilenetv3-large": "synthetic-cifar10",
    "bilstm": "synthetic-imdb", "chair": "synthetic-3dchair", "din": "synthetic-movielens",
}  # fmt: skip


LEAST_CUTS = {"resnet50": 16, "vgg19": 16, "mobilenetv3-large": 16, "bilstm": 2, "chair": 7, "din": 2}
"""About as many as the paper's Table 3 lists."""


@pytest.mark.slow
@pytest.mark.parametrize("model", NETWORKS)
def test_the_papers_networks_by_name(model: str, two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SplitConfig(
        model=model, data=NETWORKS[model], steps=2, batch_size=4, k="1", folder=tmp_path / "run",
        input="3x32x32" if NETWORKS[model] == "synthetic-cifar10" else "",
        edge_side="downstream" if model == "chair" else "upstream",
    )  # fmt: skip
    cuts: dict[int, str] = {}

    def in_the_middle(config: SplitConfig, module: nn.Module, data: Dataset[Any], *rest: Any) -> SplitResult:
        layers = captured(module, data, None, granularity="blocks", name="").network
        cuts.update({cut: layers.layers[cut].name for cut in candidate_cuts(layers)})
        middle = sorted(cuts)[len(cuts) // 2]
        return split_with(replace(config, cloud=two, test=None, cut=middle), module, data, *rest)

    split_with = splitting.split_with
    monkeypatch.setattr(splitting, "split_with", in_the_middle)
    result = split_by_name(config)
    assert len(result.losses) == 2
    assert len(result.plan.stages) == 2
    assert min(result.bytes_up, result.bytes_down) > 0
    assert result.split is not None
    assert {cut.layer for cut in result.split.cuts} == {*cuts, result.split.edge_only}
    assert len(cuts) >= LEAST_CUTS[model]
    print(f"{model}: {len(cuts)} cuts, {json.dumps(list(cuts.values()))}")


def test_cuts_of_a_network() -> None:
    found = capture(network(), torch.zeros(4, 1, 8, 8, dtype=torch.float64)).network
    assert candidate_cuts(found) == (1, 2)
