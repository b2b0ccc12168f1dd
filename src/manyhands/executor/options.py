"""The options of a device for a run, beside graph, plan and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manyhands.data.silo import Silo
from manyhands.executor.collectives import Collectives
from manyhands.executor.resident_dataset import ResidentDataset
from manyhands.facts.clipping import Clipping
from manyhands.facts.profile import Kernel


@dataclass(frozen=True)
class ExecutorOptions:
    """The options of one executor."""

    seed: int = 0
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    torch_device: str = "cpu"
    trace_steps: range = range(0)
    """Steps whose actions are kept with their times."""
    memory_step: int = -1
    """The step in which tensor bytes are counted; it takes a little longer."""
    watch_every: int = 0
    """One round in so many is watched while the run goes on; 0: none."""
    with_targets: bool = True
    slowdown: float = 1.0
    """Computing takes so many times as long as it must: this device stands for a slower one."""
    clipping: Clipping | None = None
    """The limits of gradients; None: there are none."""
    scales_loss: bool = False
    """Whether the loss is scaled, and steps whose gradients are not finite are skipped (loss_scale.py)."""
    ema: float | None = None
    """The decay of an average of the weights; None: there is none."""
    silo: Silo | None = None
    local_names: frozenset[str] = frozenset()
    """Inputs and targets that the device has itself: the coordinator sends the numbers of the rows."""
    resident: ResidentDataset | None = None
    """The memory of those that were preloaded here; None: they are in the silo."""
    is_exact: bool = False
    """Whether a GPU waits for each loss before it goes on with the next step, so that what is not finite is found where
    it begins."""
    is_scheduled: bool = False
    """Whether the coordinator sends learning rates, and what else schedules change, with every step."""
    collectives: Collectives | None = None
    """What carries out reductions in place of messages; None: all are messages."""
    gpu_peers: frozenset[str] = frozenset()
    """The workers that compute on the same GPU: tensors for them stay there."""
