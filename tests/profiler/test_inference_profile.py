"""Profiles of inference: forward only, in evaluation mode, kept apart from those of training."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import WorkerLost
from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.graph import Graph
from manyhands.profiler.clock import TimedTrial, stopwatch
from manyhands.profiler.kernels import cheapest_path, choose_kernels
from manyhands.profiler.measure import _Layers, measure_network
from manyhands.profiler.operators import OperatorSeconds, measure_operators
from manyhands.profiler.steps import random_inputs
from manyhands.profiler.store import profile_network, profile_path
from manyhands.profiler.this_machine import identify
from manyhands.runtime import timing_here
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.joining import Joining
from manyhands.runtime.measuring import measure_on
from manyhands.runtime.worker import Worker
from manyhands.session.measuring import profile_place
from manyhands.session.session import Session
from manyhands.transport.transport import TcpTransport


@pytest.fixture
def no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a backward pass")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    monkeypatch.setattr(torch.autograd, "backward", refuse)


@pytest.mark.slow
def test_only_forward_takes_time(tiny: Graph, no_backward: None) -> None:
    profile = measure_network(tiny, ladder=(1, 2), threads=1, seconds=2.0, training=False)
    profile.check_matches(tiny.network)
    for layer in profile.layers:
        assert all(timing.forward_seconds > 0 and timing.backward_seconds == 0 for timing in layer.ladder)


def test_training_runs_backward(tiny: Graph, no_backward: None) -> None:
    with pytest.raises(AssertionError, match="a backward pass"):
        measure_network(tiny, ladder=(1,), threads=1, kernels={})


class Moody(nn.Module):
    """Answers differently in training: running statistics move, and half of everything is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.norm(x)))
        return out


def test_it_is_measured_in_evaluation_mode() -> None:
    graph = capture(Moody(), torch.zeros(2, 8), name="moody")
    layers = _Layers(graph, {}, torch.device("cpu"), training=False)
    before = {name: tensor.clone() for name, tensor in layers.weights.tensors.items()}
    found = layers.run(random_inputs(graph, 4), 4)  # one sample would do: no statistics are taken
    layers.run(random_inputs(graph, 1), 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in layers.weights.tensors.items())
    assert len(found.forward) == len(found.backward) == len(graph.network.layers)
    training = _Layers(graph, {}, torch.device("cpu"))
    training.run(random_inputs(graph, 4), 4)
    assert any(not torch.equal(before[name], tensor) for name, tensor in training.weights.tensors.items())


def test_an_inference_holds_less_than_a_training_step(tiny: Graph) -> None:
    peaks = [
        measure_network(tiny, ladder=(8,), kernels={}, threads=1, repeats=1, seconds=0.1, training=training)
        for training in (True, False)
    ]
    assert peaks[1].peak_bytes["8"] < 0.7 * peaks[0].peak_bytes["8"]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("has_acl", [False, True], ids=["x86", "aarch64"])
def test_kernels_are_chosen_by_the_forward_pass(
    tiny: Graph, no_backward: None, monkeypatch: pytest.MonkeyPatch, has_acl: bool
) -> None:
    """A timer that finds channels_last fast, whatever is run: nothing but forward passes is.

    Where oneDNN has the Arm Compute Library, linear layers have a choice of kernels too. To them the timer shows no
    gain, so that they keep PyTorch's default.
    """
    ran: list[bool] = []

    def rigged(trial: TimedTrial) -> float:
        ran.append(torch.is_grad_enabled())
        stopwatch(trial)
        name = trial.name
        return 0.5 if name.endswith("channels_last+oneDNN") or name in ("channels_last", "per operator") else 1.0

    monkeypatch.setattr(torch.backends.mkldnn, "is_acl_available", lambda: has_acl)
    choice = choose_kernels(tiny, 1, seconds=200.0, training=False, timer=rigged)
    with_format = {node.name for node in tiny.nodes if takes_format(tiny, node)}
    assert with_format
    assert {name for name, kernel in choice.kernels.items() if kernel.channels_last} == with_format
    others = {name: kernel for name, kernel in choice.kernels.items() if name not in with_format}
    assert set(others.values()) == ({Kernel()} if has_acl else set())
    assert ran
    assert measure_operators(tiny, 1, seconds=5.0, training=False, timer=rigged).by_kernel


def test_a_format_is_changed_once_not_there_and_back(tiny: Graph) -> None:
    """In inference no gradient is changed back: a gain that is worth one change is taken."""
    names = [node.name for node in tiny.nodes if takes_format(tiny, node)]
    last = names[-1]
    size = tiny.network.tensors[tiny.network.ops[tiny.network.op_index[last]].inputs[0]].bytes_for(1)
    slow, fast = Kernel(), Kernel(channels_last=True)
    by_kernel = {name: {slow: 1.0, fast: 9.0} for name in names} | {last: {slow: 1.0, fast: 0.25}}
    measured = OperatorSeconds(by_kernel, convert_seconds_per_byte=1.0 / size)
    assert cheapest_path(tiny, 1, measured, training=True) == {}
    assert cheapest_path(tiny, 1, measured, training=False)[last] == fast


def test_profiles_are_kept_apart(tiny: Graph, tmp_path: Path) -> None:
    machine = identify(1)
    training = profile_network(tiny, ladder=(1,), threads=1, seconds=0.5, folder=tmp_path)
    inference = profile_network(tiny, ladder=(1,), threads=1, seconds=0.5, folder=tmp_path, training=False)
    assert profile_path(tiny.network, machine, tmp_path).exists()
    assert profile_path(tiny.network, machine, tmp_path, training=False).exists()
    assert sorted(path.stem.endswith("_inference") for path in tmp_path.iterdir()) == [False, True]
    assert sum(layer.ladder[0].backward_seconds for layer in training.layers) > 0
    assert sum(layer.ladder[0].backward_seconds for layer in inference.layers) == 0
    assert profile_network(tiny, threads=1, folder=tmp_path) == training
    assert profile_network(tiny, threads=1, folder=tmp_path, training=False) == inference


def test_a_session_keeps_them_apart(tiny: Graph) -> None:
    cluster = Cluster.local(1)
    facts = SimpleNamespace(slowdown=1.0, compute="cpu")
    coordinator: Any = SimpleNamespace(members={name: SimpleNamespace(facts=facts) for name in cluster.names})
    session = Session(coordinator, cluster, True, 1)
    places = [profile_place(session, tiny, cluster.names[0], None, training) for training in (True, False)]
    assert places[0] != places[1]


def test_workers_are_asked_for_inference(tiny: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def measured(graph: Graph, **options: Any) -> Any:
        asked.append(options["training"])
        return measure_network(graph, ladder=(1,), kernels={}, threads=1, device="worker", training=options["training"])

    def work(worker: Worker) -> None:
        with suppress(WorkerLost):  # the connection may break before it has read that it is to leave
            worker.run()

    monkeypatch.setattr(timing_here, "measure_network", measured)
    monkeypatch.setattr(timing_here, "step_bytes_per_second", lambda *rest: 8e9)
    with Coordinator(heartbeat_seconds=0.1) as coordinator:
        worker = Worker(Joining(*coordinator.address, coordinator.token, "worker"), TcpTransport())
        thread = threading.Thread(target=work, args=(worker,), daemon=True)
        thread.start()
        coordinator.wait_for(("worker",), 10)
        found = measure_on(coordinator, tiny, ("worker",), ladder=(1,), seconds=0.1, kernels={}, training=False)
    thread.join(5)
    assert asked == [False]
    assert found["worker"].profile.layer_seconds(0, 1)[1] == 0
