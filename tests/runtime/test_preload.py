"""Samples preloaded before the first step: the same weights to the bit, numbers in place of samples, and whoever has
them is not given them again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fault_cluster import PLANS, STEPS, Fault, FaultCluster, Trip, all_alike, reference
from manyhands.data.preload import Preload
from manyhands.executor import resident_dataset
from manyhands.executor.messages import COORDINATOR, ROW_BYTES, FeedPart
from manyhands.executor.rates import RateLayout
from manyhands.executor.resident_dataset import SAMPLES, ResidentDataset, resident_bytes, resident_key
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadData, OutOfMemory
from manyhands.facts.plan import ByTiles, Plan, Single, Stage
from real_runs import BATCH, LAYERS, SGD

pytestmark = pytest.mark.xdist_group("faults")  # the same reference
FED = {"samples": ("a", "b", "c"), "pipeline": ("a", "c"), "tiles": ("a", "b", "c"), "tiles+single": ("a", "b", "c")}
"""Who is given samples, or targets."""
TOTAL_BYTES = 8


def travelled(plan: str, *faults: Fault) -> tuple[Trip, Counter[str]]:
    given: Counter[str] = Counter()
    with FaultCluster(("a", "b", "c"), *faults) as cluster:
        before = cluster.transport.before_send

        def sending(source: str, target: str, step: int, topic: str) -> None:
            if topic == SAMPLES:
                assert source == COORDINATOR
                given[target] += 1
            if before is not None:
                before(source, target, step, topic)

        cluster.transport.before_send = sending
        trip = cluster.travel(PLANS[plan], is_preloaded=True)
    trip.check(reference(PLANS[plan].micro_batches), generations=1 + len(faults))
    return trip, given


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("plan", FED)
def test_numbers_travel_and_the_weights_are_the_same(plan: str) -> None:
    trip, given = travelled(plan)
    assert given == Counter(FED[plan])
    rows = {"pipeline": {"a": BATCH, "c": BATCH}, "samples": {"a": 5, "b": 4, "c": 3}}.get(plan)
    logs = trip.outcome.logs
    for name in logs:
        came = logs[name].received_bytes.get(COORDINATOR, 0) - STEPS * RateLayout.of(SGD).bytes
        if name not in FED[plan]:
            assert not came
        elif rows is not None:
            parts = 2 if plan == "samples" else 1  # the input, and the target of the same rows
            has_targets = plan == "samples" or name == "c"
            totals = PLANS[plan].micro_batches * TOTAL_BYTES if has_targets else 0  # of the loss: one number
            assert came == STEPS * (rows[name] * ROW_BYTES * parts + totals)


def test_after_a_loss_only_what_is_new_is_preloaded() -> None:
    """Shares of samples change, the samples do not; other tiles are other parts of them."""
    trip, given = travelled("samples", Fault("b", "backward", step=5))
    assert given == Counter(a=1, b=1, c=1)
    assert trip.outcome.recoveries
    _, given = travelled("tiles", Fault("b", "backward", step=5))
    assert given == Counter(a=2, b=1, c=2)


def by_tiles_or_alone(old: Plan, names: tuple[str, ...]) -> Plan:
    if len(names) == 1:
        return all_alike(old, names)
    stages = (Stage((0, 2), names, ByTiles((4, 4))), Stage((2, LAYERS), names[-1:], Single()))
    return Plan(old.network, old.batch_size, stages, order="sequential")


@pytest.mark.slow
def test_what_was_dropped_for_another_part_is_given_again() -> None:
    """Whole samples, then a tile of them that never arrives, then whole samples once more."""
    one = Fault("b", "backward", step=5)
    with FaultCluster(("a", "b", "c"), one, Fault("c", "prepare", after=one)) as cluster:
        trip = cluster.travel(PLANS["samples"], is_preloaded=True, rewrite=by_tiles_or_alone)
    trip.check(reference(1), generations=3)
    assert trip.plans[-1].devices == ("a",)
    assert [lost["devices"] for lost in trip.facts("lost")] == [["b"], ["c"]]


def test_a_resident_dataset_has_its_box_of_every_sample() -> None:
    part = FeedPart("x", Box.of((2, 4), (0, 3), (1, 5)), "float64")
    dataset = ResidentDataset("a", [part], 6, "key")
    assert dataset.bytes == resident_bytes([part], 6) == 6 * 3 * 4 * 8
    assert [tuple(one.shape) for one in dataset.arrays] == [(6, 3, 4)]
    dataset.arrays[0].copy_(torch.arange(6.0).reshape(6, 1, 1).expand(6, 3, 4))
    assert dataset.take(0, torch.tensor([5, 0, 5]))[:, 0, 0].tolist() == [5.0, 0.0, 5.0]
    for strange in (-1, 6):
        with pytest.raises(BadData, match=f"asked for sample {strange}; it has 6"):
            dataset.take(0, torch.tensor([0, strange]))


def test_a_key_tells_what_lies_there_and_not_whose_samples_are_next() -> None:
    part = FeedPart("x", Box.of((2, 4), (0, 3)), "float64")
    assert resident_key("k", [part]) == resident_key("k", [FeedPart("x", Box.of((0, 1), (0, 3)), "float64")])
    others = [FeedPart("y", part.box, "float64"), FeedPart("x", Box.of((2, 4), (1, 3)), "float64"),
              FeedPart("x", part.box, "float32")]  # fmt: skip
    assert len({resident_key("k", [one]) for one in (part, *others)} | {resident_key("l", [part])}) == 5


def test_what_a_device_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_dataset, "psutil", type("Full", (), {"virtual_memory": staticmethod(lambda: _Little)}))
    with pytest.raises(OutOfMemory, match=r"a was to be given 64 B of samples; it has room for 63 B") as raised:
        ResidentDataset("a", [FeedPart("x", Box.of((0, 1), (0, 2)), "float64")], 4, "key")
    assert "--feed start" in raised.value.hint


class _Little:
    available = 63


def test_a_preload_has_a_name_of_its_own() -> None:
    assert Preload(None, None, 1).key != Preload(None, None, 1).key
