"""Two stages that run ahead side by side, each with inputs from a silo of its own; a third joins them."""

from __future__ import annotations

import threading
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import JOIN_SECONDS, SGD, alone, relative
from manyhands.data.silo import Silo, SiloContent
from manyhands.executor.executor import Executor
from manyhands.executor.feeder import Feeder
from manyhands.executor.messages import COORDINATOR, ROW_BYTES
from manyhands.executor.optimizers import build
from manyhands.executor.options import ExecutorOptions
from manyhands.executor.round_result import RoundResult
from manyhands.facts.errors import BadData
from manyhands.facts.plan import Codec, Plan, Replay, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.schedule.policy import Schedule
from manyhands.transport.switchboard import Switchboard

SAMPLES, BATCH, STEPS = 40, 6, 12
HAVE = {"a": ("left",), "b": ("right",), "s": ("target",)}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3))
        self.right = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat((self.left(left), self.right(right)), 1))
        return out


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "left": torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64),
        "right": torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 3, (SAMPLES,), generator=generator),
    }


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(1)
    values = drawn()
    example = {name: values[name][:4] for name in ("left", "right")}
    return capture(
        Both().double(), example, loss=functional.cross_entropy, target=values["target"][:4], granularity="operators"
    )


def plan_of(graph: Graph, k: int, bits: int = 32) -> Plan:
    names = [layer.name for layer in graph.network.layers]
    right, joins = names.index("right.0"), names.index("cat")
    stages = (
        Stage((0, right), ("a",)),
        Stage((right, joins), ("b",)),
        Stage((joins, len(names)), ("s",), codec=Codec(bits)),
    )
    return Plan(graph.name, 4 * BATCH, stages, micro_batches=4, order="replay", replay=Replay(k, "window"))


def run(graph: Graph, plan: Plan, order: Tensor, *, spoil: bool = False) -> tuple[dict[str, Tensor], list[float], Any]:
    """Everybody has all samples, in an order of its own; `order`: those that are trained on, by number."""
    schedule = Schedule(resolve(plan, graph.network), graph.network)
    board = Switchboard([*plan.devices, COORDINATOR], limit_seconds=20.0)
    values, executors, held = drawn(), {}, {}
    for number, (device, names) in enumerate(HAVE.items()):
        own = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(number))
        silo = Silo(numpy.asarray(own), {name: values[name][own] for name in names})
        rows = torch.argsort(own)
        held[device] = SiloContent(frozenset(names), rows + SAMPLES if spoil and device == "b" else rows)
        weights = Weights.copied(graph, schedule.lowering.work[device].weights())
        options = ExecutorOptions(seed=7, silo=silo, local_names=frozenset(names))
        stepper = build(SGD, weights.trainable())
        executors[device] = Executor(graph, schedule, board.endpoints[device], weights, stepper, options)
        board.endpoints[device].mailbox.open(0, executors[device].expected(), 0, plan.steps_per_round)
    board.endpoints[COORDINATOR].mailbox.open(0, {})
    feeder = Feeder(graph, schedule, board.endpoints[COORDINATOR], local=held)
    results: dict[str, list[RoundResult]] = {device: [] for device in executors}
    errors: dict[str, BaseException] = {}

    def work(device: str) -> None:
        torch.set_num_threads(1)
        try:
            for step in range(0, STEPS, plan.steps_per_round):
                results[device].append(executors[device].round(step))
        except BaseException as error:
            errors[device] = error
            for endpoint in board.endpoints.values():
                endpoint.mailbox.interrupt(BadData("somebody else failed"))

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in executors]
    for step in range(STEPS):
        numbers = order[step * BATCH : (step + 1) * BATCH]
        first = step // plan.steps_per_round * plan.steps_per_round
        feeder.send(first, {"left": numbers, "right": numbers}, numbers, step - first)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive(), "a device hangs"
    for executor in executors.values():
        executor.close()
    if errors:
        raise errors.get("b") or next(iter(errors.values()))
    for device in executors:
        assert board.endpoints[COORDINATOR].sent_bytes[device] == STEPS * BATCH * ROW_BYTES
    found = {n: t.detach() for one in executors.values() for n, t in one.weights.tensors.items()}
    return found, [loss for one in results["s"] for loss in one.losses], results


def numbers() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.cat([torch.randperm(SAMPLES, generator=generator) for _ in range(2)])


@pytest.mark.slow
def test_at_k_0_it_is_one_device(graph: Graph) -> None:
    order, values = numbers(), drawn()
    weights, losses, _ = run(graph, plan_of(graph, 0), order)
    batches = []
    for step in range(STEPS):
        chosen = order[step * BATCH : (step + 1) * BATCH]
        inputs = {name: values[name][chosen] for name in ("left", "right")}
        batches.append((inputs, values["target"][chosen]))
    expected, told = alone(graph, batches, SGD, seed=7)
    assert losses == pytest.approx(told, rel=1e-12)
    for name, tensor in weights.items():
        assert relative(tensor, expected[name]) <= 1e-10, name


def test_each_runs_ahead_by_itself(graph: Graph) -> None:
    _, losses, results = run(graph, plan_of(graph, 2, bits=8), numbers())
    assert len(losses) == STEPS
    for edge in ("a", "b"):
        late = [one for result in results[edge] for one in result.staleness]
        assert len(late) == STEPS
        assert max(late) <= 2
    assert not any(result.staleness for result in results["s"])


def test_a_row_that_is_not_there_is_named(graph: Graph) -> None:
    with pytest.raises(BadData, match=r"asked for sample \d+; it has 40"):
        run(graph, plan_of(graph, 0), numbers(), spoil=True)
