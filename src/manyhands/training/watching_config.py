"""Options of `mh.train` for what is looked at while it runs: validation, metrics, callbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadValue
from manyhands.job.config import Config, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.utils.data import Dataset

    from manyhands.job.callback import Callback
    from manyhands.job.metrics import Metric

EPOCH = "epoch"


@dataclass(frozen=True, kw_only=True)
class WatchingConfig(Config):
    """Validation, metrics and callbacks."""

    validate: Dataset[Any] | None = option(
        None, "Held-out data, which the same workers evaluate while training goes on. None: that of `test`, if "
        "validate_every is given.", stored=None,
    )  # fmt: skip
    validate_every: int | str | None = option(
        None, "Validate on the held-out data after so many steps each time, or 'epoch': after each pass over the data.",
        "--validate-every", metavar="STEPS|epoch", default_text="after each epoch, if validate is given",
    )  # fmt: skip
    metrics: Mapping[str, Metric] | None = option(
        None, "Metrics of validations by name, beside loss and accuracy: functions of all (predictions, targets) that "
        "return a number, or objects with update, compute and reset, as in torchmetrics.", stored=None,
    )  # fmt: skip
    callbacks: Sequence[Callback] = option(
        (), "Objects of mh.Callback, such as mh.EarlyStopping and mh.BestCheckpoint.", stored=None
    )

    def check(self) -> None:
        super().check()
        every, spelling = self.validate_every, self.spelling("validate_every")
        is_number = str(every).isdecimal() and int(every or 0) >= 1 and not isinstance(every, bool)
        if every is not None and every != EPOCH and not is_number:
            raise BadValue(
                f"{spelling} is {every!r}; it must be a whole number of steps of at least 1, or 'epoch'.",
                hint="Write epoch, or a number.",
            )
        if self.metrics and self.validate is None and every is None:
            raise BadValue("metrics are computed at validations; this job has none.", hint="Add validate=data_set.")

    @property
    def is_validated(self) -> bool:
        """Whether held-out data is evaluated while training goes on."""
        return self.validate is not None or self.validate_every is not None

    @property
    def interval(self) -> int | None:
        """The steps between two validations; None: an epoch."""
        return None if self.validate_every in (None, EPOCH) else int(self.validate_every or 0)
