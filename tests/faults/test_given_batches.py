"""Whatever happens to a worker while a DataLoader draws augmentations: what is run again has the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fault_cluster import PLANS, STEPS, Fault, FaultCluster, Reference, all_alike
from manyhands.data.batch_stream import BatchStream
from manyhands.data.kept import MOST_BYTES, KeptBatches
from manyhands.data.loaded import LoadedBatches
from real_runs import BATCH, Pictures

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c")


class Recorded(LoadedBatches):
    """Loaded batches, with what was taken of each step."""

    taken: dict[int, list[Tensor]]
    forgotten = 0

    def forget_before(self, step: int) -> None:
        super().forget_before(step)
        self.forgotten = max(self.forgotten, step)
        assert self.kept.steps[:1] in ((), (self.forgotten,))

    def __next__(self) -> Any:
        step, inputs, targets = super().__next__()
        self.taken.setdefault(step, []).append(inputs.clone())
        return step, inputs, targets


def noisy(workers: int) -> BatchStream:
    """Return a loader that draws an order, and noise for every sample; by generators of its own, as the workers here
    are threads that draw from the others."""
    generator, order = torch.Generator().manual_seed(11), torch.Generator().manual_seed(12)

    def with_noise(_: int, picture: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        return picture + 0.1 * torch.randn(picture.shape, generator=generator, dtype=picture.dtype), label

    loader = DataLoader(Pictures(change=with_noise), BATCH, shuffle=True, num_workers=workers, generator=order)
    stream = BatchStream(loader)
    stream.first_batch()
    return stream


def travelled(plan: str, names: tuple[str, ...], *faults: Fault, workers: int, **options: Any) -> Any:
    kept = KeptBatches(options.pop("folder", None), options.pop("most_bytes", MOST_BYTES))
    with FaultCluster(names, *faults) as cluster:
        loaded = Recorded(noisy(workers), STEPS, kept, wake=cluster.coordinator.wake)
        loaded.taken = {}
        trip = cluster.travel(PLANS[plan], loaded=loaded, **options)
    return trip, loaded


def undisturbed(plan: str, workers: int) -> tuple[Reference, dict[int, list[Tensor]]]:
    trip, loaded = travelled(plan, NAMES, workers=workers)
    return Reference(trip.outcome.losses, trip.outcome.state), loaded.taken


def assert_replayed(loaded: Recorded, wanted: dict[int, list[Tensor]]) -> None:
    again = [step for step, batches in loaded.taken.items() if len(batches) > 1]
    assert again, "something was run again"
    for step, batches in loaded.taken.items():
        for batch in batches:
            assert torch.equal(batch, wanted[step][0]), step


@pytest.mark.slow
@pytest.mark.quick("samples-0-files")
@pytest.mark.parametrize(
    ("plan", "workers", "keeps"),
    [("samples", 0, "files"), ("samples", 2, "memory"), ("pipeline", 0, "memory"), ("tiles", 2, "files")],
)
def test_what_is_replayed_is_bit_identical(plan: str, workers: int, keeps: str, tmp_path: Path) -> None:
    reference, wanted = undisturbed(plan, workers)
    fault = Fault("c", "backward", step=5)
    most_bytes = 0 if keeps == "files" else MOST_BYTES
    trip, loaded = travelled(plan, NAMES, fault, workers=workers, folder=tmp_path, most_bytes=most_bytes)
    assert len(fault.fired) == 1
    trip.check(reference, generations=2)
    assert_replayed(loaded, wanted)
    assert bool(loaded.kept.spilled) == (keeps == "files")
    assert list(tmp_path.iterdir()) == [], "files go with the run"


@pytest.mark.slow
def test_batches_since_the_last_checkpoint_are_kept_though_copies_were_safe() -> None:
    """Two are lost at once, with all copies of a stage: the run goes back before the step whose copies were safe."""
    reference, wanted = undisturbed("pipeline", 0)
    one = Fault("a", "backward", step=5)
    other = Fault("b", "survey", after=one)
    trip, loaded = travelled("pipeline", NAMES, one, other, workers=0, rewrite=all_alike)
    trip.check(reference)
    assert trip.facts("rewound"), "the checkpoint before the first step is where it went on from"
    assert len(loaded.taken[0]) == 2
    assert_replayed(loaded, wanted)


@pytest.mark.slow
def test_batches_are_forgotten_once_a_checkpoint_has_what_they_led_to() -> None:
    trip, loaded = travelled("samples", NAMES, workers=0, snapshots=(3,))
    assert trip.saved == [3, STEPS]
    assert len(loaded.taken) == STEPS
    assert loaded.forgotten == 3, "not those since, though their copies were safe"
