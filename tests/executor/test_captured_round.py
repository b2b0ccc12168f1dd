"""Rounds that a GPU launches as one CUDA graph, against rounds that launch every kernel: skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hand_made import cluster
from manyhands.executor.executor import Executor
from manyhands.executor.feeder import Feeder
from manyhands.executor.messages import COORDINATOR
from manyhands.executor.optimizers import build
from manyhands.executor.options import ExecutorOptions
from manyhands.facts.errors import NotFinite
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.schedule.policy import Schedule
from manyhands.transport.switchboard import Switchboard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
BATCH, STEPS = 8, 9


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.c = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(self.drop(torch.relu(self.b(self.a(x))).mean((2, 3))))
        return out


class Run:
    """An executor on the GPU, fed by hand."""

    def __init__(self, graph: Graph, *, micro_batches: int = 1, is_exact: bool = False) -> None:
        stage = Stage((0, len(graph.network.layers)), ("a",), Single())
        plan = resolve(Plan(graph.network.name, BATCH, (stage,), micro_batches), graph.network, cluster(("a",)))
        schedule = Schedule(plan, graph.network)
        self.board = Switchboard(["a", COORDINATOR], limit_seconds=60.0)
        self.weights = Weights.copied(graph, device=torch.device("cuda"))
        stepper = build(Optimizer("Adam", lr=0.01), self.weights.trainable())
        options = ExecutorOptions(torch_device="cuda", is_exact=is_exact)
        self.executor = Executor(graph, schedule, self.board.endpoints["a"], self.weights, stepper, options)
        self.board.endpoints["a"].mailbox.open(0, self.executor.expected_by_step())
        self.board.endpoints[COORDINATOR].mailbox.open(0, {})
        self.feeder = Feeder(graph, schedule, self.board.endpoints[COORDINATOR])

    def train(self, batches: list[tuple[torch.Tensor, torch.Tensor]], *, ahead: int = 1) -> list[float]:
        losses, fed, waiting = [], 0, None
        for step in range(len(batches)):
            while fed < min(len(batches), step + ahead):
                self.feeder.send(fed, *batches[fed])
                fed += 1
            result = self.executor.round(step)
            if waiting is not None:
                self.executor.settle(waiting)
                losses += waiting.losses
            waiting = result
        assert waiting is not None
        self.executor.settle(waiting)
        return losses + waiting.losses


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(BATCH, 3, 6, 6, dtype=torch.float64), torch.arange(BATCH) % 4) for _ in range(STEPS)]


def captured() -> Graph:
    torch.manual_seed(0)
    return capture(Network().double(), data()[0][0], loss=F.cross_entropy, target=data()[0][1])


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("ahead", [1, 3])
def test_it_trains_as_every_kernel_by_itself(micro_batches: int, ahead: int) -> None:
    graph = captured()
    usual = Run(graph, micro_batches=micro_batches, is_exact=True)
    launched = Run(graph, micro_batches=micro_batches)
    losses, others = usual.train(data()), launched.train(data(), ahead=ahead)
    assert usual.executor.part.captured is None
    assert launched.executor.part.captured is not None
    assert launched.executor.part.captured.is_there, launched.executor.part.captured.failure
    assert torch.allclose(torch.tensor(losses), torch.tensor(others), rtol=0, atol=1e-10)
    for name, weight in usual.weights.tensors.items():
        difference = (weight - launched.weights.tensors[name]).abs().max()
        assert difference <= 1e-10 * max(1.0, float(weight.abs().max())), name
    assert launched.executor.log.rounds == STEPS
    assert launched.executor.log.same_actions == STEPS


def test_draws_differ_from_step_to_step() -> None:
    """A graph whose dropout drew the same again would give one loss for one batch; weights stay as they are here."""
    run = Run(captured())
    for weight in run.weights.tensors.values():
        weight.requires_grad_(weight.requires_grad)
    run.executor.updates.stepper.step = lambda: None  # type: ignore[union-attr, method-assign]
    batch = data()[0]
    losses = run.train([batch] * STEPS)
    assert run.executor.part.captured is not None
    assert run.executor.part.captured.is_there
    assert len(set(losses[4:])) == STEPS - 4


def test_what_cannot_be_captured_runs_as_before() -> None:
    graph = captured()
    usual, other = Run(graph, is_exact=True), Run(graph)
    act = other.executor._act

    def asks_the_gpu(action: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.zeros(1, device="cuda").item()
        act(action)  # type: ignore[arg-type]

    other.executor._act = asks_the_gpu  # type: ignore[assignment, method-assign]
    losses, others = usual.train(data()), other.train(data())
    assert other.executor.part.captured is not None
    assert other.executor.part.captured.failure
    assert torch.allclose(torch.tensor(losses), torch.tensor(others), rtol=0, atol=1e-10)


def test_a_loss_that_is_not_finite_is_noticed_a_round_later() -> None:
    batches = data()
    batches[6][0][0, 0, 0, 0] = torch.nan
    with pytest.raises(NotFinite, match="nan at step 6"):
        Run(captured()).train(batches)
