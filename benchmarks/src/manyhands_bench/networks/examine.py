"""The examination of one public network: captured, computes the same, can be shared in which ways, trains the same."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from manyhands_bench.networks.outcome import NetworkOutcome, Step
from manyhands_bench.networks.subject import Subject, call, in_float64, squared_error, target_for
from manyhands_bench.networks.trained import trained_difference

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
        subject, batch, output = _built(name)
        outcome.is_detector = subject.is_detector
    except Exception as error:
        outcome.not_run = f"{type(error).__name__}: {error}"[:500]
        return _finished(outcome, begin)
    _capture_and_plan(outcome, subject, batch, output, entering)
    if is_drawn:
        entering("train")
        with _noted(outcome, "train"):
            possible = [share for share in (preferred, *SHARES) if outcome.shares.get(share)]
            share = possible[0] if possible else "samples"
            outcome.trained_by = share
            outcome.trained_difference = trained_difference(name, share, folder)
    return _finished(outcome, begin)


def _built(name: str) -> tuple[Subject, Any, Any]:
    """Return a network in training mode, a batch for it and what it returns: in float64, or in its own type where the
    plain module does not run in float64."""
    subject = subject_named(name)
    double = replace(subject, batch=lambda samples: in_float64(subject.batch(samples)))
    try:
        subject.module.double().train()
        return _run_plain(double)
    except RuntimeError:
        own_type = subject_named(name)
        own_type.module.train()
        return _run_plain(own_type)


def _run_plain(subject: Subject) -> tuple[Subject, Any, Any]:
    batch = subject.batch(CAPTURED_SAMPLES)
    with torch.no_grad():
        return subject, batch, call(subject.module, batch)


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


def _capture_and_plan(
    outcome: NetworkOutcome, subject: Subject, batch: Any, output: Any, entering: Callable[[Step], None]
) -> None:
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
