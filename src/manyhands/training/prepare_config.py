"""`PrepareConfig`: the options of `mh.train` that a step for the user's own loop has, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.job.config import varied
from manyhands.training.config import TrainConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.utils.data import Dataset

    from manyhands.job.callback import Callback
    from manyhands.job.callbacks import OnStep
    from manyhands.job.metrics import Metric


def _loops(name: str) -> Any:
    """Return the field of an option that the loop decides about: it is no keyword."""
    default = TrainConfig.__dataclass_fields__[name].default
    return varied(TrainConfig, name, default, is_keyword=False)


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(TrainConfig):
    """Every option of `mh.prepare`: those of `mh.train`, without what the loop decides itself."""

    epochs: int = _loops("epochs")
    steps: int | None = _loops("steps")
    batch_size: int | None = _loops("batch_size")
    shuffle: bool | None = _loops("shuffle")
    feed: str = _loops("feed")
    tune: int = _loops("tune")
    lengths: Sequence[int] | None = _loops("lengths")
    pad: Mapping[str, float] | None = _loops("pad")
    test: Dataset[Any] | None = _loops("test")  # noqa: RUF009
    ema: float | None = _loops("ema")
    validate: Dataset[Any] | None = _loops("validate")  # noqa: RUF009
    validate_every: int | str | None = _loops("validate_every")
    metrics: Mapping[str, Metric] | None = _loops("metrics")
    callbacks: Sequence[Callback] = _loops("callbacks")
    config: Mapping[str, Any] | None = _loops("config")
    on_step: OnStep | None = _loops("on_step")  # noqa: RUF009
