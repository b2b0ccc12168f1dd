"""The examination of one public network: captured, computes the same, can be shared in which ways, trains the same."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.executor.messages import runs_here
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import BySamples, ByTiles, Plan
from manyhands.graph import ops
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.plans.planning import plan as make_plan
from manyhands_bench.networks.catalogue import subject_named
from manyhands_bench.networks.forward import forward_difference
from manyhands_bench.networks.outcome import TRAINED_LIMIT, NetworkOutcome, Step
from manyhands_bench.networks.subject import Subject, call, in_float64, squared_error, target_for
from manyhands_bench.networks.trained import reordered_difference, trained_difference

CAPTURED_SAMPLES, COMPARED_SAMPLES, PLANNED_SAMPLES = 3, 2, 4
"""Samples of the batch that is captured, of the one on which graph and module are compared, and of a plan's."""
SHARES = ("samples", "pipeline", "tiles")
DEVICE_BYTES = 10**12
"""The memory of each planned device: whether a network fits is another question."""
Report = Callable[[NetworkOutcome], None]


def examine(name: str, preferred: str, folder: Path, report: Report, is_drawn: bool = False) -> NetworkOutcome:
    """Return the outcome of one network; it is passed to `report` before each step too.

    name        its library and its name there
    preferred   the way of sharing that it is trained with, if there is such a plan
    folder      where a training keeps its files
    is_drawn    whether it is trained
    """
    outcome = NetworkOutcome(name, is_drawn=is_drawn)
    begin = time.monotonic()

    def entering(step: Step) -> None:
        outcome.step, outcome.seconds = step, time.monotonic() - begin
        report(outcome)

    entering("build")
    torch.manual_seed(0)
    try:
        built = _built(name)
        outcome.is_detector = built.subject.is_detector
    except Exception as error:
        outcome.not_run = f"{type(error).__name__}: {error}"[:500]
        return _finished(outcome, begin)
    with default_dtype(built.default_dtype):
        _capture_and_plan(outcome, built, entering)
        if is_drawn:
            entering("train")
            with _noted(outcome, "train"):
                possible = [share for share in (preferred, *SHARES) if outcome.shares.get(share)]
                share = possible[0] if possible else "samples"
                outcome.trained_by = share
                outcome.trained_difference = trained_difference(name, share, folder)
                if not outcome.trained_difference <= TRAINED_LIMIT:
                    outcome.reordered_difference = reordered_difference(name)
    return _finished(outcome, begin)


@dataclass(frozen=True)
class _Built:
    """A network in training mode, a batch for it, and what it returns."""

    subject: Subject
    batch: Any
    output: Any
    default_dtype: torch.dtype
    """The type of the tensors that the module makes without naming one."""


def _built(name: str) -> _Built:
    """Return a network in float64, where it makes tensors of the default type as it runs with that default; where it
    does not run so either, in its own type."""
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype), contextlib.suppress(RuntimeError, TypeError):
            subject = subject_named(name)
            subject.module.double()
            return _run_plain(replace(subject, batch=_doubled(subject)))
    return _run_plain(subject_named(name))


def _doubled(subject: Subject) -> Callable[[int], Any]:
    return lambda samples: in_float64(subject.batch(samples))


def _run_plain(subject: Subject) -> _Built:
    subject.module.train()
    batch = subject.batch(CAPTURED_SAMPLES)
    with torch.no_grad():
        return _Built(subject, batch, call(subject.module, batch), torch.get_default_dtype())


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make this the type of new tensors for which none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _finished(outcome: NetworkOutcome, begin: float) -> NetworkOutcome:
    outcome.seconds, outcome.is_complete = time.monotonic() - begin, True
    return outcome


@contextlib.contextmanager
def _noted(outcome: NetworkOutcome, step: Step) -> Iterator[None]:
    """Add an error of this step to the outcome and go on: whatever it is, it is a result."""
    try:
        yield
    except Exception as error:
        outcome.add_problem(step, error)


def _capture_and_plan(outcome: NetworkOutcome, built: _Built, entering: Callable[[Step], None]) -> None:
    subject, batch, output = built.subject, built.batch, built.output
    outcome.is_convolutional = looks_convolutional(subject.module)
    entering("capture")
    graph: Graph | None = None
    with _noted(outcome, "capture"):
        if subject.is_detector:
            graph = capture(subject.module, batch, name=outcome.name)
        else:
            target = target_for(output)
            graph = capture(subject.module, batch, loss=squared_error, target=target, name=outcome.name)
        outcome.operators = len(graph.network.ops)
    if graph is None:
        return
    outcome.captured = True
    outcome.is_convolutional = is_convolutional(graph)
    entering("forward")
    with _noted(outcome, "forward"):
        outcome.forward_difference = forward_difference(graph, subject.module, subject.batch(COMPARED_SAMPLES))
    for share in SHARES:
        entering(share)  # type: ignore[arg-type]
        with _noted(outcome, share):  # type: ignore[arg-type]
            outcome.shares = {**outcome.shares, share: False}
            plan = planned(graph, share)
            outcome.shares = {**outcome.shares, share: True}
            if share == "tiles":
                outcome.tiled_layers = tiled_layers(plan, graph)


def planned(graph: Graph, share: str) -> Plan:
    """Return a plan that shares a network in this way over two devices, or raise the reason that there is none."""
    cluster = Cluster.local(2, memory_bytes=DEVICE_BYTES)
    plan = make_plan(graph.network, cluster, batch_size=PLANNED_SAMPLES, strategy=share).plan
    runs_here(plan, graph.network)
    if not shares_by(plan, share):
        raise BadPlan(f"The planner's plan by '{share}' has no two devices that share so.")
    return plan


def shares_by(plan: Plan, share: str) -> bool:
    """Return whether two devices or more take part, in the way named."""
    if share == "pipeline":
        return len({device for stage in plan.stages for device in stage.devices}) > 1
    kind = {"samples": BySamples, "tiles": ByTiles}[share]
    return any(isinstance(stage.share, kind) and len(stage.devices) > 1 for stage in plan.stages)


def tiled_layers(plan: Plan, graph: Graph) -> float:
    """Return the part of the layers that are in stages of tiles."""
    tiled = 0
    for stage in plan.stages:
        first, last = stage.layers
        assert isinstance(first, int), "a plan of the planner is resolved"
        assert isinstance(last, int), "a plan of the planner is resolved"
        tiled += last - first if isinstance(stage.share, ByTiles) else 0
    return tiled / len(graph.network.layers)


def is_convolutional(graph: Graph) -> bool:
    """Return whether a captured graph has convolutions, and neither attention nor a softmax."""
    targets = {node.target for node in graph.nodes}
    attends = any("attention" in target or "softmax" in target for target in targets)
    return not attends and any("conv" in target for target in targets & ops.HEAVY)


def looks_convolutional(module: nn.Module) -> bool:
    """Return whether a module that was not captured contains convolutions and no attention, by its parts' classes."""
    names = {type(part).__name__.lower() for part in module.modules()}
    attends = any("attention" in name or "attn" in name or "softmax" in name for name in names)
    return not attends and any("conv" in name for name in names)
