"""Devices as threads of one process: the executor on the in-process engine, against one device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grouped_devices import grouped_devices
from hand_made import cluster
from manyhands.executor.executor import Executor
from manyhands.executor.feeder import Feeder
from manyhands.executor.log import DeviceLog
from manyhands.executor.messages import COORDINATOR, plan_bytes
from manyhands.executor.optimizers import build
from manyhands.executor.options import ExecutorOptions
from manyhands.executor.scheduling import Scheduling
from manyhands.facts.clipping import Clipping
from manyhands.facts.collectives import BUILTIN
from manyhands.facts.errors import WorkerLost
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import store_weights
from manyhands.graph.lengths import LengthGraphs
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights
from manyhands.schedule.channels import ChannelGeometry
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.feeding import samples_of
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.policy import Schedule
from manyhands.schedule.recomputation import recomputed_spans
from manyhands.schedule.tiles import TileGeometry
from manyhands.transport.switchboard import Switchboard
from scheduled_stepper import ScheduledStepper
from tape import CapturedLoss

Batch = tuple[Any, Any]
SGD = Optimizer("SGD", lr=0.05, momentum=0.9)
ADAM = Optimizer("Adam", lr=1e-3)
TOLERANCE = 1e-10
JOIN_SECONDS = 60.0
STEPS_FED_AHEAD = 2


def shared(first: int | str, last: int | str, *samples: int, reduce: Any = "allreduce", prefix: str = "") -> Stage:
    """A stage of layers [first, last), one device for each count of samples; its devices are named by layer."""
    devices = tuple(f"{prefix or 's'}{first}-{place}" for place in range(len(samples)))
    share = BySamples(samples) if len(samples) > 1 else Single()
    return Stage((first, last), devices, share, reduce=reduce)


def plan_for(graph: Graph, stages: Sequence[Stage], *, batch_size: int, **options: Any) -> Plan:
    return Plan(graph.network.name, batch_size, tuple(stages), **options)


def schedule_of(graph: Graph, plan: Plan) -> Schedule:
    """Resolved against a cluster of the plan's own devices, so that an input's home may be in no stage."""
    return Schedule(resolve(plan, graph.network, cluster(plan.devices)), graph.network)


@dataclass
class Ran:
    """What a run in one process gave."""

    weights: dict[str, dict[str, torch.Tensor]]
    device_losses: dict[str, list[float]]
    logs: dict[str, DeviceLog]
    schedule: Schedule
    errors: dict[str, BaseException]
    board: Switchboard
    executors: dict[str, Executor]
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    grad_norms: dict[str, list[float]] = field(default_factory=dict)
    """Device -> the norm of all gradients before each update, where the plan has it exchanged."""
    seconds: float = 0.0
    """From the first sign of trouble until every device had stopped; 0: there was none."""

    @property
    def losses(self) -> list[float]:
        """Every step's loss: the sum of the devices' parts, in their order."""
        return [sum(parts) for parts in zip(*self.device_losses.values())]

    def raise_first(self) -> None:
        """Whatever went wrong on a device is wrong."""
        for error in self.errors.values():
            raise error

    def assert_as_planned(self, steps: int) -> None:
        """Every device did its actions and computed its share, and the bytes between them are the plan's."""
        self.raise_first()
        planned = plan_bytes({d: tuple(self.schedule.every_action(d)) for d in self.logs}, self.schedule.network)
        expected = {pair: size * steps for pair, size in planned.items() if size}
        sent = {(d, to): n for d, log in self.logs.items() for to, n in log.sent_bytes.items() if n}
        received = {(of, d): n for d, log in self.logs.items() for of, n in log.received_bytes.items() if n}
        assert {pair: n for pair, n in sent.items() if COORDINATOR not in pair} == expected
        assert {pair: n for pair, n in received.items() if COORDINATOR not in pair} == expected
        for device, log in self.logs.items():
            texts = [str(action) for action in self.schedule.every_action(device)]
            assert log.rounds == steps
            assert log.refused_frames == 0
            if self.schedule.is_fixed:
                assert log.actions == texts
                assert log.same_actions == steps
            else:
                assert sorted(log.actions) == sorted(texts)
            geometries = self.schedule.lowering.work[device].geometries
            rounds = steps * self.schedule.plan.micro_batches
            again = [span for g in geometries for span in recomputed_spans(g)]
            computed = [*((g.first, g.last) for g in geometries), *again]
            assert log.operators == sum(last - first for first, last in computed) * rounds
            assert log.elements == planned_elements(geometries, device) * rounds
            if geometries:
                first, last = samples_of(geometries[0], device)
                assert log.samples == (last - first) * rounds

    def assert_equals(
        self, weights: Mapping[str, torch.Tensor], losses: Sequence[float], tolerance: float = TOLERANCE
    ) -> None:
        """Every device's weights and buffers are those of one device, every weight is somewhere, and so is the loss."""
        self.raise_first()
        for device, own in self.weights.items():
            for name, tensor in own.items():
                difference = relative(tensor, weights[name])
                assert difference <= tolerance, (device, name, difference)
        network = self.schedule.network
        assert {name for own in self.weights.values() for name in own} == {n for op in network.ops for n in op.weights}
        for step, (one, other) in enumerate(zip(self.losses, losses, strict=True)):
            assert abs(one - other) <= tolerance * max(1.0, abs(other)), step


