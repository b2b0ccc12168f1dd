"""Two real training steps of a public network on two local workers, compared with plain PyTorch."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

import manyhands as mh
from manyhands_bench.networks.catalogue import trained_subject
from manyhands_bench.networks.forward import relative
from manyhands_bench.networks.subject import call, in_float64, squared_error, target_for

STEPS, SAMPLES = 2, 4
LENGTH, MOMENTUM = 1e-3, 0.9
"""The most that all weights together move in the first step. With one learning rate for all networks the gradient of
ResNet-152, which is large before training, moves its weights so far that the second step magnifies rounding alone to
6e-8 (`reordered_difference`); after so short a step PyTorch is within 1e-9 of itself, and a wrong gradient shows."""
SILENCE_SECONDS = 120.0
"""Seconds without a heartbeat after which a worker is lost: many networks train at once on few cores."""
NEGLIGIBLE = 1e-3
"""Weights all smaller than this are compared by this: a bias begins at zero."""


class _Pairs(Dataset[Any]):
    """A data set of pairs of one sample of the inputs and one of the targets."""

    def __init__(self, inputs: Any, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        return _sliced(self.inputs, index), self.targets[index]


def _sliced(batch: Any, place: int | slice) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor[place], batch)


def trained_difference(name: str, share: str, folder: Path) -> float:
    """Return the largest difference between two workers and plain PyTorch after two steps, of any loss, weight or
    buffer, each over its largest element.

    Dropout and the like draw nothing here (`calm`): PyTorch draws other numbers.
    """
    module, inputs, targets = _module_and_data(name)
    twin = copy.deepcopy(module)
    rate = _rate(module, inputs, targets)
    losses = _plain_steps(twin, inputs, targets, rate)
    before = [weight.detach().clone() for weight in module.parameters()]
    try:
        result = mh.train(
            module, _Pairs(inputs, targets), loss=squared_error,
            optimizer=mh.Optimizer("SGD", lr=rate, momentum=MOMENTUM), batch_size=SAMPLES, steps=STEPS, shuffle=False,
            cluster="local:2", plan=share, folder=folder, silence_seconds=SILENCE_SECONDS, name=name,
            micro_batches=1 if _has_batch_norm(module) else None,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    devices = {device for stage in result.plan.stages for device in stage.devices}
    assert len(devices) > 1, f"trained by '{share}' on one device"
    assert not all(map(torch.equal, before, module.parameters())), "no weight has changed"
    return _difference(module, result.losses, twin, losses)


def reordered_difference(name: str) -> float:
    """Return the same difference between plain PyTorch and itself with the samples of each batch in reverse order: what
    the rounding of sums alone does to this network."""
    module, inputs, targets = _module_and_data(name)
    twin = copy.deepcopy(module)
    rate = _rate(module, inputs, targets)
    losses = _plain_steps(twin, inputs, targets, rate)
    order = torch.arange(STEPS * SAMPLES).view(STEPS, SAMPLES).flip(1).flatten()
    reordered = tree_map_only(torch.Tensor, lambda tensor: tensor[order], inputs)
    return _difference(module, _plain_steps(module, reordered, targets[order], rate), twin, losses)


def _module_and_data(name: str) -> tuple[nn.Module, Any, torch.Tensor]:
    """Return a network in float64, and inputs and targets for all steps; the same each time."""
    torch.manual_seed(0)
    subject = trained_subject(name)
    module = calm(subject.module).double().train()
    inputs = in_float64(subject.batch(STEPS * SAMPLES))
    with torch.no_grad():
        return module, inputs, target_for(call(copy.deepcopy(module), inputs)).double()


def _difference(module: nn.Module, losses: Sequence[float], twin: nn.Module, twin_losses: Sequence[float]) -> float:
    return max(
        *(relative(torch.tensor(a), torch.tensor(b)) for a, b in zip(losses, twin_losses, strict=True)),
        *(relative(tensor, expected, NEGLIGIBLE) for tensor, expected in _pairs_of(module, twin)),
    )


def _has_batch_norm(module: nn.Module) -> bool:
    """Return whether a module takes statistics over its batch: with several micro-batches they are over each of them,
    which one device's step is not."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def _rate(module: nn.Module, inputs: Any, targets: torch.Tensor) -> float:
    """Return the learning rate with which the first step moves all weights together by LENGTH at most."""
    probe = copy.deepcopy(module)
    _loss(probe, inputs, targets, 0).backward()  # type: ignore[no-untyped-call]
    gradients = [weight.grad for weight in probe.parameters() if weight.grad is not None]
    return LENGTH / max(1.0, float(torch.nn.utils.get_total_norm(gradients)))


def _plain_steps(module: nn.Module, inputs: Any, targets: torch.Tensor, rate: float) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(module, inputs, targets, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _loss(module: nn.Module, inputs: Any, targets: torch.Tensor, step: int) -> torch.Tensor:
    part = slice(step * SAMPLES, (step + 1) * SAMPLES)
    return squared_error(call(module, _sliced(inputs, part)), targets[part])


def _pairs_of(module: nn.Module, twin: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    state, expected = module.state_dict(), twin.state_dict()
    return [(state[name], tensor) for name, tensor in expected.items() if isinstance(tensor, torch.Tensor)]


def calm(module: nn.Module) -> nn.Module:
    """Make every dropout, stochastic depth and layer drop of a module keep everything, and return the module."""
    for part in module.modules():
        is_dropout = "Drop" in type(part).__name__ or type(part).__name__ == "StochasticDepth"
        _drop_nothing(part, also=("p",) if is_dropout else ())
        if (config := getattr(part, "config", None)) is not None:
            _drop_nothing(config)
    return module


def _drop_nothing(holder: Any, also: tuple[str, ...] = ()) -> None:
    """Set every probability of dropping something that an object holds to 0."""
    for key, value in list(vars(holder).items()):
        if isinstance(value, float) and ("drop" in key.lower() or key in also):
            setattr(holder, key, 0.0)
