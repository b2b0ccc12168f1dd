"""Training a language model with tied weights over worker processes: as PyTorch trains the module, resumed or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

import manyhands as mh
from language_model import SAMPLES, batch, language, next_word
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.runtime.coordinator import Coordinator
from real_runs import names, train, workers

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tied_training")]

STEPS, TOLERANCE = 6, 1e-9


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        batches = [batch(seed) for seed in range(STEPS)]
        self.words, self.labels = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index], self.labels[index]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(3) as coordinator:
        yield coordinator


def plan_of(graph: mh.Graph, *devices: tuple[str, ...]) -> Plan:
    """A stage for each group of devices, cut where the layers are, two micro-batches."""
    count = len(graph.network.layers)
    ends = [count * place // len(devices) for place in range(len(devices) + 1)]
    stages = tuple(
        Stage((first, last), group, BySamples((1,) * len(group)) if len(group) > 1 else Single())
        for first, last, group in zip(ends[:-1], ends[1:], devices, strict=True)
    )
    return Plan("Language", SAMPLES, stages, micro_batches=2)


def test_as_pytorch_trains_it_with_a_break_and_another_plan(cluster: Coordinator, tmp_path: Path) -> None:
    """Half of the steps with a shared stage, the rest after a break on three stages."""
    words, labels = batch(0)
    graph = mh.capture(language(), words, loss=next_word, target=labels)
    a, b, c = names(cluster)
    options: dict[str, Any] = {
        "loss": next_word, "optimizer": Optimizer("AdamW", lr=1e-2, weight_decay=0.1), "batch_size": SAMPLES,
        "shuffle": False, "model": language(), "data": Sentences(), "name": "Language",
    }  # fmt: skip
    first = train(cluster, plan_of(graph, (a, b), (c,)), tmp_path, steps=3, **options)
    first.assert_as_planned()
    options["model"] = language()
    ran = train(cluster, plan_of(graph, (b,), (c,), (a,)), tmp_path, steps=STEPS, resume=True, **options)
    module, losses = language(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    for seed in range(STEPS):
        words, labels = batch(seed)
        loss = next_word(module(words), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert ran.result.losses == pytest.approx(losses, rel=TOLERANCE)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(ran.state[name], tensor, rtol=TOLERANCE, atol=1e-12)
    assert ran.model.head.weight is ran.model.words.weight
    stored = load_file(sorted((tmp_path / "checkpoints").iterdir())[-1] / "model.safetensors")
    assert torch.equal(stored["head.weight"], stored["words.weight"])
    module.load_state_dict(stored)
    optimizers = load_file(sorted((tmp_path / "checkpoints").iterdir())[-1] / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in optimizers} == set(dict(module.named_parameters()))  # each once
