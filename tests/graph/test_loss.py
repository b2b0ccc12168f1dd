"""How losses combine over samples: told apart, recorded, and held to by plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from graph_checks import zoo
from torch import Tensor, nn

from groups import by_name
from manyhands.facts.errors import BadGraph, BadPlan
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.graph import store
from manyhands.graph.capture import capture
from manyhands.graph.describe import fingerprint
from manyhands.graph.graph import Graph
from manyhands.graph.loss import combination, ignored_class, loss_totals
from manyhands.graph.loss_trial import agrees
from manyhands.graph.tape import bind_inputs
from manyhands.models import registry

CLASSES = 3
LossFunction = Callable[[Any, Any], Tensor]
LABELS = torch.tensor([0, 2, 1, 1, 2])


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def captured(loss: LossFunction, target: Any, head: nn.Module | None = None, samples: int = 5) -> Graph:
    module = nn.Linear(4, CLASSES) if head is None else nn.Sequential(nn.Linear(4, CLASSES), head)
    return capture(module, numbers(samples, 4), loss=loss, target=target)


class Images(nn.Module):
    """(N, C, 4, 4)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], CLASSES, 1, 1) * torch.arange(16.0).view(4, 4)


class Heads(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": x * 2, "boxes": [x, x.sum(1)]}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, 0]


class Moved(nn.Module):
    """An output that is no rows of samples: the mean of a batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.mean()


def log_softmax(output: Tensor) -> Tensor:
    return output.log_softmax(1)


def written_out(output: Tensor, target: Tensor) -> Tensor:
    chosen = output.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    return -chosen.sum() / target.shape[0]


def accumulated(output: Tensor, target: Tensor) -> Tensor:
    total = torch.zeros(())
    for column in range(CLASSES):
        total = total + (output[:, column] - target[:, column]).abs().sum()
    return total


def focal(output: Tensor, target: Tensor) -> Tensor:
    entropy = F.cross_entropy(output, target, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


class WithParts(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, 1.0]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target) + self.scale.square().sum()


FLOATS = numbers(5, CLASSES)
PROBABILITIES = FLOATS / FLOATS.sum(1, keepdim=True)
PIXELS = torch.randint(0, CLASSES, (5, 4, 4), generator=torch.Generator().manual_seed(0))
BOTH = {"labels": LABELS, "boxes": FLOATS}

MEANS: dict[str, tuple[Any, ...]] = {
    "cross entropy": (F.cross_entropy, LABELS),
    "its module": (nn.CrossEntropyLoss(), LABELS),
    "probabilities": (F.cross_entropy, PROBABILITIES),
    "label smoothing": (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1), LABELS),
    "negative log likelihood": (lambda o, t: F.nll_loss(log_softmax(o), t), LABELS),
    "pixels": (F.cross_entropy, PIXELS, Images()),
    "pixels as rows": (
        lambda o, t: F.cross_entropy(o.permute(0, 2, 3, 1).reshape(-1, CLASSES), t.view(-1)), PIXELS, Images(),
    ),
    "squares": (F.mse_loss, FLOATS),
    "distances": (F.l1_loss, FLOATS),
    "smooth distances": (F.smooth_l1_loss, FLOATS),
    "huber": (F.huber_loss, FLOATS),
    "logits": (F.binary_cross_entropy_with_logits, FLOATS.round()),
    "logits weighted by class": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=torch.tensor([1.0, 5.0, 0.1])), FLOATS.round(),
    ),
    "logits weighted by element": (
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, weight=torch.tensor([1.0, 5.0, 0.1])), FLOATS.round(),
    ),
    "probabilities of two": (F.binary_cross_entropy, FLOATS.round(), nn.Sigmoid()),
    "logarithms of outputs": (lambda o, t: -(o.log() * t).sum(1).mean(), PROBABILITIES, nn.Softmax(1)),
    "divergence, batchmean": (lambda o, t: F.kl_div(log_softmax(o), t, reduction="batchmean"), PROBABILITIES),
    "divergence, mean": (lambda o, t: F.kl_div(log_softmax(o), t, reduction="mean"), PROBABILITIES),
    "margin": (lambda o, t: F.soft_margin_loss(o, t), FLOATS.round() * 2 - 1),
    "triplet": (lambda o, t: F.triplet_margin_loss(o, o * 2, t), FLOATS),
    "cosine": (lambda o, t: F.cosine_embedding_loss(o, t, torch.ones_like(o[:, 0])), FLOATS),
    "written out": (written_out, LABELS),
    "one of each": (lambda o, t: -log_softmax(o)[torch.arange(o.shape[0]), t].mean(), LABELS),
    "focal": (focal, LABELS),
    "mean of means": (lambda o, t: (o - t).square().mean(1).mean(0), FLOATS),
    "mean over samples first": (lambda o, t: (o - t).square().mean(0).sum(), FLOATS),
    "divided first": (lambda o, t: ((o - t).square() / o.shape[0]).sum(), FLOATS),
    "divided by numel": (lambda o, t: (o - t).square().sum() / o.numel(), FLOATS),
    "times a constant": (lambda o, t: 0.3 * F.mse_loss(o, t), FLOATS),
    "plus a constant": (lambda o, t: F.mse_loss(o, t) + 1.0, FLOATS),
    "one minus": (lambda o, t: 1 - F.cosine_similarity(o, t).mean(), FLOATS),
    "constant": (lambda o, t: (o * 0).mean() + 2.0, FLOATS),
    "always zero": (lambda o, t: o.mean() * 0, FLOATS),
    "stacked": (lambda o, t: torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)]).mean(), FLOATS),
    "weights of its own": (WithParts(), FLOATS),
    "dict": (
        lambda o, t: F.cross_entropy(o["logits"], t["labels"]) + 0.1 * F.mse_loss(o["boxes"][0], t["boxes"]),
        BOTH, Heads(),
    ),
    "tuple": (lambda o, t: F.mse_loss(o[0], t) + F.l1_loss(o[1], t[:, 0]), FLOATS, Pair()),
    "half precision inside": (lambda o, t: F.mse_loss(o.to(torch.float16).float(), t), FLOATS),
    "dropout of nothing": (lambda o, t: F.mse_loss(F.dropout(o, 0.0), t), FLOATS),
    "number of the class": (lambda o, t: F.cross_entropy(o, t.argmax(1)), PROBABILITIES),
    "ignored but counted": (lambda o, t: F.cross_entropy(o, t, reduction="none").mean(), LABELS - 102 * (LABELS == 2)),
}  # fmt: skip
SUMS: dict[str, tuple[Any, ...]] = {
    "cross entropy": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), LABELS),
    "weights of classes": (
        lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 5.0, 0.1]), reduction="sum"), LABELS,
    ),
    "ignored": (lambda o, t: F.cross_entropy(o, t, ignore_index=1, reduction="sum"), LABELS),
    "squares": (lambda o, t: F.mse_loss(o, t, reduction="sum"), FLOATS),
    "logits": (lambda o, t: F.binary_cross_entropy_with_logits(o, t, reduction="sum"), FLOATS.round()),
    "divergence": (lambda o, t: F.kl_div(log_softmax(o), t, reduction="sum"), PROBABILITIES),
    "over a constant": (lambda o, t: F.mse_loss(o, t, reduction="sum") / 7, FLOATS),
    "masked": (lambda o, t: (F.cross_entropy(o, t, reduction="none") * (t != 1)).sum(), LABELS),
    "of a mean, times samples": (lambda o, t: F.mse_loss(o, t) * o.shape[0], FLOATS),
    "accumulated": (accumulated, FLOATS),
    "zero for most": (lambda o, t: F.relu(o - t - 1000).sum(), FLOATS),
}  # fmt: skip
WEIGHTED: dict[str, tuple[Any, ...]] = {
    "weights of classes": (lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 5.0, 0.1])), LABELS),
    "weights of classes, all the same": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1])), torch.ones_like(LABELS),
    ),
    "weights of likelihoods": (lambda o, t: F.nll_loss(log_softmax(o), t, torch.ones(CLASSES)), LABELS),
    "over the target's sum": (lambda o, t: (o * t).sum() / t.sum(), FLOATS),
    "masked mean, nothing masked": (lambda o, t: ((o - 1).square() * t).sum() / t.sum(), torch.ones(5, CLASSES)),
    "mean over what is not ignored": (
        lambda o, t: F.cross_entropy(o, t, reduction="sum") / (t != -100).sum(), LABELS,
    ),
    "an ignored class in the example": (lambda o, t: F.cross_entropy(o, t, ignore_index=1), LABELS),
    "targets made up": (lambda o, t: F.cross_entropy(o, torch.where(t > 1, -100, t)), LABELS),
    "two ignored classes": (
        lambda o, t: F.cross_entropy(o, t) + F.cross_entropy(o, t, ignore_index=-1), LABELS,
    ),
}  # fmt: skip
"""More of them, with targets that differ in weight: test_loss_totals.py."""
WHOLES: dict[str, tuple[Any, ...]] = {
    "softmax over samples": (lambda o, t: -(o.log_softmax(0) * t).mean(), FLOATS),
    "rolled negatives": (lambda o, t: F.triplet_margin_loss(o, t, o.roll(1, 0)), FLOATS),
    "similarity of features": (lambda o, t: (o.T @ o / o.shape[0] - torch.eye(CLASSES)).square().sum(), FLOATS),
    "normalised by the batch": (lambda o, t: F.mse_loss((o - o.mean(0)) / (o.std(0) + 1e-5), t), FLOATS),
    "batch norm": (lambda o, t: F.mse_loss(F.batch_norm(o, None, None, training=True), t), FLOATS),
    "root of the mean": (lambda o, t: F.mse_loss(o, t).sqrt(), FLOATS),
    "norm": (lambda o, t: torch.linalg.vector_norm(o - t), FLOATS),
    "product of means": (lambda o, t: F.mse_loss(o, t) * F.l1_loss(o, t), FLOATS),
    "largest": (lambda o, t: (o - t).abs().amax(), FLOATS),
    "sum plus a constant": (lambda o, t: F.mse_loss(o, t, reduction="sum") + 1.0, FLOATS),
    "mean and sum": (lambda o, t: F.mse_loss(o, t) + o.square().sum(), FLOATS),
    "mean by samples twice": (lambda o, t: F.mse_loss(o, t) / o.shape[0], FLOATS),
    "random": (lambda o, t: F.mse_loss(F.dropout(o, 0.5), t), FLOATS),
    "weighted by outputs": (lambda o, t: (o * t).sum() / o.sum(), FLOATS),
    "ignored by outputs": (lambda o, t: F.cross_entropy(o, torch.where(o[:, 0] > 0.5, t, -100)), LABELS),
    "classes weighted by outputs": (lambda o, t: F.cross_entropy(o, t, weight=o.mean(0).detach()), LABELS),
    "root of a weighted mean": (lambda o, t: ((o * t).sum() / t.sum()).sqrt(), FLOATS),
    "weighted mean, mean and sum": (
        lambda o, t: F.cross_entropy(o, t, ignore_index=1) + o.mean() + o.square().sum(), LABELS,
    ),
    "samples look each other up": (lambda o, t: F.mse_loss(F.embedding(t, o), o), LABELS),
    "first sample": (lambda o, t: F.mse_loss(o - o[0], t), FLOATS),
    "numbered samples": (lambda o, t: ((o - t).sum(1) * torch.arange(o.shape[0])).mean(), FLOATS),
    "not rows of samples": (lambda o, t: F.mse_loss(o[0], t) + o[1], FLOATS, Moved()),
    "a target for all": (lambda o, t: F.mse_loss(o, t["boxes"]) * t["scale"], {**BOTH, "scale": torch.tensor(2.0)}),
}  # fmt: skip
SHOWN_BY_NOTHING = {"random", "not rows of samples", "a target for all"}
"""Only the walk tells: no example here does, or there is nothing to split."""


@pytest.mark.quick(every=42)
@pytest.mark.parametrize("name", MEANS)
def test_means(name: str) -> None:
    assert captured(*MEANS[name]).loss_combination == "mean"


@pytest.mark.quick(every=11)
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    assert captured(*SUMS[name]).loss_combination == "sum"


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted(name: str) -> None:
    graph = captured(*WEIGHTED[name])
    assert graph.loss_combination == graph.network.loss_combination == "weighted"


@pytest.mark.quick(every=24)
@pytest.mark.parametrize("name", WHOLES)
def test_neither(name: str) -> None:
    """By the walk; and by the run alone, where an example shows it."""
    graph = captured(*WHOLES[name])
    assert graph.loss_combination == "whole"
    assert graph.network.loss_combination == "whole"
    assert graph.loss is not None
    if name not in SHOWN_BY_NOTHING:
        given = bind_inputs(graph.loss, (numbers(5, CLASSES), WHOLES[name][1]))
        assert not agrees(graph.loss, "mean", given)
        assert not agrees(graph.loss, "sum", given)


def part(value: Any, rows: slice) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, dict):
        return {key: part(item, rows) for key, item in value.items()}
    return [part(item, rows) for item in value]


@pytest.mark.quick(every=18)
@pytest.mark.filterwarnings("ignore:reduction:UserWarning")  # of kl_div's mean
@pytest.mark.parametrize(("kind", "name"), [("mean", n) for n in MEANS] + [("sum", n) for n in SUMS])
def test_the_users_own_function_adds_up(kind: str, name: str) -> None:
    """Without the captured graph: the loss as written, of unequal shares, against the loss of the batch."""
    loss, target, *head = (MEANS if kind == "mean" else SUMS)[name]
    output = numbers(5, CLASSES)
    output = head[0](output) if head else output
    shares = [slice(0, 1), slice(1, 3), slice(3, 5)]
    parts = [(rows.stop - rows.start, loss(part(output, rows), part(target, rows))) for rows in shares]
    total = sum(value * (count / 5 if kind == "mean" else 1) for count, value in parts)
    torch.testing.assert_close(total, loss(output, target), rtol=1e-4, atol=1e-5)


def test_a_matrix_of_samples_by_samples_is_whole() -> None:
    graph = captured(lambda o, t: F.cross_entropy(o @ t.T, torch.arange(o.shape[0])), FLOATS)
    assert graph.loss_combination == "whole"


@pytest.mark.quick("din")
@pytest.mark.parametrize(
    "name", by_name("zoo", registry.ZOO, slow=("resnet50", "mobilenetv2", "mobilenetv3-large", "yolov2"))
)
def test_zoo_losses_are_means(name: str) -> None:
    """YOLOv2's region loss too: sums over boxes and cells, divided by the number of pictures."""
    graph = zoo(name).graph
    assert graph.loss_combination == graph.network.loss_combination == "mean"
    assert ignored_class(graph) == (-100 if registry.ZOO[name].loss == "cross_entropy" else None)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("samples", [1, 2, 3, 8])
def test_any_number_of_examples_will_do(samples: int) -> None:
    labels = torch.zeros(samples, dtype=torch.long)
    assert captured(F.cross_entropy, labels, samples=samples).loss_combination == "mean"
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]))
    assert captured(weighted, labels, samples=samples).loss_combination == "weighted"


