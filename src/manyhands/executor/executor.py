"""Interprets a schedule's actions with torch: one device's part of a run, as the simulator does under a virtual clock.

forward, backward     by whoever runs the stage (runner.py): whole samples (segments.py), tiles, or channels
loss                  the captured loss of what the network returned (loss.py)
send, receive         boxes of tensors through the engine (boxes.py), packed where the plan says so (codec.py)
reduce                statistics at once (statistics.py), gradients on a thread of their own (reducer.py)
step                  the optimiser, once all gradients are added up
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import torch

from manyhands.data.silo import Silo
from manyhands.engine.endpoint import Endpoint
from manyhands.executor.boxes import cut_out, empty
from manyhands.executor.channels import ChannelRunner
from manyhands.executor.codec import Coding, NoRange
from manyhands.executor.held import HeldBytes
from manyhands.executor.log import DeviceLog, Recorder
from manyhands.executor.loss import ShareLoss, trained_weights
from manyhands.executor.mail import FedSoFar, Mail
from manyhands.executor.messages import COORDINATOR, FeedPart, expected_messages, feed_parts, runs_here
from manyhands.executor.optimizers import Stepper
from manyhands.executor.projections import SumRecord, numbers_in, projection, projection_and_norm
from manyhands.executor.reducer import Reducer, row_of
from manyhands.executor.runner import Runner
from manyhands.executor.sharing import RunnerSetup, make_runner
from manyhands.executor.shelf import Shelf
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadData, DataNotFinite, NotFinite
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context
from manyhands.graph.weights import Weights, dense_gradient
from manyhands.schedule.actions import (
    Action,
    Await,
    Backward,
    Discard,
    Forward,
    Loss,
    Message,
    Part,
    Receive,
    Reduce,
    ReduceKey,
    Send,
    Step,
    is_urgent,
)
from manyhands.schedule.feeding import AT_HOME, feed_topic, result_topic, samples_of
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.interleave import InterleavedOrder
from manyhands.schedule.lowering import entering_input
from manyhands.schedule.policies import DONE, WAIT, DeviceState, FixedOrder, Policy
from manyhands.schedule.policy import Schedule
from manyhands.schedule.reduction import completed_at, statistics_rounds, topic
from manyhands.schedule.replay import MiniBatches

WEIGHT_NORM_ROUNDS = 64


@dataclass
class RoundResult:
    """What one round gave on this device: its part of the losses, where it computes them."""

    step: int
    losses: list[float] = field(default_factory=list)
    """One, or with order replay one for each step of the round."""
    staleness: list[int] = field(default_factory=list)
    """Updates between the forward pass of each step and its own, where this device runs ahead; -1: discarded."""
    seconds: float = 0.0
    sums: list[SumRecord] = field(default_factory=list)
    """What this device saw of the sums of gradients: see `runtime.agreement`."""
    not_finite_from: str = ""
    """The device that the first numbers came from that were not finite: another, or this one itself."""


@dataclass
class Fed:
    """What the coordinator handed to this device for one micro-batch, beside what its stages read."""

    at_home: dict[str, torch.Tensor] = field(default_factory=dict)
    """Inputs that this device has for others, whole."""
    targets: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Setting:
    """What a device is told about a run beside graph and plan."""

    seed: int = 0
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    torch_device: str = "cpu"
    trace_steps: range = range(0)
    memory_step: int = -1
    """The step in which tensor bytes are counted; it takes a little longer."""
    watch_every: int = 0
    """One round in so many is looked at while the run goes on; 0: none."""
    with_targets: bool = True
    slowdown: float = 1.0
    """Computing takes so many times as long as it must: this device stands for a slower one."""
    silo: Silo | None = None
    held: frozenset[str] = frozenset()
    """What the device has itself: the coordinator sends rows' numbers."""
    shelf: Shelf | None = None
    """Where that lies, if it was laid out here; None: it is in the silo."""