def planned_elements(geometries: Sequence[StageGeometry], device: str) -> int:
    """Elements of maps, or of tensors cut by channels, that a device computes in one pass, by its geometries."""
    by_channels = sum(
        geometry.own(device, name).volume
        for geometry in geometries
        if isinstance(geometry, ChannelGeometry)
        for op in geometry.ops
        for name in op.outputs
        if name in geometry.split
    )
    return by_channels + sum(
        geometry.computed[device][name].volume
        for geometry in geometries
        if isinstance(geometry, TileGeometry)
        for op in geometry.ops
        for name in op.outputs
        if name in geometry.maps and name in geometry.computed[device] and any(t in geometry.maps for t in op.inputs)
    )


def own_weights(graph: Graph, work: DeviceWork) -> Weights:
    """A device's own copies; by channels, of its part of each."""
    weights = Weights.copied(graph, work.weights())
    for name, tensor in weights.tensors.items():
        box = work.weight_box(name)
        if box is not None:
            weights.tensors[name] = tensor.detach()[box.slices()].clone()
    return weights


def micro_batches_kept(executor: Executor) -> int:
    """Micro-batches that a device keeps something of."""
    return len({micro_batch for runner in executor.runners.values() for micro_batch in runner.in_flight})


def run(
    graph: Graph,
    plan: Plan,
    batches: Sequence[Batch],
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    fail: tuple[str, int] | None = None,
    kernels: Mapping[str, Mapping[str, Kernel]] | None = None,
    stored: Mapping[str, Kernel] | None = None,
    prepare: Callable[[Switchboard], None] | None = None,
    watch: Callable[[Executor], None] | None = None,
    trace_steps: range = range(0),
    memory_step: int = -1,
    limit_seconds: float = 20.0,
    lengths: LengthGraphs | None = None,
    clipping: Clipping | None = None,
    scheduling: Scheduling | None = None,
    scales_loss: bool = False,
    collectives: str = BUILTIN,
) -> Ran:
    """Train `batches` by `plan` (or run them through, if it is a stream), each device a thread. `lengths`: the graphs
    of batches of several lengths, of which `graph` is the longest.

    As a coordinator would, the harness interrupts everybody once a device has failed.
    """
    schedule = schedule_of(graph, plan)
    plan, training = schedule.plan, schedule.plan.is_training
    devices = list(schedule.lowering.work)
    assert set(kernels or ()) <= set(devices), f"kernels are told by device: {sorted(kernels or ())}"
    board = Switchboard([*devices, COORDINATOR], limit_seconds=limit_seconds)
    if fail is not None:
        board.fail_after(*fail)
    endings = contextlib.ExitStack()
    grouped = endings.enter_context(grouped_devices(board, schedule, collectives)) if collectives != BUILTIN else {}
    executors: dict[str, Executor] = {}
    for device in devices:
        own = schedule.lowering.work[device]
        weights = own_weights(graph, own)
        store_weights(graph, weights, stored or {})
        stepper = build(optimizer or SGD, weights.trainable()) if own.geometries and training else None
        options = ExecutorOptions(
            seed=seed, kernels=(kernels or {}).get(device, {}), trace_steps=trace_steps, memory_step=memory_step,
            with_targets=training, clipping=clipping, is_scheduled=scheduling is not None, scales_loss=scales_loss,
            collectives=grouped.get(device),
        )  # fmt: skip
        executors[device] = Executor(graph, schedule, board.endpoints[device], weights, stepper, options, lengths)
        executors[device].rest()
        board.endpoints[device].mailbox.open(0, executors[device].expected_by_step())
        if watch is not None:
            watch(executors[device])
    feeder = Feeder(graph, schedule, board.endpoints[COORDINATOR], with_targets=training)
    feeders = {
        length: Feeder(other, Schedule(plan, other.network), board.endpoints[COORDINATOR])
        for length, other in (lengths.graphs if lengths is not None else {}).items()
    }
    board.endpoints[COORDINATOR].mailbox.open(0, {} if training else feeder.expected_results())
    losses: dict[str, list[float]] = {device: [] for device in devices}
    norms: dict[str, list[float]] = {device: [] for device in devices}
    errors: dict[str, BaseException] = {}
    trouble: list[float] = []
    change = threading.Condition()

    def work(device: str) -> None:
        torch.set_num_threads(1)
        try:
            for step in range(len(batches)):
                result = executors[device].round(step)
                with change:
                    losses[device].append(sum(result.losses))
                    norms[device] += result.grad_norms
                    change.notify_all()
        except BaseException as error:
            with change:
                trouble.append(time.monotonic())
                errors[device] = error
                change.notify_all()
            for endpoint in board.endpoints.values():
                endpoint.mailbox.interrupt(WorkerLost(f"{device} stopped: {error}"))

    if prepare is not None:
        prepare(board)
    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    outputs: list[dict[str, torch.Tensor]] = []
    for step, (inputs, targets) in enumerate(batches):
        with change:
            fed = change.wait_for(
                lambda step=step: errors or all(len(own) > step - STEPS_FED_AHEAD for own in losses.values()),
                JOIN_SECONDS,
            )
            assert fed, "a device hangs"
            if errors:
                break
        length = lengths.length(step) if lengths is not None else None
        if scheduling is not None:
            feeder.send_rates(step, scheduling.at(step))
        (feeder if length is None else feeders[length]).send(step, inputs, targets)
        if COORDINATOR in board.failed:
            break
        if not training:
            outputs.append(feeder.gather(step))
            board.endpoints[COORDINATOR].mailbox.begin_step(step + 1)
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive(), "a device hangs"
    seconds = time.monotonic() - trouble[0] if trouble else 0.0
    for executor in executors.values():
        executor.close()
    endings.close()
    return Ran(
        {d: {n: t.detach().clone() for n, t in e.weights.tensors.items()} for d, e in executors.items()},
        losses, {d: e.log for d, e in executors.items()}, schedule, errors, board, executors, outputs, norms, seconds,
    )  # fmt: skip


