"""`manyhands bench tile`, in small: every part of it runs, and says of exact things what is exact."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.facts.errors import BadValue
from manyhands.facts.plan import BySamples
from manyhands.session.session import Session
from manyhands.simulator.simulate import simulate
from manyhands_bench.tile.bench import bench_speed, bench_tile
from manyhands_bench.tile.groups import bench_bytes, bench_groups, gains
from manyhands_bench.tile.memory import PARTS, bare_import_bytes, bench_memory, resident_peaks
from manyhands_bench.tile.setup import TiledNetwork, TileVariant, square_grid, usable, workers
from manyhands_bench.tile.studies import Pis, draw_studies

pytestmark = pytest.mark.xdist_group("bench_tile")


@pytest.fixture(scope="module")
def subject() -> TiledNetwork:
    return TiledNetwork.of((3, 96, 96))


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with workers(2) as found:
        yield found


def quiet(text: str) -> None:
    """No progress."""


def test_grids_are_square_as_far_as_they_go() -> None:
    assert [square_grid(count) for count in (1, 2, 4, 6, 8, 16, 24, 7)] == [
        (1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (4, 4), (6, 4), (7, 1),
    ]  # fmt: skip


def test_workers_stay_on_their_cores(session: Session) -> None:
    cores = usable()
    for number, name in enumerate(session.cluster.names):
        process = session.coordinator.members[name].facts.pid
        threads = [int(thread) for thread in os.listdir(f"/proc/{process}/task")]
        assert len(threads) > 1
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {
            frozenset({cores[number % len(cores)]})
        }


def test_more_workers_than_cores_are_refused() -> None:
    with pytest.raises(BadValue, match=r"--workers 4096: this machine has \d+ core"):
        bench_tile(4096)


def test_bytes_are_the_plans(subject: TiledNetwork, session: Session) -> None:
    figures = bench_bytes(subject, session, [TileVariant((2, 1)), TileVariant((2, 1), beside_sums=True)], quiet)
    assert figures["bytes_match"] == 1
    assert figures["bytes_per_step"] == figures["bytes_per_step_planned"]
    weights = [w for w in subject.graph.network.weights.values() if w.trainable]
    assert figures["bytes_weights"] == 2 * sum(weight.bytes for weight in weights)
    parts = sum(int(figures[f"bytes_{kind}"]) for kind in ("input_output", "boundary", "statistics", "weights"))
    fed = parts - int(figures["bytes_per_step_planned"])
    assert fed >= sum(tensor.numel() * 4 for tensor in (subject.data.inputs, subject.data.targets))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")
@pytest.mark.slow
def test_speed_figures_fit_together(subject: TiledNetwork, session: Session) -> None:
    figures = bench_speed(subject, session, 1, 1, quiet)
    assert figures["efficiency_vs_limit_2"] == figures["speedup_2"] / figures["limit_2"]  # type: ignore[operator]
    ways = [f"speedup_2_grid_{grid}{where}" for grid in ("2x1", "1x2") for where in ("", "_beside_sums")]
    assert figures["speedup_2"] in [figures[way] for way in ways if way in figures]
    assert min(float(value) for value in figures.values() if not isinstance(value, str)) > 0


@pytest.mark.slow
def test_groupings_are_compared_with_both_extremes(subject: TiledNetwork, session: Session) -> None:
    figures = bench_groups(subject, session, (2, 1), 1, 1, 1, quiet)
    for link in ("fast", "slow"):
        over_one, over_every = (float(figures[f"grouping_gain_{link}_over_{x}"]) for x in ("one_group", "every_layer"))
        assert min(over_one, over_every) > 0
        assert figures[f"grouping_gain_{link}"] == max(over_one, over_every)
        assert "forward" in str(figures[f"grouping_{link}"])


def test_an_extreme_counts_in_its_faster_way() -> None:
    seconds = {"one group": 4.0, "one group each way": 3.0, "every layer": 2.0, "every layer, deltas": 5.0, "best": 1.0}
    assert gains(seconds, "best") == (3.0, 2.0)


@pytest.mark.slow
def test_memory_is_told_by_part(subject: TiledNetwork) -> None:
    figures = bench_memory(subject, True, quiet)
    for tiles in (1, 2, 4):
        parts = sum(int(figures[f"memory_{part}_bytes_{tiles}"]) for part in PARTS)
        assert parts == figures[f"memory_bytes_{tiles}"]
    assert float(figures["memory_ratio_4_without_weights"]) > float(figures["memory_ratio_2_without_weights"]) > 1.5


def test_resident_memory_is_more_than_torch(subject: TiledNetwork, session: Session) -> None:
    plan = subject.single(session.cluster.names[0])
    peaks = resident_peaks(subject, session, plan, 1)
    assert list(peaks) == [session.cluster.names[0]]
    assert peaks[session.cluster.names[0]] > bare_import_bytes() > 50e6


@pytest.mark.slow
def test_studies_are_drawn(subject: TiledNetwork, tmp_path: Path) -> None:
    figures = draw_studies(subject, tmp_path / "out", True, quiet)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["fig_5_2c.png", "fig_5_2de.png", "fig_6_1.png", "fig_6_3.png", "fig_6_4.png", "fig_6_6.png"]
    assert float(figures["fig_6_1_speedup_2x2_without_weights"]) > 1
    alone, shared = (float(figures[f"fig_6_6_batch_{size}_data_parallel_over_tiles"]) for size in (1, 16))
    assert alone > shared


def test_rivals_share_a_batch_by_samples_and_by_layers(subject: TiledNetwork) -> None:
    pis = Pis(subject, 2, 2)
    names = pis.cluster.names
    assert subject.by_samples(names, 2).devices == names[:2]
    assert subject.by_samples(names[:3], 4).stages[0].share == BySamples((2, 1, 1))
    ways = pis.ways(8)
    assert all(plan.devices == names and plan.batch_size == 8 for plan in ways.values())
    assert {name: plan.micro_batches for name, plan in ways.items()} == {
        "tiles": 1, "data parallel": 1, "layer partition": 8,
    }  # fmt: skip


def test_one_sample_keeps_one_core_busy_unless_it_is_cut(subject: TiledNetwork) -> None:
    pis = Pis(subject, 2, 2)
    found = {name: simulate(plan, pis.network, pis.cluster, keep_spans=False) for name, plan in pis.ways(1).items()}
    busy = {name: max(device.busy_seconds for device in one.devices.values()) for name, one in found.items()}
    assert found["data parallel"].seconds == busy["data parallel"] > 2 * busy["tiles"]
    assert found["layer partition"].seconds > 2 * busy["layer partition"]


def test_slots_of_one_device_share_its_port(subject: TiledNetwork) -> None:
    pis = Pis(subject, 2, 2)
    assert [device.host_name for device in pis.cluster.devices] == ["pi3-1", "pi3-1", "pi3-2", "pi3-2"]
