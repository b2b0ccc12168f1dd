"""Validation while a training goes on: its results against plain PyTorch, its weights against a run without it, and
what it costs beside the forward passes themselves."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh

SAMPLES, HELD_OUT, BATCH, EVERY = 96, 61, 12, 4


@dataclass(frozen=True)
class ValidationFigures:
    """The figures of one comparison."""

    largest_difference: float
    """Of the losses of validations, relative to plain PyTorch with the same weights, in float64."""
    weights_are_equal: bool
    """Whether the weights are those of a run without validation, to the last bit."""
    validations: int
    seconds: float
    """Median seconds of a validation's forward passes."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 5)
    ).double()


def drawn(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(samples, 1, 8, 8, dtype=torch.float64, generator=generator)
    return TensorDataset(pictures, torch.randint(0, 5, (samples,), generator=generator))


def folder_at(steps_done: int) -> str:
    return f"at-{steps_done}"


class EveryCheckpoint(mh.Callback):
    """Keeps the checkpoint of each validation."""

    def on_validation(self, context: mh.CallbackContext) -> None:
        context.checkpoint(folder_at(context.steps_done))


def validation_figures(workers: int = 2, epochs: int = 2) -> ValidationFigures:
    """Train twice on local workers by the same plan, once with validations, and compare."""
    held_out, models = drawn(HELD_OUT, 2), [network(), network()]
    with tempfile.TemporaryDirectory() as folder, mh.Coordinator.local_cluster(mh.Cluster.local(workers)) as cluster:

        def trained(model: nn.Module, name: str, plan: mh.Plan | str, **options: Any) -> mh.TrainResult:
            return mh.train(
                model, drawn(SAMPLES, 1), loss=functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.05),
                batch_size=BATCH, epochs=epochs, cluster=cluster, plan=plan, folder=Path(folder) / name, verify=False,
                **options,
            )  # fmt: skip

        result = trained(
            models[0], "validated", "samples", validate=held_out, validate_every=EVERY, callbacks=[EveryCheckpoint()]
        )
        trained(models[1], "plain", result.plan)
        differences = []
        for validated in result.validation:
            plain = network()
            plain.load_state_dict(load_file(result.folder / folder_at(validated.steps_done) / "model.safetensors"))
            with torch.no_grad():
                loss = float(functional.cross_entropy(plain.eval()(held_out.tensors[0]), held_out.tensors[1]))
            differences.append(abs(validated.metrics["loss"] - loss) / loss)
    states = [model.state_dict() for model in models]
    return ValidationFigures(
        max(differences), all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()),
        len(differences), statistics.median(validated.seconds for validated in result.validation),
    )  # fmt: skip
