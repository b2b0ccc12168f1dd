"""One device's part of one captured graph: its actions, what computes them, and what sends and receives for them.

An executor has one, or where the batches of a run have several lengths one for each length. Weights, their gradients
and the optimiser are of the network and not of a graph: all parts work on the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from manyhands.executor.averaging import WeightAverage, check_averaged
from manyhands.executor.bound_calls import BoundCalls
from manyhands.executor.captured_round import CapturedRound, can_be_captured
from manyhands.executor.codec import Coding
from manyhands.executor.device_feed import DeviceFeed
from manyhands.executor.diagnosis import NumberDiagnosis
from manyhands.executor.gpu_peers import GpuPeers
from manyhands.executor.in_flight import InFlightMicroBatches
from manyhands.executor.local_exchange import LocalExchange
from manyhands.executor.log import Recorder
from manyhands.executor.loss_scale import LossScale
from manyhands.executor.messages import COORDINATOR, expected_messages, feed_parts, runs_here
from manyhands.executor.messenger import Messenger
from manyhands.executor.optimizers import Stepper
from manyhands.executor.options import ExecutorOptions
from manyhands.executor.rates import ArrivingRates, RateLayout
from manyhands.executor.reductions import Reductions
from manyhands.executor.runner import Runner
from manyhands.executor.share_loss import ShareLoss, trained_weights
from manyhands.executor.sharing import RunnerSetup, make_runner
from manyhands.executor.slowdown import Slowdown
from manyhands.executor.updates import WeightUpdates
from manyhands.facts.errors import BadPlan
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Loss, Reduce
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.feeding import feed_topic, samples_of
from manyhands.schedule.policy import Schedule
from manyhands.transport.endpoint import Endpoint


@dataclass(frozen=True)
class DeviceSetup:
    """The things that all parts of one device work with."""

    endpoint: Endpoint
    weights: Weights
    stepper: Stepper | None
    options: ExecutorOptions
    recorder: Recorder
    slowdown: Slowdown
    loss_scale: LossScale | None = None
    """The factor of the loss; None: it is not scaled."""
    average: WeightAverage | None = None
    has_boards: bool = False
    """Whether small messages go by boards to workers of this machine: all rounds have the same messages."""


class GraphPart:
    """A device's part of one graph, and everything that holds tensors of its shapes."""

    def __init__(self, graph: Graph, schedule: Schedule, setup: DeviceSetup) -> None:
        endpoint, weights, options, recorder = setup.endpoint, setup.weights, setup.options, setup.recorder
        self.graph, self.schedule, self.device = graph, schedule, endpoint.name
        plan = schedule.plan
        runs_here(plan, schedule.network)
        if options.ema is not None:
            check_averaged(plan)
        if options.clipping is not None and options.clipping.norm is not None and not plan.gradient_norm:
            raise BadPlan("Gradients are to be clipped by their norm, which the plan's devices do not exchange.")
        torch_device = torch.device(options.torch_device)
        self.work: DeviceWork = schedule.lowering.work[self.device]
        self.actions: tuple[Action, ...] = tuple(schedule.every_action(self.device))
        runner_setup = RunnerSetup(graph, weights, self.device, self.actions, options.kernels, torch_device)
        self.runners: dict[int, Runner] = {g.index: make_runner(g, runner_setup) for g in self.work.geometries}
        samples = {g.index: samples_of(g, self.device) for g in self.work.geometries}
        parts = feed_parts(
            graph, schedule.lowering, self.device, targets=options.with_targets, local=options.local_names
        )
        feed = DeviceFeed(endpoint, parts, self.runners, options, torch_device, plan)
        self.in_flight = InFlightMicroBatches(plan, self.runners, samples, feed, options.seed)
        self.diagnosis = NumberDiagnosis(schedule.network, self.device, self.in_flight)
        gpu_peers = self.gpu_peers = GpuPeers(self.device, options.gpu_peers, torch_device)
        self.messenger = Messenger(
            endpoint, schedule, weights, self.in_flight, Coding(plan, schedule.network, self.actions),
            self.diagnosis, recorder, setup.slowdown, gpu_peers,
            has_boards=setup.has_boards and torch_device.type == "cpu",
        )  # fmt: skip
        self.collectives = options.collectives
        self.reductions = Reductions(
            endpoint, schedule, weights, self.in_flight, self.diagnosis, recorder, gpu_peers, self.messenger.boards,
            self.collectives,
        )  # fmt: skip
        rates = None
        if options.is_scheduled and setup.stepper is not None:
            rates = ArrivingRates(endpoint, RateLayout.of(setup.stepper.optimizer), plan.steps_per_round)
        self.updates = WeightUpdates(
            weights,
            setup.stepper,
            self.reductions,
            set(weights.tensors) - trained_weights(graph),
            options.clipping,
            schedule.lowering.norm.parts.get(self.device, ()) if schedule.lowering.norm is not None else (),
            setup.loss_scale,
            rates,
            setup.average,
            setup.slowdown,
        )
        self.exchange = LocalExchange(schedule, self.device, self.runners, torch_device)
        self.captured: CapturedRound | None = None
        """The CUDA graph of a round's passes, where a GPU can have one; None: their kernels are launched one by one."""
        is_alone = plan.is_training and schedule.is_fixed and can_be_captured(self.actions)
        is_plain = not options.is_exact and setup.loss_scale is None and not setup.slowdown.slows
        if torch_device.type == "cuda" and feed.staging is not None and is_alone and is_plain:
            self.captured = CapturedRound(weights, self.actions, torch_device)
        self.calls: BoundCalls | None = None
        """The calls of its actions, which the executor binds."""
        has_loss = options.with_targets and any(isinstance(action, Loss) for action in self.actions)
        self.loss = ShareLoss(graph, plan, torch_device, setup.loss_scale) if has_loss else None

    def expected(self) -> dict[tuple[str, str], int]:
        """Return (source, topic) -> bytes of every message that this device receives in a round."""
        actions = self.actions
        if self.collectives is not None and not self.collectives.is_measured:  # no reduction is a message
            actions = tuple(action for action in actions if not isinstance(action, Reduce))
        messages = expected_messages(
            actions, self.device, self.schedule.network, self.messenger.expected_bytes, self.reductions.row_bytes
        )
        size = self.in_flight.feed.bytes
        if size:
            messages |= {(COORDINATOR, feed_topic(m)): size for m in range(self.schedule.plan.micro_batches)}
        return messages | self.updates.expected()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Compute on the stream that a CUDA graph is captured on, in order with what comes before and after."""
        if self.captured is None:
            yield
            return
        stream, outside = self.captured.stream, torch.cuda.current_stream(self.captured.stream.device)
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            yield
        outside.wait_stream(stream)

    def samples_in(self, stage: int) -> int:
        """Return the samples of a micro-batch that this device computes in a stage."""
        first, last = self.in_flight.samples.get(stage, (0, 0))
        return last - first

    def begin_round(self, step: int) -> None:
        """Forget what an interrupted round left."""
        self.in_flight.begin_round(step)
        self.messenger.forget()
        self.messenger.boards.begin_round(step)
        self.updates.begin_round(step)
        self.diagnosis.begin_round()

    def end_round(self) -> None:
        """Forget the round that has ended."""
        self.in_flight.clear()
        self.messenger.end_round()
        self.gpu_peers.forget()

    @property
    def host_bytes(self) -> int:
        """Bytes of tensors of a GPU that have gone to others through the machine's memory."""
        return self.messenger.host_bytes + self.reductions.reducer.host_bytes

    def rest(self) -> None:
        """Prepare the runners for weights that are all here; only in inference, where the weights stay as they are."""
        if not self.schedule.plan.is_training:
            for stage, runner in self.runners.items():
                runner.rest(max(1, self.samples_in(stage)))
