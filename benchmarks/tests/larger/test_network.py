"""The network of `bench larger`: its file, its adapters, and its training from that file by stages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.weights.mapped import is_mapped, stored_tensors
from manyhands_bench.larger import network, process

TINY = dataclasses.replace(
    network.QUICK, vocabulary=101, hidden=16, layers=3, heads=4, intermediate=24, tokens=6, steps=2
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(network, "has_packages", lambda: False)
    network.write_weights(TINY, tmp_path / network.WEIGHTS_FILE)
    return tmp_path


def test_the_file_holds_every_parameter_once(folder: Path) -> None:
    model = network.built(TINY)
    stored = stored_tensors(folder / network.WEIGHTS_FILE)
    assert set(stored) == {name for name, _ in model.named_parameters()}
    assert all(stored[name].shape == tuple(parameter.shape) for name, parameter in model.named_parameters())


def test_only_adapters_are_trained_and_the_rest_stays_in_the_file(folder: Path) -> None:
    model = process.mapped(TINY, folder)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(trained) == 2 * len(network.ADAPTED) * TINY.layers
    assert all(is_mapped(parameter) for name, parameter in model.named_parameters() if name not in trained)


def test_the_full_size_is_about_half_a_billion_numbers() -> None:
    model = network.without_memory(network.FULL)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(0.5e9, rel=0.02)


@pytest.mark.slow  # tests/weights/test_mapped.py trains from a file, too
def test_stages_train_from_the_file_as_one_process_does(folder: Path) -> None:
    plain = process.reference(TINY, folder)
    model, tokens = process.mapped(TINY, folder), network.batches(TINY)
    result = mh.train(
        model, torch.utils.data.TensorDataset(tokens, tokens), batch_size=TINY.batch, steps=TINY.steps, shuffle=False,
        optimizer=mh.Optimizer("AdamW", lr=process.LEARNING_RATE, weight_decay=0.0), plan="pipeline",
        cluster=mh.Cluster.local(2), micro_batches=2, folder=folder / "run",
    )  # fmt: skip
    assert len(result.plan.stages) == 2
    assert result.losses == pytest.approx(plain["losses"], rel=1e-5)
    stored = stored_tensors(result.checkpoint / "model.safetensors")
    assert stored
    assert all("lora_" in name or name in ("model.cosines", "model.sines") for name in stored)
