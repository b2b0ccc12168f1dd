"""A data set of one batch, for benches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from manyhands.models.registry import example_batch, example_target


class SameBatch(Dataset[Any]):
    """A data set that repeats one batch, so that training is measured and not loading."""

    def __init__(self, model: str, shape: tuple[int, ...], samples: int) -> None:
        self.inputs: Any = example_batch(model, samples, input_shape=shape)
        self.targets = example_target(model, samples, input_shape=shape)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]
