"""Kills in the lab: which trips are still to be made, and the figures of those that were; what gathering sends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import BadFile
from manyhands.facts.plan import Plan, Stage
from manyhands.files.documents import write_document
from manyhands.runtime.order import RunState
from manyhands.runtime.state import Located
from manyhands_bench.recovery.gathering_job import _all_from
from manyhands_bench.recovery.lab import STORED, LabExtent, LabTrip, StoredTrips, _stored, figures_of

EXTENT = LabExtent(repeats=2)
DEVICES = ["a", "b"]


def trip(device: str, how: str, repeat: int = 0, seconds: float = 1.0, moved: int = 10**6) -> LabTrip:
    return LabTrip(device, how, repeat, seconds, 0.1, 0.0, 0, moved, 3.0, 2.0, 0, 4, "[0, 5) on c", [-1.0, 5.0])


def stored(*trips: LabTrip) -> StoredTrips:
    plan = Plan("tiny", 8, (Stage((0, 2), ("a",)), Stage((2, 5), ("b",))), micro_batches=2)
    return StoredTrips(str(EXTENT.setting), 4.8, plan.to_dict(), DEVICES, 1e6, list(trips))


def test_trips_that_are_there_are_not_repeated_and_ways_take_turns() -> None:
    left = stored(trip("a", "light")).missing(EXTENT)
    assert len(left) == 2 * len(DEVICES) * 2 - 1
    assert left[0] == (0, "a", "heavy")
    assert [how for repeat, device, how in left if (repeat, device) == (0, "b")] == ["heavy", "light"]


def test_ratios_are_taken_device_by_device() -> None:
    found = figures_of(
        stored(
            trip("a", "light", seconds=1.0), trip("a", "heavy", seconds=10.0, moved=40 * 10**6),
            trip("b", "light", seconds=4.0), trip("b", "heavy", seconds=16.0, moved=60 * 10**6),
        ), EXTENT,
    )  # fmt: skip
    assert found["lab_light_vs_heavy"] == pytest.approx(7.0)
    assert (found["lab_light_vs_heavy_least"], found["lab_light_vs_heavy_most"]) == (4.0, 10.0)
    assert found["lab_megabytes_moved_light"] == pytest.approx(1.0)
    assert found["lab_megabytes_moved_heavy"] == pytest.approx(50.0)
    assert found["lab_throughput_after"] == pytest.approx(1.0)
    assert found["lab_trips"] == 4


def test_a_device_that_was_not_killed_in_every_way_does_not_count() -> None:
    assert "lab_skipped" in figures_of(stored(trip("a", "light")), EXTENT)


def test_a_folder_of_another_setting_is_refused(tmp_path: Path) -> None:
    write_document(tmp_path / STORED, msgspec.to_builtins(stored(trip("a", "light"))))
    again = _stored(tmp_path, EXTENT)
    assert again is not None
    assert again.trips == [trip("a", "light")]
    other = stored()
    other.setting = "another"
    write_document(tmp_path / STORED, msgspec.to_builtins(other))
    with pytest.raises(BadFile, match="another"):
        _stored(tmp_path, EXTENT)


def test_all_that_was_gathered_is_given_out_by_its_home_alone() -> None:
    located = Located.at_coordinator(RunState({"x": torch.zeros(2), "y": torch.zeros(3)}))
    located.holders = {"weight:x": ("a", "home"), "weight:y": (COORDINATOR,)}
    found = _all_from(located, "home")
    assert found.holders == {"weight:x": ("home",), "weight:y": (COORDINATOR,)}
    assert found.assigned({"a": ["weight:x"], "home": ["weight:x"]}) == {
        "a": {"home": ("weight:x",)}, "home": {"home": ("weight:x",)},
    }  # fmt: skip