class Executor:
    """One device of a schedule. `round` runs one mini-batch; everything it waits for has the mailbox's limit."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        endpoint: Endpoint,
        weights: Weights,
        stepper: Stepper | None,
        setting: Setting,
    ) -> None:
        self.graph, self.schedule, self.endpoint, self.setting = graph, schedule, endpoint, setting
        self.plan, self.network = schedule.plan, schedule.network
        self.device = endpoint.name
        self.weights, self.stepper = weights, stepper
        self.torch_device = torch.device(setting.torch_device)
        self.is_on_gpu = self.torch_device.type == "cuda"
        self.work = schedule.lowering.work[self.device]
        runs_here(self.plan, self.network)
        self.actions = tuple(schedule.every_action(self.device))
        self.recorder = Recorder(
            DeviceLog(self.device), setting.trace_steps, waits_for_device=self.torch_device.type == "cpu",
            watch_every=setting.watch_every,
        )  # fmt: skip
        self.feed = feed_parts(graph, schedule.lowering, self.device, targets=setting.with_targets, held=setting.held)
        self.runners: dict[int, Runner] = {g.index: self._runner(g) for g in self.work.geometries}
        self.samples = {g.index: samples_of(g, self.device) for g in self.work.geometries}
        self._handed_over = schedule.lowering.handed_over(self.device)
        self._handed_back = schedule.lowering.handed_back(self.device) if self.plan.is_training else []
        self._steps_per_round = self.plan.steps_per_round
        self._fed: dict[int, Fed] = {}
        self._contexts: dict[tuple[int, int], Context] = {}
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.monotonic
        """What is computed: on a crowded machine, waiting for a core is not slowed."""
        self._gets_gradients = any(isinstance(a, Receive) and a.message.kind == "gradient" for a in self.actions)
        self._coding = Coding(self.plan, self.network, self.actions)
        self._topics: dict[int, str] = {}
        """Of messages, by their identity: the schedule keeps them."""
        self._hops: dict[int, list[tuple[str, str, str]]] = {}
        """Of sums, by their identity too."""
        self._given: dict[ReduceKey, tuple[Reduce, torch.Tensor]] = {}
        """Sums that are yet to be waited for, with this device's row."""
        self._summed: dict[tuple[int, int, int, int], list[str]] = {}
        """The weights of each sum of gradients, by its record's key."""
        self._weight_norms: dict[tuple[int, int, int, int], tuple[float | None, float, int]] = {}
        """The projection of those weights when their norm was last formed, the norm, and rounds since then."""
        self._reducer = Reducer(endpoint, self.network, self._reduced)
        self._untrained = set(weights.tensors) - trained_weights(graph)
        self.step = -1
        self.last_step: int | None = None
        """Where the round under way ends, if that is earlier than it would."""
        self.on_update: Callable[[int], None] = lambda step: None
        """Told of each step that this device is done with, where a round has several."""
        self._stepped: int | None = None
        """The micro-batch of the last step; -1: of the whole round."""
        self._updates = 0
        self._begun: dict[int, int] = {}
        """Micro-batch that runs ahead -> updates before its forward pass."""
        self.actions_done = 0
        """In all rounds: rises for as long as this device gets anywhere; see `runtime.stalls`."""
        self.settled_step: int | None = None
        """How many steps the weights and buffers have been through; None in the middle of one."""
        self._landed: list[tuple[int, int]] = []
        """Stages and micro-batches whose last pass has ended; what it made may yet have to be sent."""
        self._answered = 0
        """With two samples under way: those before this one are done with."""
        self._turning: tuple[int, int] | None = None
        """The same of a forward pass that a backward pass will follow."""
        self._completed = {g.index: completed_at(self.network, g.first, g.last) for g in self.work.geometries}
        has_loss = setting.with_targets and any(isinstance(action, Loss) for action in self.actions)
        self.loss = ShareLoss(graph, self.plan, self.torch_device) if has_loss else None

    def _runner(self, geometry: StageGeometry) -> Runner:
        setup = RunnerSetup(
            self.graph, self.weights, self.device, self.actions, self.setting.kernels, self.torch_device
        )  # fmt: skip
        return make_runner(geometry, setup)

    def rest(self) -> None:
        """The weights are all here; in inference they stay as they are."""
        if not self.plan.is_training:
            for stage, runner in self.runners.items():
                runner.rest(max(1, self._samples_in(stage)))

    def expected(self) -> dict[tuple[str, str], int]:
        """(source, topic) -> bytes of every message of a round that comes here."""
        found = expected_messages(self.actions, self.device, self.network)
        size = sum(part.bytes for part in self.feed)
        if size:
            found |= {(COORDINATOR, feed_topic(m)): size for m in range(self.plan.micro_batches)}
        return found

    @property
    def log(self) -> DeviceLog:
        """What was done so far."""
        log = self.recorder.log
        log.elements = sum(runner.elements for runner in self.runners.values())
        log.sent_bytes, log.received_bytes = dict(self.endpoint.sent_bytes), dict(self.endpoint.mailbox.received_bytes)
        log.refused_frames = self.endpoint.mailbox.refused
        return log

    def close(self) -> None:
        self._reducer.close()

    def end_at(self, step: int) -> None:
        """No steps beyond this one are fed: a round under way has fewer. From any thread."""
        self.last_step = step
        self.endpoint.mailbox.nudge()

    # One round

    def round(self, step: int, count: int | None = None) -> RoundResult:
        """One mini-batch, or with order replay as many as a round has; `count`: fewer, at the end."""
        steps = self.plan.steps_per_round if count is None else count
        if step != self.setting.memory_step:
            return self._round(step, steps)
        held = HeldBytes(self.weights, self.stepper, self.runners)
        with held.counting():
            result = self._round(step, steps)
        self.recorder.log.peak_bytes, self.recorder.log.peak_parts = held.most_bytes, held.parts
        return result

    def _round(self, step: int, steps: int) -> RoundResult:
        """Ask the policy, act, until it says done."""
        start = time.monotonic()
        self.endpoint.mailbox.begin_step(step)
        self.recorder.begin(step)
        self.step, self.result, self._stepped = step, RoundResult(step), None
        self.settled_step = step
        self._landed, self._turning, self._answered = [], None, 0
        self._updates, self._begun = 0, {}
        self._forget_flights()  # a round that was interrupted left its own
        policy = self.schedule.policy_of(self.device, steps)
        is_fed_singly = self.plan.order in ("replay", "interleave") and bool(self.feed)
        box = self.endpoint.mailbox
        state = DeviceState(Mail(box, step, self._topic), FedSoFar(box, step) if is_fed_singly else None)
        is_slowed = self.setting.slowdown > 1.0
        with torch.no_grad():  # whoever has autograd record says so
            for action in self._in_turn(policy, state):
                began, started = time.monotonic(), self._clock() if is_slowed else 0.0
                self._act(action)
                if self.is_on_gpu and self.recorder.is_traced:
                    torch.cuda.synchronize(self.torch_device)  # a GPU computes while Python goes on
                if is_slowed and isinstance(action, (Forward, Backward, Step, Send)):
                    self._take_longer(started)
                self.recorder.took(action, began, time.monotonic())
                self.actions_done += 1
        self._forget_flights()
        if isinstance(policy, MiniBatches):
            steps = policy.count
        if steps:  # else nothing was fed
            self.recorder.end()
        passes = steps * self.plan.micro_batches // self.plan.steps_per_round
        self.recorder.log.samples += self._samples_in(self.work.stage) * passes
        self.result.seconds = time.monotonic() - start
        self.settled_step = step + steps
        return self.result

    def _forget_flights(self) -> None:
        for runner in self.runners.values():
            for micro_batch in range(self.plan.micro_batches):
                runner.drop(micro_batch)
        self._fed.clear()
        self._given.clear()
        self._coding.forget()

    def _take_longer(self, started: float) -> None:
        """Where this device stands for a slower one: than it has computed since then, by its clock."""
        if self.setting.slowdown > 1.0:
            time.sleep((self.setting.slowdown - 1.0) * (self._clock() - started))

    def _samples_in(self, stage: int) -> int:
        first, last = self.samples.get(stage, (0, 0))
        return last - first

    def _in_turn(self, policy: Policy, state: DeviceState) -> Iterator[Action]:
        """What the policy says, until it is done; between any two actions an interruption is heard."""
        box = self.endpoint.mailbox
        if isinstance(policy, FixedOrder):
            for action in policy.actions:
                if box.interruption is not None:
                    raise box.interruption
                yield action
            box.check()
            return
        while True:
            box.check()
            seen = box.news
            if isinstance(policy, MiniBatches) and self.last_step is not None:
                policy.end_at(self.last_step - self.step)
            answer = policy.next(state)
            if isinstance(policy, InterleavedOrder):
                self._answered = policy.answered
            if answer == DONE:
                return
            if answer == WAIT:
                box.wait_for_news(seen)
                continue
            assert not isinstance(answer, str)
            yield answer

    def _act(self, action: Action) -> None:
        getattr(self, _ACTS[type(action)])(action)

    def _reduce(self, action: Reduce) -> None:
        if action.what == "statistics":
            self._statistics(action)
            return
        completed = self._completed[action.stage]
        names = [n for op in range(action.last - 1, action.first - 1, -1) for n in completed.get(op, ())]
        self._summed[action.stage, action.first, action.last, action.micro_batch] = names
        self._reducer.start(action, self.step, [dense_gradient(self.weights.tensors[n]) for n in names])

    def _step(self, action: Step) -> None:
        """The optimiser, for all stages of this device at the first of their steps: all gradients are on their way."""
        if self._stepped == action.micro_batch:
            return
        self._stepped = action.micro_batch
        if action.micro_batch in self._begun:
            self.result.staleness.append(self._updates - self._begun.pop(action.micro_batch))
        self._updates += 1
        self._reducer.wait()
        assert self.stepper is not None
        for name in self._untrained:  # a zero that was added up is still no gradient: weight decay would see it
            self.weights.tensors[name].grad = None
        self.stepper.step()
        self.stepper.zero()
        self.result.sums += [self._with_weights(record) for record in self._reducer.take_records()]
        if action.micro_batch >= 0:
            self._fed.pop(action.micro_batch, None)
            self.on_update(self.step + action.micro_batch)

    def _with_weights(self, record: SumRecord) -> SumRecord:
        """The record of a sum, and what the weights have come to by it. Their norm changes slowly: it is formed anew
        after some rounds, or when the weights have moved far."""
        weights = [self.weights.tensors[name].detach().cpu() for name in self._summed[record.key]]
        rows = [numbers_in(row_of(weight), weight.dtype) for weight in weights]
        found = projection(rows)
        before, norm, rounds = self._weight_norms.get(record.key, (None, 0.0, 0))
        if found is None or before is None or rounds == WEIGHT_NORM_ROUNDS or abs(found - before) > norm / 4:
            found, norm = projection_and_norm(rows)
            before, rounds = found, 0
        self._weight_norms[record.key] = (before, norm, rounds + 1)
        return msgspec.structs.replace(record, weights=found, weights_norm=norm)

    def _discard(self, action: Discard) -> None:
        """What came back was too late, or nothing comes back."""
        if self._gets_gradients and action.stage == self.work.stage:
            self.result.staleness.append(-1)
        self._pass_begins(action.stage, action.micro_batch)
        self._landed.append((action.stage, action.micro_batch))
        self._fed.pop(action.micro_batch, None)
        self.on_update(self.step + action.micro_batch)

    def _reduced(self, reduce: Reduce, start: float, end: float) -> None:
        self.recorder.span(reduce, str(reduce), start, end)

    # Computing

    def _prepared(self, micro_batch: int) -> Fed:
        """What was fed for a micro-batch; the first who asks takes it."""
        found = self._fed.get(micro_batch)
        if found is None:
            found = self._fed[micro_batch] = Fed()
            self._take_feed(found, micro_batch)
        return found

    def _take_feed(self, fed: Fed, micro_batch: int) -> None:
        """Inputs and targets that the coordinator hands to this device."""
        if not self.feed:
            return
        tensors = [part.room() for part in self.feed]
        self.endpoint.mailbox.receive(COORDINATOR, self.step, feed_topic(micro_batch), tensors)
        for number, (part, sent) in enumerate(zip(self.feed, tensors)):
            tensor = self._own_rows(number, part, sent) if part.is_held else sent
            here = tensor.to(self.torch_device, non_blocking=True)
            if part.is_target:
                fed.targets[part.name] = here
            elif part.stage != AT_HOME:
                self.runners[part.stage].put_value(micro_batch, part.name, part.box, here)
            else:  # the whole of it is here, of which this device's stages may read their own share
                fed.at_home[part.name] = here
                for runner in self.runners.values():
                    layout = entering_input(runner.geometry, part.name)
                    for box in layout.boxes(self.device) if layout is not None else ():
                        runner.put_value(micro_batch, part.name, box, here[box.slices()])

    def _own_rows(self, number: int, part: FeedPart, rows: torch.Tensor) -> torch.Tensor:
        """What the device has of a part, by the samples' numbers."""
        if self.setting.shelf is not None:
            return self.setting.shelf.take(number, rows)
        if self.setting.silo is None:
            raise BadData(f"{self.device} was to have {', '.join(sorted(self.setting.held))}; it has no silo.")
        return part.cut_from(self.setting.silo.take(part.name, rows))

    def _context(self, stage: int, micro_batch: int) -> Context:
        step = self.step if self._steps_per_round == 1 else self._step_of(micro_batch)
        known = self._contexts.get((stage, micro_batch))
        if known is None or known.step != step:
            first, last = self.samples[stage]
            place = first if self._steps_per_round > 1 else micro_batch * self.plan.micro_batch_size + first
            known = Context(self.plan.is_training, self.setting.seed, step, place, last - first)
            self._contexts[stage, micro_batch] = known
        return known

    def _hand_over(self, stage: int, micro_batch: int) -> None:
        """What a stage has made for later stages on this device."""
        for producer, consumer, tensor, box in self._handed_over:
            if producer == stage:
                data = self.runners[stage].value(micro_batch, tensor, box).to(self.torch_device)
                self.runners[consumer].put_value(micro_batch, tensor, box, data)

    def _hand_back(self, stage: int, micro_batch: int) -> None:
        """The gradients of what a stage was given by earlier stages on this device. Copies: what others give back of a
        tensor is added in place, and one gradient may be that of two (of the terms of a sum)."""
        for producer, consumer, tensor, box in self._handed_back:
            if consumer == stage:
                data = self.runners[stage].gradient(micro_batch, tensor, box).to(self.torch_device, copy=True)
                self.runners[producer].add_gradient(micro_batch, tensor, box, data)

    def _pass_begins(self, stage: int = -1, micro_batch: int = -1) -> None:
        """Others have what they need of the pass before: let go of what was made in it, and of a flight that ended."""
        if not self._landed and self._turning is None:
            return
        for landed in [one for one in self._landed if one != (stage, micro_batch)]:
            is_next = self.plan.order == "interleave" and landed[1] != micro_batch and landed[1] >= self._answered
            if not is_next:
                self.runners[landed[0]].drop(landed[1])
                self._landed.remove(landed)
        if self._turning is not None:
            self.runners[self._turning[0]].settle(self._turning[1])
            self._turning = None

    def _forward(self, action: Forward) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        runner = self.runners[stage]
        self._pass_begins(stage, micro_batch)
        self._prepared(micro_batch)
        self.settled_step = None
        context = self._context(stage, micro_batch)
        if action.part in ("ahead", "again"):
            context = replace(context, records=action.part == "again", moves_buffers=action.part == "ahead")
        if self.plan.order == "replay" and action.part != "again" and not runner.geometry.is_last:
            self._begun[micro_batch] = self._updates
        runner.forward(action, context)
        if action.last != runner.geometry.last or action.part in ("interior", "partial"):
            return
        self._hand_over(stage, micro_batch)
        if self.plan.is_training:
            self._turning = (stage, micro_batch)
            return
        self._landed.append((stage, micro_batch))
        if runner.geometry.is_last:
            results = runner.results(micro_batch)
            if results:
                self.endpoint.send(COORDINATOR, self.step, result_topic(micro_batch), results)
        if runner.geometry is self.work.geometries[-1]:
            self._fed.pop(micro_batch, None)
            if self._steps_per_round > 1:
                self.on_update(self.step + micro_batch)

    def _loss(self, action: Loss) -> None:
        if self.loss is None:
            return
        runner = self.runners[action.stage]
        targets, samples = self._prepared(action.micro_batch).targets, self._samples_in(action.stage)
        value, gradients = self.loss(runner.outputs(action.micro_batch), targets, samples)
        number = float(value)
        if number != number or number in (float("inf"), float("-inf")):
            raise self._not_finite(action, number)
        self._add_loss(number)
        runner.take_gradients(action.micro_batch, gradients)

    def _add_loss(self, number: float) -> None:
        losses = self.result.losses
        if self.plan.order == "replay" or not losses:
            losses.append(number)
        else:
            losses[0] += number

    def _backward(self, action: Backward) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        runner = self.runners[stage]
        self._pass_begins(stage, micro_batch)
        runner.backward(action, self._context(stage, micro_batch))
        if action.first == runner.geometry.first and action.part != "weights":
            self._hand_back(stage, micro_batch)
        if action.first == runner.geometry.first and action.part != "inputs":
            self._landed.append((stage, micro_batch))

    def _not_finite(self, action: Loss, number: float) -> NotFinite:
        """Where it began, as far as this device can tell."""
        tensor = self._first_not_finite(action.micro_batch)
        where = "the loss itself: every layer's output is finite" if tensor is None else self._place_of(tensor)
        message = (
            f"The loss is {number} at step {self._step_of(action.micro_batch)}, on {self.device}; it began in {where}."
        )
        if tensor is not None and tensor not in self.network.producer:
            return DataNotFinite(message, hint="Mend the data of that step.")
        return NotFinite(message, hint="Lower the learning rate, or look at the data of that step.")

    def _step_of(self, micro_batch: int) -> int:
        """The optimiser's step that a micro-batch belongs to."""
        return self.step + micro_batch if self._steps_per_round > 1 else self.step

    def _place_of(self, tensor: str) -> str:
        if tensor in self.network.producer:
            return f"layer {self._layer_of(tensor)} ({tensor})"
        return f"the input '{tensor}': the data holds a number that is none"

    def _first_not_finite(self, micro_batch: int) -> str | None:
        for stage, runner in self.runners.items():
            tensor = runner.first_not_finite(micro_batch, self._context(stage, micro_batch))
            if tensor is not None:
                return tensor
        return None

    def _layer_of(self, tensor: str) -> str:
        return self.network.layers[self.network.layer_of_op[self.network.producer[tensor]]].name

    def diagnose(self, step: int) -> str:
        """After an interruption: the layer of this device where numbers stopped being numbers, or nothing."""
        if step != self.step:
            return ""
        for micro_batch in sorted(self._fed):
            tensor = self._first_not_finite(micro_batch)
            if tensor is not None and tensor in self.network.producer:
                return self._layer_of(tensor)
        return ""

    def _statistics(self, reduce: Reduce) -> None:
        """Sums of everybody, waited for at once or later."""
        self._pass_begins(reduce.stage, reduce.micro_batch)
        self._prepared(reduce.micro_batch)
        runner = self.runners[reduce.stage]
        row = runner.own_row(reduce, self._context(reduce.stage, reduce.micro_batch))
        own = row if row.is_cpu else row.cpu()
        self._look_for_not_finite(self.device, [own])
        hops = self._hops_of(reduce)
        for source, target, name in hops:
            if source == self.device:
                self.endpoint.send(target, self.step, name, [own], urgent=True)
        if reduce.later:
            self._given[reduce.key] = (reduce, row)
        else:
            runner.take_rows(reduce, self._gathered(reduce, row))

    def _await(self, action: Await) -> None:
        reduce, row = self._given.pop(action.key)
        self.runners[reduce.stage].take_rows(reduce, self._gathered(reduce, row))

    def _gathered(self, reduce: Reduce, row: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's row, in the order of the devices."""
        rows = {self.device: row}
        for source, target, name in self._hops_of(reduce):
            if target == self.device:
                came = self.endpoint.mailbox.take(source, self.step, name)
                other = torch.frombuffer(came, dtype=row.dtype) if came else torch.empty_like(row, device="cpu")
                self._look_for_not_finite(source, [other])
                rows[source] = other if row.is_cpu else other.to(row.device)
        return [rows[name] for name in reduce.devices]

    def _hops_of(self, reduce: Reduce) -> list[tuple[str, str, str]]:
        """Source, target and topic of every row."""
        hops = self._hops.get(id(reduce))
        if hops is None:
            hops = [
                (hop.source, hop.target, topic(reduce, 0, hop.chunk)) for hop in statistics_rounds(reduce.devices)[0]
            ]
            if self.schedule.keeps_messages:
                self._hops[id(reduce)] = hops
        return hops

    def _look_for_not_finite(self, source: str, tensors: Iterable[torch.Tensor]) -> None:
        """Remember where numbers came from that are not finite, the first time in a round: whoever has them from
        another is not to blame."""
        if self.plan.is_training and not self.result.not_finite_from and not all(map(_is_finite, tensors)):
            self.result.not_finite_from = source

    # Messages

    def _maker(self, tensor: str) -> Runner:
        """The runner of the stage, of those on this device, that makes a tensor."""
        return next(runner for runner in self.runners.values() if runner.geometry.is_made_here(tensor))

    def _of_channels(self, message: Message) -> ChannelRunner | None:
        """Whose message it is, where it brings channels to others of a stage that is shared by them."""
        runner = self.runners.get(message.stage) if message.kind == "halo" else None
        return runner if isinstance(runner, ChannelRunner) else None

    def _send(self, action: Send) -> None:
        message = action.message
        if (runner := self._of_channels(message)) is not None:
            parts = runner.outgoing(message)
        else:
            parts = [self._packed(action.to, message, part) for part in message.parts]
        self.recorder.sent(message)
        self._look_for_not_finite(self.device, parts)
        self.endpoint.send(action.to, self.step, self._topic(message), parts, urgent=is_urgent(message))

    def _packed(self, to: str, message: Message, part: Part) -> torch.Tensor:
        data = self._outgoing(message, part)
        try:
            return self._coding.packed(to, message, part, data)
        except NoRange as error:
            what = "The gradient of" if message.kind == "gradient" else "What is sent of"
            tensor = self._first_not_finite(message.micro_batch)
            began = "" if tensor is None else f"; it began in {self._place_of(tensor)}"
            raise NotFinite(
                f"{what} '{part.tensor}' cannot be packed in {self._coding.bits(message, part)} bits at step "
                f"{self.step}, on {self.device}: {error}{began}.",
                hint="Lower the learning rate, or look at the data of that step. Features that hold infinities on "
                "purpose go as they are: codec: {bits: 32}, or cut the network elsewhere.",
            ) from error

    def _topic(self, message: Message) -> str:
        if not self.schedule.keeps_messages:
            return message.topic
        found = self._topics.get(id(message))
        if found is None:
            found = self._topics[id(message)] = message.topic
        return found

    def _outgoing(self, message: Message, part: Part) -> torch.Tensor:
        tensor, box, micro_batch = part.tensor, part.box, message.micro_batch
        if message.kind == "weights":
            return self.weights.tensors[tensor].detach().contiguous().cpu().clone()
        if message.kind == "weight-gradient":
            return dense_gradient(self.weights.tensors[tensor]).contiguous().cpu()
        if message.kind == "input":
            whole = self._prepared(micro_batch).at_home[tensor]
            return cut_out(whole, Box.whole(whole.shape), box)
        if message.kind == "value":
            return self._maker(tensor).value(micro_batch, tensor, box)
        runner = self.runners[message.stage]
        if message.kind == "partial":
            assert isinstance(runner, ChannelRunner)
            return runner.partial(micro_batch, tensor, box)
        if message.kind == "output-gradient":
            return runner.output_gradient(micro_batch, tensor, box)
        if part.is_value or message.kind in ("halo", "output"):
            return runner.value(micro_batch, tensor, box)
        return runner.gradient(micro_batch, tensor, box)

    def _receive(self, action: Receive) -> None:
        message = action.message
        if (runner := self._of_channels(message)) is not None:
            memory = [bundle.room() for bundle in runner.bundles(message, is_sent=False)]
            self.endpoint.mailbox.receive(action.source, self.step, self._topic(message), memory)
            started = self._clock()
            runner.incoming(message, memory)
            self._take_longer(started)
            return
        if message.kind in ("value", "input", "gradient"):  # another pass begins: room for what it brings
            self._pass_begins(micro_batch=message.micro_batch)
        of_weights = message.kind in ("weights", "weight-gradient")
        table = self.network.weights if of_weights else self.network.tensors
        tensors = [
            empty(part.box, table[part.tensor].dtype) if (room := self._coding.room(message, part)) is None else room
            for part in message.parts
        ]
        self.endpoint.mailbox.receive(action.source, self.step, self._topic(message), tensors)
        started = self._clock()
        self._look_for_not_finite(action.source, tensors)
        for part, tensor in zip(message.parts, tensors):
            here = self._coding.unpacked(message, part, tensor, self.torch_device)
            if message.kind == "gradient":
                self._coding.feed_back(action.source, message, part, here)
            self._incoming(action.source, message, part, here)
        if message.kind == "gradient":
            self._coding.came_back(action.source, message)
        self._take_longer(started)

    def _incoming(self, source: str, message: Message, part: Part, here: torch.Tensor) -> None:
        name, micro_batch = part.tensor, message.micro_batch
        if message.kind == "weights":
            self.weights.tensors[name].copy_(here)
            self.weights.tensors[name].grad = None
        elif message.kind == "weight-gradient":
            dense_gradient(self.weights.tensors[name]).add_(here)
        elif message.kind == "partial":
            runner = self.runners[message.stage]
            assert isinstance(runner, ChannelRunner)
            runner.put_partial(micro_batch, source, name, here)
        elif message.kind == "gradient":
            self._maker(name).add_gradient(micro_batch, name, part.box, here)
        elif message.kind == "output":
            self.runners[message.stage].put_output(micro_batch, name, part.box, here)
        elif message.kind in ("halo-gradient", "output-gradient") and not part.is_value:
            self.runners[message.stage].add_gradient(micro_batch, name, part.box, here)
        else:
            self.runners[message.stage].put_value(micro_batch, name, part.box, here)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are; their sum says so, unless it overflows itself."""
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())


_ACTS: dict[type[Action], str] = {
    Forward: "_forward",
    Loss: "_loss",
    Backward: "_backward",
    Send: "_send",
    Receive: "_receive",
    Reduce: "_reduce",
    Await: "_await",
    Step: "_step",
    Discard: "_discard",
}
"""Which method takes which action."""
