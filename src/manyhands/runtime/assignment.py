"""One generation that a worker takes part in: the command for it, and what the worker has sent so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import torch

from manyhands.executor.executor import Executor
from manyhands.executor.log import DeviceLog
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
    state_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of state sent to each peer."""

    @property
    def generation(self) -> int:
        return self.command.generation

    def sent_bytes(self, sent: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes sent to each peer for the plan: all those sent, without copies of state."""
        counts = {to: count - self.state_bytes.get(to, 0) for to, count in sent.items()}
        return {to: count for to, count in counts.items() if count}

    def log(self, executor: Executor) -> DeviceLog:
        """Return the device's log, with the bytes of state kept apart from those that the plan sends."""
        log = executor.log
        return msgspec.structs.replace(
            log, sent_bytes=self.sent_bytes(log.sent_bytes), state_bytes=dict(self.state_bytes)
        )


def seen_round(executor: Executor) -> Seen | None:
    """Return what this device did in the round that has ended; None where the round is not watched."""
    recorder = executor.recorder
    if not recorder.is_watched:
        return None
    import psutil

    return Seen(thinned(recorder.glimpses), int(psutil.Process().memory_info().rss), recorder.log.peak_bytes)