def alone(
    graph: Graph,
    batches: Sequence[Batch],
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    micro_batches: int = 1,
    before_step: Callable[[Weights], None] = lambda weights: None,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same by one piece and plain autograd: the reference. `before_step` may look at the gradients."""
    weights = Weights.copied(graph)
    stepper, piece = ScheduledStepper(optimizer or SGD, weights.trainable()), Piece(graph, weights)
    loss = CapturedLoss(graph)
    part = 1.0 if graph.loss_combination == "sum" else 1.0 / micro_batches
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        named = bind_inputs(graph, inputs)
        samples = next(iter(named.values())).shape[0]
        size = samples // micro_batches
        total = 0.0
        for place in range(0, samples, size):
            entered = {name: rows_of(tensor, samples, place, size) for name, tensor in named.items()}
            values = piece(entered, Context(seed=seed, step=step, first_sample=place))
            value, gradients = loss(values, rows_of(targets, samples, place, size))
            roots = [(values[name], part * g) for name, g in gradients.items() if values[name].requires_grad]
            torch.autograd.backward([tensor for tensor, _ in roots], [g for _, g in roots])
            total += float(value) * part
        losses.append(total)
        before_step(weights)
        stepper.step()
        stepper.zero()
    return {name: tensor.detach() for name, tensor in weights.tensors.items()}, losses


def rows_of(tree: Any, samples: int, first: int, count: int) -> Any:
    """Some samples of every tensor in a nest of them; tensors that have no samples stay whole."""
    if isinstance(tree, torch.Tensor):
        return tree[first : first + count] if tree.dim() and tree.shape[0] == samples else tree
    if isinstance(tree, dict):
        return {key: rows_of(item, samples, first, count) for key, item in tree.items()}
    return type(tree)(rows_of(item, samples, first, count) for item in tree)


def assert_exact(
    graph: Graph, plan: Plan, batches: Sequence[Batch], optimizer: Optimizer | None = None, **options: Any
) -> Ran:
    """By the plan and by one device, with the same micro-batches: the same, and done as planned."""
    ran = run(graph, plan, batches, optimizer, seed=7, **options)
    ran.assert_as_planned(len(batches))
    ran.assert_equals(*alone(graph, batches, optimizer, seed=7, micro_batches=plan.micro_batches))
    return ran


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, in units of the largest number."""
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else 1.0
    if not one.numel():
        return 0.0
    scale = float(other.abs().max()) or 1.0
    difference = float((one - other).abs().max()) / scale
    return difference if difference == difference else float("inf")
