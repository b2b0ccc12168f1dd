"""Groups of weights, several classes, schedules: training by samples, tiles and pipeline equals a loop of PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from harness import TOLERANCE, plan_for, run, shared
from manyhands.executor.by_name import classes
from manyhands.executor.torch_optimizers import REFUSED_OPTIMIZERS
from manyhands.facts.plan import ByTiles, Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.job.given_optimizer import names_of_parameters, read_optimizer
from small_networks import batches_of, captured, module_of

STEPS, BATCH = 6, 6
OTHERS_OF = {
    "ASGD": {"t0": 2}, "Adafactor": {"lr": 0.05}, "Adagrad": {"lr_decay": 0.1}, "RMSprop": {"momentum": 0.5},
    "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip


def plan_of(how: str, graph: Graph) -> Plan:
    end, pooled = len(graph.network.layers), graph.network.find_layer("avg_pool2d")
    stages = {
        "samples": [shared(0, end, 3, 2, 1)],
        "pipeline": [shared(0, 4, BATCH // 2), shared(4, end, BATCH // 2)],
        "mixed": [shared(0, 4, 2, 1), shared(4, end, BATCH // 2)],
        "tiles": [
            Stage((0, pooled), ("t0", "t1"), ByTiles((2, 1))), Stage((pooled, end), ("t0",), Single()),
        ],
    }[how]  # fmt: skip
    return plan_for(graph, stages, batch_size=BATCH, micro_batches=2 if how in ("pipeline", "mixed") else 1)


def by_kind(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and kernels; biases and what norms have."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]


def no_decay(model: nn.Module) -> Any:
    large, small = by_kind(model)
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


def muon_and_adamw(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def head_alone(model: nn.Module) -> Any:
    """The rest is left out, and stays as it is."""
    return torch.optim.SGD([p for name, p in model.named_parameters() if name.startswith("e.")], lr=0.1)


def check(how: str, make: Callable[[nn.Module], Any], schedule: Callable[[Any], Any] | None = None) -> None:
    # mixed plans take batch norm over each micro-batch; the reference does too
    graph, batches = captured("still"), batches_of("still", STEPS, BATCH)
    reference, ours = (copy.deepcopy(module_of("still")) for _ in range(2))
    read = read_optimizer(ours, make(ours), schedule)
    data = read.optimizer.over(list(names_of_parameters(ours).values()))
    plan = plan_of(how, graph)
    made = make(reference)
    each = made if isinstance(made, list) else [made]
    scheduler = schedule(made) if schedule is not None else None
    trained, losses = {id(p) for o in each for g in o.param_groups for p in g["params"]}, []
    for x, y in batches:
        total, size = 0.0, BATCH // plan.micro_batches
        for first in range(0, BATCH, size):
            loss = functional.cross_entropy(reference(x[first : first + size]), y[first : first + size])
            (loss / plan.micro_batches).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) / plan.micro_batches
        for one in each:
            one.step()
        for scheduler_of_one in scheduler if isinstance(scheduler, list) else [scheduler]:
            if scheduler_of_one is not None:
                scheduler_of_one.step()
        reference.zero_grad()
        losses.append(total)
    if read.left_out:
        names = names_of_parameters(ours)
        frozen = {name for parameter in read.left_out for name in names[id(parameter)]}
        assert frozen == {name for name, p in reference.named_parameters() if id(p) not in trained}
        with read.frozen():
            graph = frozen_graph(ours)
    ran = run(graph, plan, batches, data, scheduling=read.scheduling)
    ran.assert_equals(reference.state_dict(), losses, TOLERANCE)
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, dict(module_of("still").named_parameters())[name]) != (id(parameter) in trained)


def frozen_graph(module: nn.Module) -> Graph:
    (x, y), *_ = batches_of("still", 1, 4, seed=99)
    return capture(module, x, loss=functional.cross_entropy, target=y, name="still", granularity="operators")


HOW = ["samples", "tiles", "pipeline", "mixed"]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("how", HOW)
def test_no_decay_for_biases_and_norms(how: str) -> None:
    check(how, no_decay)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_for_matrices_and_adamw_for_the_rest(how: str) -> None:
    check(how, muon_and_adamw)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("how", HOW)
def test_groups_with_a_schedule_of_functions(how: str) -> None:
    check(how, no_decay, lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.8**step, lambda step: 1 / (1 + step)]))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_a_schedule_for_each_of_two_optimizers() -> None:
    def schedules(both: Any) -> Any:
        return [lr_scheduler.StepLR(both[0], 2, 0.5), lr_scheduler.OneCycleLR(both[1], 0.02, total_steps=STEPS + 1)]

    check("samples", muon_and_adamw, schedules)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("how", ["samples", "pipeline"])
def test_what_is_left_out_stays_as_it_is(how: str) -> None:
    check(how, head_alone)


@pytest.mark.quick(every=13)
@pytest.mark.parametrize("name", sorted(set(classes(torch.optim, torch.optim.Optimizer)) - set(REFUSED_OPTIMIZERS)))
def test_every_class(name: str) -> None:
    def make(model: nn.Module) -> Any:
        kind, (large, small) = getattr(torch.optim, name), by_kind(model)
        if name == "Muon":
            return muon_and_adamw(model)
        groups = [{"params": large}, {"params": small, "lr": 0.02}]
        return kind(groups, **{"lr": 0.01, **OTHERS_OF.get(name, {})})

    check("samples", make)