def test_examples_are_left_alone() -> None:
    state = torch.random.get_rng_state()
    loss, target = WithParts(), FLOATS.clone()
    with torch.no_grad():
        assert captured(loss, target).loss_combination == "mean"
    assert torch.equal(target, FLOATS)
    assert loss.scale.grad is None
    captured(F.cross_entropy, LABELS)
    torch.random.set_rng_state(state)
    graph = captured(F.cross_entropy, LABELS)
    before = torch.random.get_rng_state()
    assert combination(graph, numbers(5, CLASSES), LABELS) == "mean"
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.quick("cross entropy")
@pytest.mark.parametrize("name", ["cross entropy", "squares", "pixels", "written out", "dict"])
def test_the_run_finds_a_false_proof(name: str) -> None:
    """The second opinion is one: it refuses what the walk would never claim."""
    loss, target, *head = MEANS[name]
    graph = captured(loss, target, *head)
    assert graph.loss is not None
    output = numbers(5, CLASSES)
    given = bind_inputs(graph.loss, (head[0](output) if head else output, target))
    assert agrees(graph.loss, "mean", given)
    assert not agrees(graph.loss, "sum", given)


@pytest.mark.quick(every=11)
@pytest.mark.parametrize(
    ("loss", "target", "expected"),
    [
        (F.cross_entropy, LABELS, -100),
        (nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.1), LABELS, 7),
        (lambda o, t: F.nll_loss(log_softmax(o), t, ignore_index=-1), LABELS, -1),
        (lambda o, t: F.cross_entropy(o, t["labels"].view(-1).to(torch.int64)), BOTH, -100),
        (lambda o, t: F.cross_entropy(o, t.long()), LABELS.to(torch.uint8), -100),
        (lambda o, t: F.mse_loss(o, F.one_hot(t, CLASSES).float()) + F.cross_entropy(o, t), LABELS, -100),
        (lambda o, t: F.cross_entropy(o, t, reduction="sum"), LABELS, None),
        (lambda o, t: F.cross_entropy(o, t, reduction="none").mean(), LABELS, None),
        (F.cross_entropy, PROBABILITIES, None),
        (lambda o, t: F.cross_entropy(o, t.argmax(1)), PROBABILITIES, None),
        (F.mse_loss, FLOATS, None),
    ],
)
def test_the_ignored_class(loss: LossFunction, target: Any, expected: int | None) -> None:
    graph = captured(loss, target)
    assert graph.loss_combination != "whole"
    assert ignored_class(graph) == expected


