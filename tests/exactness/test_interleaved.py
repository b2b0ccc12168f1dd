"""Two samples under way (DECNN Algorithm 1), executed: the same answers, in order."""

from __future__ import annotations

import threading

import pytest
import torch

from channel_networks import decoupled
from harness import own_weights, relative, schedule_of
from manyhands.executor.executor import Executor
from manyhands.executor.feeder import Feeder
from manyhands.executor.messages import COORDINATOR, plan_bytes
from manyhands.executor.options import ExecutorOptions
from manyhands.facts.plan import ByChannels, ByTiles, Plan, Share, Stage
from manyhands.graph.graph import Graph
from manyhands.graph.tape import outputs_of
from manyhands.schedule.actions import Forward, parse_action
from manyhands.transport.switchboard import Switchboard

ROUND = 4
SAMPLES = 2 * ROUND


def stream(
    graph: Graph, share: Share, count: int, samples: list[torch.Tensor], homes: dict[str, str] | None = None
) -> tuple[list[torch.Tensor], list[Executor]]:
    """Rounds of an interleaved stream on threads of this process; a round that is not full ends early."""
    devices = tuple(f"d{number}" for number in range(count))
    network = graph.network
    end, last = network.find_layer("hidden"), len(network.layers)
    stages = [Stage((0, last), devices, share)]
    if isinstance(share, ByTiles):  # the rest by channels, on the same devices
        stages = [Stage((0, end), devices, share), Stage((end, last), devices, ByChannels((1,) * count))]
    plan = Plan(network.name, ROUND, tuple(stages), ROUND, "interleave", homes=homes or {})
    schedule = schedule_of(graph, plan)
    board = Switchboard([*devices, COORDINATOR], limit_seconds=20.0)
    executors = []
    for device in devices:
        weights = own_weights(graph, schedule.lowering.work[device])
        options = ExecutorOptions(with_targets=False, memory_step=0)
        executor = Executor(graph, schedule, board.endpoints[device], weights, None, options)
        board.endpoints[device].mailbox.open(0, executor.expected(), 0, ROUND)
        executors.append(executor)
    feeder = Feeder(graph, schedule, board.endpoints[COORDINATOR], with_targets=False)
    board.endpoints[COORDINATOR].mailbox.open(0, feeder.expected_results(), 0, ROUND)
    errors: list[BaseException] = []

    def work(executor: Executor) -> None:
        torch.set_num_threads(1)
        try:
            for step in range(0, len(samples), ROUND):
                executor.round(step, min(ROUND, len(samples) - step))
        except BaseException as error:
            errors.append(error)
            board.endpoints[COORDINATOR].mailbox.interrupt(error)

    threads = [threading.Thread(target=work, args=(executor,), daemon=True) for executor in executors]
    for thread in threads:
        thread.start()
    answers = []
    for step in range(0, len(samples), ROUND):
        for place, sample in enumerate(samples[step : step + ROUND]):
            feeder.send(step, sample, place=place)
        for place in range(len(samples[step : step + ROUND])):
            answers.append(outputs_of(graph, feeder.gather(step, place)))
        board.endpoints[COORDINATOR].mailbox.begin_step(step + ROUND)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not errors
    for executor in executors:
        executor.close()
    return answers, executors


@pytest.mark.quick(every=9)
@pytest.mark.parametrize(
    ("share", "count"), [(ByChannels((1, 1)), 2), (ByChannels((1, 2, 1)), 3), (ByTiles((1, 1)), 2)], ids=str
)
@pytest.mark.parametrize(("samples", "home"), [(SAMPLES, ""), (SAMPLES - 1, ""), (SAMPLES - 1, "d1")])
def test_answers_come_in_order_and_are_right(share: Share, count: int, samples: int, home: str) -> None:
    """Whoever has the samples, if not all who read them, sends each on when it is begun: a last round has fewer."""
    model, graph = decoupled()
    torch.manual_seed(9)
    given = [torch.randn(1, 3, 8, 8, dtype=torch.float64) for _ in range(samples)]
    answers, executors = stream(graph, share, count, given, dict.fromkeys(graph.network.inputs, home) if home else None)
    assert len(answers) == samples
    for sample, answer in zip(given, answers):
        with torch.no_grad():
            assert relative(answer, model(sample)) <= 1e-12
    planned = plan_bytes({one.device: tuple(one.schedule.every_action(one.device)) for one in executors}, graph.network)
    for executor in executors:
        sent = {to: size for to, size in executor.log.sent_bytes.items() if to != COORDINATOR}
        expected = {to: size * samples // ROUND for (source, to), size in planned.items() if source == executor.device}
        assert sent == expected
        assert executor.log.samples == samples
        assert not any(runner.in_flight for runner in executor.runners.values())
        if len(executor.runners) == 1:
            assert_in_turn(executor)


def assert_in_turn(executor: Executor) -> None:
    """From the log of its last round: no sample was further than the one before it."""
    done: dict[int, int] = {}
    for text in executor.log.actions:
        action = parse_action(text)
        if isinstance(action, Forward):
            number = action.micro_batch
            assert number == 0 or done.get(number - 1, 0) >= action.last
            assert number < 2 or done.get(number - 2) == len(executor.schedule.network.ops)
            done[number] = max(done.get(number, 0), action.last)
