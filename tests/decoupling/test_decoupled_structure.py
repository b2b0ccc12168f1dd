"""What decoupling makes of networks: sizes as published, widths, shuffles, what stays dense, and refusals by name."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoupled_networks import NETWORKS, SHAPE, network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import manyhands as mh
from manyhands.decoupling.decouple import Decoupled, decouple
from manyhands.decoupling.layers import GroupShuffle
from manyhands.facts.errors import BadValue, CaptureFailed, UnknownName
from manyhands.models import registry

# Table 2 of the paper, 4 groups and 3 shuffles: megabytes of weights and thousand million multiply-accumulates.
PUBLISHED = {
    ("resnet50", 1.5): (102.01, 4.091, 65.06, 2.343),
    ("resnet50", 1.75): (102.01, 4.091, 86.20, 3.252),
    ("resnet34", 1.5): (87.12, 3.67, 50.96, 2.17),
    ("resnet34", 1.75): (87.12, 3.67, 68.75, 2.92),
    ("vgg16", 1.75): (553.34, 15.353, 536.48, 11.470),
}
CNNS = ["resnet18", "resnet50", "mobilenetv3-large", "vgg16", "unet", "tiny", "yolov2-16", "yolov2"]
LIKE_THOSE = ["resnet34", "mobilenetv2", "efficientnet-b1", "vgg19"]
QUICK = ["tiny", "unet"]
SMALL = {"unet": {"width": 8}}


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@cache
def decoupled(name: str, shuffles: Any = 3, widen: float = 1.5) -> Decoupled:
    """A network of the zoo, without memory for its weights."""
    with torch.device("meta"):
        return decouple(registry.build(name), 4, shuffles, widen, inputs=registry.ZOO[name].input_shape)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(("name", "widen"), PUBLISHED)
def test_sizes_are_the_papers(name: str, widen: float) -> None:
    report = decoupled(name, 3, widen).report
    ours = (
        report.before.weight_bytes / 1e6, report.before.macs / 1e9, report.after.weight_bytes / 1e6,
        report.after.macs / 1e9,
    )  # fmt: skip
    assert ours == pytest.approx(PUBLISHED[name, widen], rel=0.05)
    entry = registry.ZOO[name]
    assert (report.before.parameters, report.before.macs) == (entry.parameters, entry.macs)


def test_vgg_keeps_the_outputs_that_are_flattened() -> None:
    made = decoupled("vgg16", 3, 1.75)
    assert made.get_submodule("features.28").out_channels == 512
    assert made.get_submodule("classifier.0").in_features == 512 * 49
    assert [one.name for one in made.report.kept] == ["features.28"]


@pytest.mark.slow
def test_shuffles_are_few_even_and_small() -> None:
    report = decoupled("resnet50").report
    depths = [0, *(one.depth for one in report.shuffles), report.convolutions]
    assert len(report.shuffles) == 3
    assert all(6 <= after - before <= 20 for before, after in zip(depths, depths[1:]))
    assert report.moved_bytes(4) <= 1.58e6  # Table 3
    assert len(decoupled("resnet50", "all").report.shuffles) == 16  # one in every block
    assert not decoupled("resnet18", 0).report.shuffles


def test_what_needs_no_shuffle_comes_before_it() -> None:
    nodes = list(decoupled("resnet50").graph.nodes)
    for shuffle in (node for node in nodes if str(node.target).startswith("shuffle")):
        before, after = shuffle.prev, shuffle.next
        assert "shortcut" in str(before.target)
        assert shuffle in after.all_input_nodes
        needing = {shuffle}
        for node in nodes[nodes.index(shuffle) + 1 :]:
            assert needing.intersection(node.all_input_nodes), node
            needing.add(node)


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", [*CNNS, *slow(*LIKE_THOSE)])
def test_widths_can_be_divided(name: str) -> None:
    """Every grouped convolution evenly, and every shuffled tensor among any number of groups on both sides."""
    groups = 4
    made = decoupled(name)
    report = made.report
    dense = {one.name for one in report.dense}
    convolutions = {n: m for n, m in made.named_modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))}
    assert len(convolutions) == report.convolutions
    assert sum(name not in dense for name in convolutions) == report.grouped > len(convolutions) / 2
    for path, module in convolutions.items():
        if path in dense:
            assert module.groups == 1
        else:
            assert module.groups % groups == 0 or module.groups == module.in_channels
            assert module.in_channels % groups == module.out_channels % groups == 0
    assert 1 <= len(report.shuffles) <= 3
    assert all(one.shape[0] % groups**2 == 0 for one in report.shuffles)
    assert sum(isinstance(module, GroupShuffle) for module in made.modules()) == len(report.shuffles)
    first = next(iter(convolutions))
    assert first in dense
    assert len(report.concats) == {"unet": 4, "yolov2": 1}.get(name, 0)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "name", ["tiny", "unet", *slow(*[one for one in CNNS if one not in ("tiny", "unet")], *LIKE_THOSE)]
)
def test_the_zoo_trains_and_is_captured(name: str) -> None:
    torch.manual_seed(0)
    made = registry.build(f"decoupled:{name}", **SMALL.get(name, {}))
    shape = (1, 16, 16) if name == "tiny" else (3, 64, 64)
    x = torch.randn(2, *shape)
    out = made(x)
    out.square().mean().backward()
    missing = [path for path, weight in made.named_parameters() if weight.grad is None]
    assert not missing
    assert all(torch.isfinite(weight.grad).all() for weight in made.parameters())  # type: ignore[arg-type]
    graph = mh.capture(made, x, name=name)
    assert graph.network.parameter_count == sum(weight.numel() for weight in made.parameters())
    shuffles = [op for op in graph.network.ops if op.target == "aten.channel_shuffle.default"]
    assert len(shuffles) == len(made.report.shuffles) > 0  # type: ignore[union-attr, arg-type]


def test_heads_and_gates_stay_dense() -> None:
    why = {one.name: one.why for one in decoupled("unet").report.dense}
    assert why == {"stem.0": "reads the network's input (3 channels)", "head": "makes the network's output"}
    yolo = decoupled("yolov2")
    assert yolo.get_submodule("detector").out_channels == 125
    gates = [one for one in decoupled("mobilenetv3-large").report.dense if one.why.startswith("gate")]
    assert len(gates) == 16
    excited = decouple(network("excited"), 4, 0, 1.5, inputs=SHAPE)
    assert {one.name for one in excited.report.dense if one.why.startswith("gate")} == {"squeeze", "excite"}
    assert excited.get_submodule("excite").out_features == excited.get_submodule("deep").in_channels == 20


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(NETWORKS)), groups=st.integers(1, 8), widen=st.floats(0.5, 2.5),
    shuffles=st.sampled_from([0, 1, 2, 7, "all"]), weights=st.sampled_from(["fresh", "original"]),
)  # fmt: skip
def test_any_groups_and_widths(name: str, groups: int, widen: float, shuffles: Any, weights: Any) -> None:
    """Whatever is asked, the network runs with outputs of the same shape, and every weight gets a gradient."""
    module = network(name)
    made = decouple(module, groups, shuffles, widen, weights=weights, inputs=SHAPE).double().train()
    x = torch.randn(5, *SHAPE, dtype=torch.float64)
    out = made(x)
    assert out.shape == module(x).shape
    out.square().sum().backward()
    for path, weight in made.named_parameters():
        assert weight.grad is not None, path
        assert torch.isfinite(weight.grad).all(), path
    if groups > 1:
        assert all(one.shape[0] % groups**2 == 0 for one in made.report.shuffles)


class Twice(nn.Module):
    """One convolution called at two places, and a layer that has been registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.again = self.inner
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.stem(x)))
        out: Tensor = self.head(self.again(x))
        return out


