"""Figures of what a step costs a worker's processor beside arithmetic: the interpreter, messages, sums of gradients.

The same network on a small image has the same operators and messages in a step, and next to no arithmetic. So the
processor time of a tile's worker above that of a bare part's is that cost, and hardly depends on how fast the machine's
cores are at the moment. On a large image it is more: what computing has pushed out of the caches is read again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import psutil

from manyhands.schedule.actions import Reduce, Send
from manyhands.schedule.policy import Schedule
from manyhands.schedule.reduction import message_counts
from manyhands.session.session import Session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.tile.setup import WARM_UP_STEPS, BareParts, TiledNetwork, TileVariant, square_grid

SMALL_SHAPE = (3, 96, 96)
BLOCKS, STEPS = 5, 40


def bench_processor(session: Session, blocks: int, steps: int, say: Progress) -> Figures:
    """Return the processor time of a step in tiles above a bare part's, in milliseconds, and its messages."""
    subject = TiledNetwork.of(SMALL_SHAPE)
    names = session.cluster.names
    grid = square_grid(len(names))
    tiles = subject.tiles(names, TileVariant(grid))
    ours, bare = [], []
    with BareParts.of(subject, grid) as parts:
        for block in range(blocks):
            say(f"processor time of a step, block {block + 1} of {blocks}")
            few, more = (
                _seconds([session], partial(subject.run, session, tiles, count, laid=True))
                for count in (WARM_UP_STEPS, WARM_UP_STEPS + steps)
            )
            ours.append((more - few) / steps)
            few, more = (_seconds(parts.sessions, partial(parts.step_seconds, count)) for count in (0, steps))
            bare.append((more - few) / steps)
    schedule = Schedule(tiles, subject.graph.network)
    return {
        "python_ms_per_step": 1e3 * statistics.median(tile - part for tile, part in zip(ours, bare)),
        "processor_ms_per_step": 1e3 * statistics.median(ours),
        "messages_per_step": messages_of(schedule),
        "python_setting": f"{subject}, {len(names)} tiles: processor time of a worker's step above that of a bare part "
        f"of {'x'.join(map(str, parts.subject.shape))}, all threads; {blocks} blocks of {steps} steps, less those of "
        f"runs without them; tiles {_listed(ours)} ms, parts {_listed(bare)} ms; messages of all devices",
    }


def messages_of(schedule: Schedule) -> int:
    """Return the messages of all devices in a round."""
    actions = [action for listed in schedule.actions.values() for action in listed]
    sums = {action for action in actions if isinstance(action, Reduce)}
    return sum(isinstance(action, Send) for action in actions) + sum(
        int(message_counts(reduce).sum()) // 2 for reduce in sums
    )


def _seconds(sessions: Sequence[Session], run: Callable[[], object]) -> float:
    """Return the processor time of a run on each worker of some sessions, on average."""
    workers = [
        psutil.Process(process) for session in sessions for process in session.coordinator.local.running().values()
    ]
    before = sum(_processor_seconds(worker) for worker in workers)
    run()
    return (sum(_processor_seconds(worker) for worker in workers) - before) / len(workers)


def _processor_seconds(worker: psutil.Process) -> float:
    times = worker.cpu_times()
    return float(times.user + times.system)


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{1e3 * each:.3g}" for each in seconds)
