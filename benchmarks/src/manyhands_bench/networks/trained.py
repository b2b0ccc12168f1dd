"""Two real training steps of a public network on two local workers, compared with plain PyTorch."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

import manyhands as mh
from manyhands_bench.networks.catalogue import subject_named
from manyhands_bench.networks.forward import relative
from manyhands_bench.networks.subject import call, in_float64, squared_error, target_for

STEPS, SAMPLES = 2, 4
RATE, MOMENTUM = 1e-3, 0.9
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
    torch.manual_seed(0)
    subject = subject_named(name)
    module = calm(subject.module).double().train()
    inputs = in_float64(subject.batch(STEPS * SAMPLES))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        targets = target_for(call(copy.deepcopy(module), inputs)).double()
    losses = _plain_steps(twin, inputs, targets)
    before = [weight.detach().clone() for weight in module.parameters()]
    try:
        result = mh.train(
            module, _Pairs(inputs, targets), loss=squared_error,
            optimizer=mh.Optimizer("SGD", lr=RATE, momentum=MOMENTUM), batch_size=SAMPLES, steps=STEPS, shuffle=False,
            cluster="local:2", plan=share, folder=folder, silence_seconds=SILENCE_SECONDS, name=name,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    devices = {device for stage in result.plan.stages for device in stage.devices}
    assert len(devices) > 1, f"trained by '{share}' on one device"
    assert not all(map(torch.equal, before, module.parameters())), "no weight has changed"
    return max(
        *(relative(torch.tensor(a), torch.tensor(b)) for a, b in zip(result.losses, losses, strict=True)),
        *(relative(tensor, expected, NEGLIGIBLE) for tensor, expected in _pairs_of(module, twin)),
    )


def _plain_steps(module: nn.Module, inputs: Any, targets: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        part = slice(step * SAMPLES, (step + 1) * SAMPLES)
        optimizer.zero_grad()
        loss = squared_error(call(module, _sliced(inputs, part)), targets[part])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


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