def test_a_layer_called_twice_is_one_layer() -> None:
    torch.manual_seed(0)
    module = Twice().double()
    made = decouple(module, 1, 0, 1.5, weights="original", inputs=SHAPE)
    x = torch.randn(2, *SHAPE, dtype=torch.float64)
    assert torch.allclose(made(x), module(x), rtol=0, atol=1e-12)
    assert made.get_submodule("inner").in_channels == 12
    grouped = decouple(module, 2, 0, 1.5, inputs=SHAPE)
    assert grouped.get_submodule("inner").groups == 2
    assert len(list(grouped.parameters())) == 6


def test_dropout_follows_the_mode_of_the_network() -> None:
    made = decouple(network("residual"), 2, 1, 1.0, inputs=SHAPE).double()
    x = torch.randn(2, *SHAPE, dtype=torch.float64)
    assert torch.equal(made.eval()(x), made(x))
    made.train()
    assert not torch.equal(made(x), made(x))


def test_a_copy_has_the_report_and_shares_nothing() -> None:
    made = decouple(network("residual"), 2, 1, 1.0, inputs=SHAPE)
    twin = copy.deepcopy(made)
    assert twin.report == made.report
    assert mh.Decoupled is type(made).__mro__[1]
    with torch.no_grad():
        twin.get_submodule("stem").weight += 1.0  # type: ignore[operator]
    assert not torch.equal(twin.get_submodule("stem").weight, made.get_submodule("stem").weight)  # type: ignore[arg-type]


