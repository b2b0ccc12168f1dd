"""One generation that a worker takes part in: the command for it, and the state that was offered and is to come."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from manyhands.executor.executor import Executor
from manyhands.facts.errors import ManyhandsError
from manyhands.runtime.control_messages import Prepare
from manyhands.runtime.control_parts import Seen, TensorEntry
from manyhands.schedule.glimpse import thinned


class Stopped(ManyhandsError):
    """The coordinator has stopped the generation: nothing is to be reported."""


@dataclass
class Assignment:
    """A generation that this worker takes part in."""

    command: Prepare
    executor: Executor | None
    """None: it only gives away what it has."""
    listed: tuple[TensorEntry, ...] | None = None
    """The tensors of its state as last reported; None: nothing was reported yet. A device without weights reports
    an empty tuple, which is not the same."""
    offered: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The tensors of each copy that was offered, in the order they travel."""
    arriving: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Source -> memory for the tensors that it sends at the start."""

    @property
    def generation(self) -> int:
        return self.command.generation


def seen_round(executor: Executor) -> Seen | None:
    """Return what this device did in the round that has ended; None where the round is not watched."""
    recorder = executor.recorder
    if not recorder.is_watched:
        return None
    import psutil

    return Seen(thinned(recorder.glimpses), int(psutil.Process().memory_info().rss), recorder.log.peak_bytes)