def test_without_a_loss() -> None:
    graph = capture(nn.Linear(4, 3), numbers(2, 4))
    assert graph.loss_combination == ""
    assert graph.network.loss_combination == "mean"
    assert ignored_class(graph) is None
    assert loss_totals(graph) is None


# Stored


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", ["mean", "sum", "weighted", "whole"])
def test_it_is_stored(name: str, tmp_path: Path) -> None:
    graph = captured(*{
        "mean": MEANS["cross entropy"], "sum": SUMS["squares"], "weighted": WEIGHTED["weights of classes"],
        "whole": WHOLES["norm"],
    }[name])  # fmt: skip
    store.save(graph, tmp_path)
    back = store.load(tmp_path)
    assert back.loss_combination == name
    assert back.network == graph.network
    assert ignored_class(back) == ignored_class(graph)


@pytest.mark.parametrize("value", ["x", "Mean", "mean ", 3, None, ["mean"], {}, "m" * 10_000])
def test_a_hostile_value_is_refused(value: Any) -> None:
    graph = captured(F.cross_entropy, LABELS)
    document = copy.deepcopy(store.to_document(graph))
    document["loss_combination"] = value
    with pytest.raises(BadGraph, match="loss_combination"):
        store.from_document(document, store.state_of(graph))


def test_a_value_without_a_loss_is_refused() -> None:
    graph = capture(nn.Linear(4, 3), numbers(2, 4))
    document = {**store.to_document(graph), "loss_combination": "mean"}
    with pytest.raises(BadGraph, match="'mean' of a graph without a loss"):
        store.from_document(document, store.state_of(graph))


