"""What a step costs beside arithmetic, in small."""

from __future__ import annotations

import pytest

from manyhands.executor.messages import expected_messages
from manyhands.schedule.policy import Schedule
from manyhands.session.session import Session
from manyhands_bench.tile.processor import bench_processor, messages_of
from manyhands_bench.tile.setup import TiledNetwork, TileVariant

pytestmark = pytest.mark.xdist_group("bench_tile")


@pytest.mark.parametrize("grid", [(2, 1), (2, 2)])
def test_every_message_that_some_device_expects_is_counted(subject: TiledNetwork, grid: tuple[int, int]) -> None:
    names = [f"device-{number}" for number in range(grid[0] * grid[1])]
    network = subject.graph.network
    schedule = Schedule(subject.tiles(names, TileVariant(grid)), network)
    expected = [expected_messages(actions, device, network) for device, actions in schedule.actions.items()]
    assert messages_of(schedule) == sum(map(len, expected)) > 0


@pytest.mark.slow
def test_the_cost_of_a_step_is_what_tiles_take_more(session: Session) -> None:
    figures = bench_processor(session, 1, 20, lambda text: None)
    cost, whole = figures["python_ms_per_step"], figures["processor_ms_per_step"]
    assert isinstance(cost, float)
    assert isinstance(whole, float)
    assert 0 < cost < whole
