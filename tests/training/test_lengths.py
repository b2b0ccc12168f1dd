"""Training and evaluating samples of different lengths over worker processes: as PyTorch trains the module on the same
padded batches, resumed or not; and what is refused before the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import manyhands as mh
from causal_network import Bidirectional, Causal, Texts, Words, causal, drawn_lengths, every_word, tagger
from manyhands.data.length_order import LengthOrder, padded_share
from manyhands.data.loader import Prefetcher
from manyhands.facts.errors import BadData, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.job.padding_check import check_padding
from manyhands.runtime.coordinator import Coordinator
from manyhands.training.config import TrainConfig
from manyhands.training.given_workload import workload_of
from real_runs import train, workers

LENGTHS, SAMPLES, STEPS, TOLERANCE = (5, 8, 12), 4, 6, 1e-9
ADAMW = Optimizer("AdamW", lr=1e-2, weight_decay=0.1)
TEXTS = Words(drawn_lengths(STEPS * SAMPLES, 2, 12))


def workload(model: nn.Module, data: Any, loss: Any = every_word, **options: Any) -> Any:
    config = TrainConfig.from_keywords("mh.train", {"lengths": LENGTHS, "batch_size": SAMPLES, **options})
    return workload_of(config, model, data, loss, ADAMW)


# Before the first step


def test_lengths_that_no_sample_needs_are_left_out() -> None:
    few = workload(tagger(), Words([3] * 8), test=Words([7]))
    assert few.lengths.of_batches.lengths == (5,)
    assert few.lengths.padding.lengths == (5, 8)  # the held-out sample's
    assert [*few.examples()] == [5, 8]
    assert {few.order.length(step) for step in range(4)} == {5}
    assert few.config.test[0][0].shape == (8,)


def test_held_out_samples_are_looked_at_before_training() -> None:
    with pytest.raises(BadData, match="Sample 1 has a length of 13"):
        workload(tagger(), TEXTS, test=Words([3, 13]))


def test_what_decides_the_batches_is_the_same_in_a_resumed_run() -> None:
    facts = workload(tagger(), TEXTS, lengths=range(4, 13, 4)).facts
    assert facts["lengths"] == (4, 8, 12)
    assert workload(tagger(), TEXTS).facts["sample_lengths"] == facts["sample_lengths"]
    assert workload(tagger(), Words([*drawn_lengths(STEPS * SAMPLES - 1, 2, 12), 1])).facts != facts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feed": "start"}, "feed='start' lays out samples of one shape"),
        ({"lengths": None, "pad": {"input": 0}}, "pad says what fills samples up"),
    ],
)
def test_options_that_contradict_lengths(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        workload(tagger(), TEXTS, **options)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """Over all words, those that pad too."""
    return functional.mse_loss(output.sum(-1), labels.to(output.dtype))


def test_a_network_that_reads_the_padding_is_refused() -> None:
    module = Bidirectional().double()
    check_padding(workload(module, Texts([3, 9, 12, 4])))
    unmasked = workload(module, Texts([3, 9, 12, 4], has_mask=False))
    with pytest.raises(BadData, match=r"Padding changes the loss: of sample 0 it is .*, with a length of 3, and .* "
                                      r"padded to 5. The network reads padded positions") as caught:  # fmt: skip
        check_padding(unmasked)
    assert "attention_mask" in caught.value.hint
    assert module.training
    with pytest.raises(BadData, match="Padding changes the loss"):
        check_padding(workload(tagger(), TEXTS, loss_of, pad={"target": 0}))


# Over processes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def by_pytorch(order: LengthOrder, data: Any, module: nn.Module, steps: int) -> list[float]:
    """Train on the padded batches that the run had."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1), []
    with Prefetcher(data, order, 0, steps) as batches:
        for _, inputs, labels in batches:
            if isinstance(inputs, dict):
                loss = module(**inputs, labels=labels)["loss"]
            else:
                loss = every_word(module(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.xdist_group("lengths")
@pytest.mark.parametrize(("plan", "kind"), [("samples", "tagger"), ("pipeline", "causal")])
def test_as_pytorch_trains_it_with_a_break(plan: str, kind: str, cluster: Coordinator, tmp_path: Path) -> None:
    made: Any = tagger if kind == "tagger" else causal
    data: Any = TEXTS if kind == "tagger" else Texts(drawn_lengths(STEPS * SAMPLES, 2, 12))
    loss = every_word if kind == "tagger" else None
    said: list[str] = []
    options: dict[str, Any] = {
        "loss": loss, "optimizer": ADAMW, "batch_size": SAMPLES, "data": data, "lengths": LENGTHS, "seed": 5,
        "micro_batches": 2, "test": data, "say": said.append,
    }  # fmt: skip
    first = train(cluster, plan, tmp_path, steps=STEPS, model=made(), **options)
    ran = train(cluster, plan, tmp_path, steps=2 * STEPS, model=made(), resume=True, **options)
    order = workload(made(), data, loss or "own", seed=5).order
    module = made()
    losses = by_pytorch(order, data, module, 2 * STEPS)
    assert ran.result.losses == pytest.approx(losses, rel=TOLERANCE)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(ran.state[name], tensor, rtol=TOLERANCE, atol=1e-12)
    # What is reported
    for result, steps in ((first.result, range(STEPS)), (ran.result, range(STEPS, 2 * STEPS))):
        assert result.lengths == order.uses(steps)
        assert len({use.length for use in result.lengths}) > 1
        assert 0 < result.padded_share == padded_share(order.uses(steps)) < 1
    assert sum(line.startswith("Batches by length: ") for line in said) == 2
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    used = [event["used"] for event in events if event["event"] == "lengths"]
    assert used[0] == [use.to_dict() for use in first.result.lengths]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert [text for text in notes if "planned were" in text] == []
    # Held-out samples, and mh.evaluate
    assert ran.result.test is not None
    evaluated = mh.evaluate(ran.model, data, loss=loss or "own", cluster=cluster, lengths=LENGTHS, batch_size=SAMPLES)
    texts = [data[index] for index in range(len(data))]
    with torch.no_grad():
        if kind == "tagger":
            parts = [(every_word(module(x[None]), y[None]), len(y)) for x, y in texts]
        else:
            parts = [(module(x["input_ids"][None], labels=y[None])["loss"], len(y) - 1) for x, y in texts]
    expected = sum(float(loss) * count for loss, count in parts) / sum(count for _, count in parts)
    assert evaluated.loss == pytest.approx(expected, rel=TOLERANCE)
    assert ran.result.test.loss == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.xdist_group("lengths")
def test_one_length_is_padding_alone(cluster: Coordinator, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": ADAMW, "batch_size": SAMPLES, "data": TEXTS, "lengths": (16,), "seed": 5}
    ran = train(cluster, "samples", tmp_path, steps=STEPS, model=tagger(), loss=every_word, **options)
    order = workload(tagger(), TEXTS, lengths=(16,), seed=5).order
    module = tagger()
    assert ran.result.losses == pytest.approx(by_pytorch(order, TEXTS, module, STEPS), rel=TOLERANCE)
    assert [use.length for use in ran.result.lengths] == [16]
    ran.assert_as_planned()
    assert replace(order, seed=6).length(0) == 16


@pytest.mark.slow
@pytest.mark.xdist_group("lengths")
def test_trials_of_plans_take_the_longest(cluster: Coordinator, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": ADAMW, "batch_size": SAMPLES, "data": TEXTS, "lengths": LENGTHS, "seed": 5}
    ran = train(cluster, "auto", tmp_path, steps=STEPS, model=tagger(), loss=every_word, tune=2, **options)
    order = workload(tagger(), TEXTS, seed=5).order
    assert ran.result.losses == pytest.approx(by_pytorch(order, TEXTS, tagger(), STEPS), rel=TOLERANCE)
    assert isinstance(ran.model, nn.Sequential)
    assert not isinstance(ran.model, Causal)