def test_mh_decouple_stays_a_function() -> None:
    """A package of that name would take its place when first imported."""
    assert mh.decouple is decouple
    import manyhands.decoupling.decouple  # noqa: F401

    assert mh.decouple is decouple


# Names


def test_decoupled_names() -> None:
    made = registry.build("decoupled,groups=2,shuffles=all,widen=2:tiny", channels=3, num_classes=7)
    assert isinstance(made, Decoupled)
    report = made.report
    assert (report.groups, report.shuffles_wanted, report.widen, report.input) == (2, "all", 2.0, (3, 16, 16))
    assert made(torch.randn(2, 3, 16, 16)).shape == (2, 7)
    assert registry.build("decoupled:tiny", groups=2).report.groups == 2  # type: ignore[union-attr, operator]
    assert registry.entry_of("decoupled:tiny") == registry.ZOO["tiny"]
    batch = registry.example_batch("decoupled:tiny", 2)
    assert isinstance(batch, Tensor)
    assert batch.shape == (2, 1, 16, 16)
    with pytest.raises(UnknownName, match="group"):
        registry.build("decoupled,group=2:tiny")
    with pytest.raises(BadValue, match="groups=two"):
        registry.build("decoupled,groups=two:tiny")
    with pytest.raises(UnknownName, match="resnet5"):
        registry.build("decoupled:resnet5")
    with pytest.raises(BadValue, match="widht"):
        registry.build("decoupled:tiny", widht=3)


# Refusals


def test_a_picture_in_the_place_of_a_number_is_named_in_few_words() -> None:
    with pytest.raises(BadValue, match=r"^groups=tensor.* must be a number from 1") as caught:
        decouple(registry.build("tiny"), torch.zeros(1, 1, 16, 16))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 150


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.inner = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one, _ = self.stem(x).chunk(2, 1)
        out: Tensor = self.inner(one)
        return out


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(8, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.stem(x), self.weight)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x if x.sum() > 0 else -x


class OtherInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.aside = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stem(x) + self.aside(x) if self.training else self.stem(x)
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(self.one(x))
        return out


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Tied(), ["'other.weight'", "'one.weight'"]),
        (Chunked(), ["operator chunk after layer 'stem'", "several tensors"]),
        (Functional(), ["operator conv2d"]),
        (Branching(), ["Branching", "torch.fx"]),
        (OtherInTraining(), ["in training"]),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(3)), ["'1'", "LocalResponseNorm"]),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm([8, 6, 6])), ["'1'", "normalises over all channels"]),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(6, 4)), ["'1'", "linear over another axis"]),
        (nn.Sequential(nn.Linear(6, 4)), ["no convolution"]),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(9, 4)), ["does not take this input", "'2'"]),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), ["parametris"]),
    ],
    ids=[
        "tied",
        "chunk",
        "functional",
        "branch",
        "training",
        "lrn",
        "layernorm",
        "linear",
        "none",
        "input",
        "parametrised",
    ],
)
def test_refusals_name_the_layer(module: nn.Module, words: list[str]) -> None:
    with pytest.raises(CaptureFailed) as refused:
        decouple(nn.Sequential(module) if isinstance(module, nn.Conv2d) else module, inputs=SHAPE)
    for word in words:
        assert word in refused.value.message, refused.value.message
    assert refused.value.hint


def test_zoo_networks_without_convolutions_are_refused() -> None:
    for name in ("bert-small", "bilstm", "din"):
        with torch.device("meta"), pytest.raises(CaptureFailed, match="no convolution"):
            decouple(registry.build(name))


@pytest.mark.parametrize(
    "wrong", [{"groups": 0}, {"groups": 1.5}, {"shuffles": -1}, {"shuffles": "some"}, {"widen": 0}, {"widen": 1e9},
              {"weights": "old"}, {"inputs": {"x": 1}}, {"inputs": (3, 0, 8)}],
)  # fmt: skip
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadValue) as refused:
        decouple(network("residual"), **{"inputs": SHAPE, **wrong})
    assert refused.value.hint


def test_twice_is_refused() -> None:
    with pytest.raises(BadValue, match="already"):
        decouple(decouple(network("residual"), inputs=SHAPE))