def test_a_document_that_does_not_say_is_in_doubt() -> None:
    graph = captured(F.cross_entropy, LABELS)
    document = store.to_document(graph)
    del document["loss_combination"]
    assert store.from_document(document, store.state_of(graph)).loss_combination == "whole"


def test_the_fingerprint_does_not_change() -> None:
    graph = captured(F.cross_entropy, LABELS)
    assert fingerprint(graph) == fingerprint(msgspec.structs.replace(graph, loss_combination="whole"))
    assert graph.network.fingerprint == capture(nn.Linear(4, CLASSES), numbers(5, 4)).network.fingerprint


# Held to by plans


def plan_for(graph: Graph, **changes: Any) -> Plan:
    layers = len(graph.network.layers)
    stages = [{"layers": [0, layers], "devices": ["a"]}]
    return Plan.from_dict({"network": graph.name, "batch_size": 8, "stages": stages, **changes})


def by(share: dict[str, Any], layers: int) -> dict[str, Any]:
    return {"stages": [{"layers": [0, layers], "devices": ["a", "b"], "share": share}]}


def test_a_loss_that_needs_all_samples_is_not_shared() -> None:
    graph = captured(*WHOLES["root of the mean"], nn.ReLU())
    layers = len(graph.network.layers)
    network = graph.network
    shared = by({"by": "samples", "samples": [4, 4]}, layers)
    tiles = by({"by": "tiles", "rows": [1, 1]}, layers)
    resolve(plan_for(graph), network)
    resolve(plan_for(graph, order="stream", micro_batches=4), network)
    resolve(plan_for(graph, order="stream", **shared), network)
    resolve(plan_for(graph, **tiles), network)  # a tile's output is gathered: the loss sees all of it
    for changes, said in (
        ({"micro_batches": 2}, "micro_batches is 2"),
        (shared, r"stages\[0\] is shared by samples among 2 devices"),
    ):
        with pytest.raises(BadPlan, match=said + ".*no mean or sum over samples.*in one place") as error:
            resolve(plan_for(graph, **changes), network)
        assert "micro_batches: 1 and a single device for the last stage" in error.value.hint
        for other in ("mean", "sum", "weighted"):
            resolve(plan_for(graph, **changes), msgspec.structs.replace(network, loss_combination=other))


def test_only_the_last_stage_must_have_all_samples() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES))
    loss, target = WHOLES["root of the mean"]
    graph = capture(module, numbers(5, 4), loss=loss, target=target)
    assert len(graph.network.layers) == 2
    stages: list[dict[str, Any]] = [
        {"layers": [0, 1], "devices": ["a", "b"], "share": {"by": "samples", "samples": [4, 4]}},
        {"layers": [1, 2], "devices": ["c"]},
    ]
    resolve(plan_for(graph, stages=stages), graph.network)
