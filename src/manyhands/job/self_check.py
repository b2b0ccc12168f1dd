"""The self-check before a run's first step: compares the captured graph with the module under plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils.data import Dataset

from manyhands.data.loader import example
from manyhands.facts.network import DTYPE_BYTES, Network
from manyhands.facts.units import format_bytes
from manyhands.graph.graph import Graph
from manyhands.graph.verify import Verified, verify
from manyhands.job.evaluation import EXAMPLE_SAMPLES, floats_of
from manyhands.job.metrics import cast
from manyhands.job.workload import Workload
from manyhands.profiler.threads import with_threads
from manyhands.runtime.memory_kills import free_bytes
from manyhands.session.session import usable_cores
from manyhands.weights.mapped import is_mapped

LARGE_MACS = 500_000_000
"""Multiply-accumulates of a sample's forward pass above which two samples are compared: about a second of one core."""
_OUTPUTS_HELD = 4
"""Tensors of the size of the outputs that a loss works with: they, what it makes of them, and gradients of both."""


_CORES_PER_THREAD = 4
"""Cores of this machine for each thread that a self-check computes with. Workers that are measured meanwhile may take
all cores: threads that wait for each other and are paused in turn take several times as long as one alone."""


class SelfChecks:
    """Self-checks that are made one after another in a thread of their own; leaving the context waits for its end."""

    def __init__(self, checks: Sequence[Callable[[], Verified]]) -> None:
        self._pool = ThreadPoolExecutor(1, "self-check")
        self._made = self._pool.submit(lambda: _made_in_turn(checks))
        self._is_new = True

    @property
    def is_over(self) -> bool:
        return self._made.done()

    def result(self) -> list[Verified]:
        """Wait, and return the outcomes; raise what the checks have found."""
        return self._made.result()

    def new_results(self) -> list[Verified]:
        """Return the outcomes where nobody has had them yet."""
        results, is_new, self._is_new = self.result(), self._is_new, False
        return results if is_new else []

    def __enter__(self) -> SelfChecks:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _made_in_turn(checks: Sequence[Callable[[], Verified]]) -> list[Verified]:
    with with_threads(max(1, usable_cores() // _CORES_PER_THREAD)):
        return [check() for check in checks]


def self_check(graph: Graph, workload: Workload, requested: bool | None, data: Dataset[Any]) -> Callable[[], Verified]:
    """Return a function that compares loss and gradients of up to four samples of `data` with the module's own; a
    difference is a CaptureFailed. The samples are read now, and by this thread.

    `requested` None means: unless both steps together would take more than half of this machine's free memory.
    """
    if requested is False:
        return lambda: Verified(0, 0.0, 0.0, "verify=False")
    samples = _samples(workload.batch_size, graph.network)
    need, free = _bytes(graph, samples), free_bytes()
    if requested is None and need > free / 2:
        note = f"it would take {format_bytes(need)} of {format_bytes(free)} that are free here; verify=True insists"
        return lambda: Verified(0, 0.0, 0.0, note)
    inputs, targets = example(data, samples)
    floats = floats_of(workload.model)
    batch, target = cast(inputs, floats), cast(targets, floats)

    def check() -> Verified:
        with workload.computing():
            return verify(graph, workload.model, workload.loss, batch, target)

    return check


def _samples(batch_size: int, network: Network) -> int:
    """Return the number of samples to compare. Module and graph each run them, so half a batch takes no longer than one
    step of the run; with fewer than two, batch norms of plain numbers have no variance. Networks that take long are
    compared on two."""
    most = EXAMPLE_SAMPLES if sum(op.macs for op in network.ops) <= LARGE_MACS else 2
    return max(min(2, batch_size), min(most, batch_size // 2))


def _bytes(graph: Graph, samples: int) -> int:
    """Return the bytes of two gradients of every weight that is trained, and of what one step at a time holds for its
    backward pass. Weights that are mapped from a file are read layer by layer."""
    network = graph.network
    held = sum(layer.saved_fixed_bytes + samples * layer.saved_bytes for layer in network.layers)
    read = max((layer.parameter_bytes for layer in network.layers), default=0)
    trained = network.trained_bytes
    entering = graph.loss.inputs if graph.loss is not None else ()
    held += _OUTPUTS_HELD * samples * sum(spec.elements * DTYPE_BYTES[spec.dtype] for spec in entering)
    return 2 * trained + read * any(map(is_mapped, graph.state.values())) + held
