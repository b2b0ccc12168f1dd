"""A split rehearsed in one process: what edge and server would compute, without either (the simulation of SPLIT §5.3).

Upstream runs forward on weights that are behind, features are packed and unpacked, downstream trains at once, and
upstream replays when the bound makes it wait: as late as K allows, which is the worst that can happen.

    grouped     K+1 forward passes, then their updates: the i-th finds weights i updates on
    window      from the K+1st on, every pass finds weights K updates on

It trains as the executor does, operator by operator, and serves to find out what K and bits do to accuracy before any
device takes part: calibration, and the studies of convergence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from manyhands.executor.codec import NoRange, pack, unpack
from manyhands.executor.optimizers import Stepper, build
from manyhands.executor.schedules import at_start
from manyhands.executor.scheduling import Scheduling
from manyhands.executor.share_loss import ShareLoss, trained_weights
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Codec, Plan, Replay, Stage
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import backward_piece
from manyhands.graph.weights import Weights
from manyhands.schedule.packing import packed_bits

Tensors = dict[str, torch.Tensor]
Batch = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""Inputs and targets, by the graph's and the loss's names."""


@dataclass
class Score:
    """The score over some batches, in inference. Loss is the mean of theirs; accuracy is None where targets are not
    classes."""

    loss: float
    accuracy: float | None


@dataclass
class _UnderWay:
    """A batch that upstream has run forward, and the gradients that came back for it."""

    context: Context
    inputs: Mapping[str, torch.Tensor]
    made: Tensors | None
    """The output of its forward pass, where no update came after it."""
    gradients: Tensors


class Rehearsal:
    """A captured graph, trained as if it were cut before layer `cut`; 0 or all of them: not cut."""

    def __init__(
        self,
        graph: Graph,
        optimizer: Optimizer,
        cut: int,
        *,
        codec: Codec | None = None,
        replay: Replay | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        network = graph.network
        position = network.layers[cut].first if 0 < cut < len(network.layers) else 0
        self.graph, self.network, self.seed, self.device = graph, network, seed, torch.device(device)
        self.codec, self.replay = codec or Codec(), replay or Replay(k=0)
        self.weights = Weights.copied(graph, device=self.device)
        if state is not None:
            self.load(state)
        self.upstream = Piece(graph, self.weights, 0, position)
        self.downstream = Piece(graph, self.weights, position)
        self._whole = Piece(graph, self.weights)
        trained = trained_weights(graph)
        ours = [
            {name: self.weights.tensors[name] for name in piece.weight_names if name in trained}
            for piece in (self.upstream, self.downstream)
        ]
        self._up, self._down = (build(at_start(optimizer), weights) for weights in ours)
        self._scheduling = Scheduling.by_name(optimizer)
        self._trained = {**ours[0], **ours[1]}
        self._learns = bool(ours[0])
        """Whether anything upstream is trained: else nothing comes back."""
        self._under_way: deque[_UnderWay] = deque()
        self._losses: dict[int, ShareLoss] = {}
        self.steps_done = 0
        self.losses: list[float] = []
        self.staleness: list[int] = []
        """Updates between the forward pass of each step and its own, upstream."""
        self._updates = 0
        self._begun: deque[int] = deque()

    def train(self, inputs: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> float:
        """Train on one mini-batch and return its loss. Numbers that are not finite end up in the loss, or as a loss of
        nan."""
        inputs, targets = self._here(inputs), self._here(targets)
        context = Context(True, self.seed, self.steps_done, 0, self._samples(inputs))
        self.steps_done += 1
        try:
            loss = self._train(context, inputs, targets)
        except NoRange:
            loss = math.nan
        self.losses.append(loss)
        return loss

    def _train(self, context: Context, inputs: Tensors, targets: Tensors) -> float:
        is_fresh = not self._under_way
        features: Tensors = {}
        made: Tensors | None = None
        if self.upstream.nodes:
            entering = {name: inputs[name] for name in self.upstream.inputs}
            if is_fresh and self._learns:
                made = self.upstream(entering, context)
                features = {name: tensor.detach() for name, tensor in made.items()}
            else:
                with torch.no_grad():
                    features = self.upstream(entering, replace(context, records=False))
        arrived, errors = self._carried(features)
        loss, gradients = self._downstream(context, inputs, arrived, targets)
        if self._learns:
            self._begun.append(self._updates)
            corrected = self._with_feedback(gradients, errors)
            self._under_way.append(_UnderWay(context, inputs, made, corrected))
            self._catch_up()
        return loss

    def _carried(self, features: Tensors) -> tuple[Tensors, Tensors]:
        """Return the features as they arrive, and what packing has changed of them."""
        arrived: Tensors = {}
        errors: Tensors = {}
        for name, tensor in features.items():
            spec = self.network.tensors[name]
            bits = packed_bits(self.codec, spec.dtype)
            if not bits:
                arrived[name] = tensor
                continue
            local = tensor.detach().cpu()
            error = torch.empty_like(local, memory_format=torch.contiguous_format)
            packed = pack(local, bits, error)
            arrived[name] = unpack(packed, tuple(local.shape), local.dtype, bits, str(self.device))
            if spec.differentiable and self.codec.error_feedback:
                errors[name] = error.to(self.device)
        return arrived, errors

    def _downstream(
        self, context: Context, inputs: Tensors, arrived: Tensors, targets: Tensors
    ) -> tuple[float, Tensors]:
        """Run downstream forward, loss, backward and step; return the loss and the gradients of what arrived."""
        entered: Tensors = {}
        for name in dict.fromkeys([*self.downstream.inputs, *arrived]):
            tensor = arrived[name].detach() if name in arrived else inputs[name]
            is_learnt = name in arrived and self.network.tensors[name].differentiable
            entered[name] = tensor.requires_grad_() if is_learnt else tensor
        outputs = self.downstream({name: entered[name] for name in self.downstream.inputs}, context)
        values = {**entered, **outputs}
        loss, gradients = self._loss_for(context.samples)(values, targets, context.samples)
        backward_piece(entered, outputs, gradients)
        self._update_by(self._down, context.step)
        return float(loss), {name: gradients[name] for name in arrived if name in gradients}

    @torch.no_grad()
    def _with_feedback(self, gradients: Tensors, errors: Tensors) -> Tensors:
        """Return the gradients as upstream takes them, corrected by the error of packing (Alg. 1, line 5)."""
        corrected: Tensors = {}
        for name, gradient in gradients.items():
            bits = packed_bits(self.codec, self.network.tensors[name].dtype) if self.codec.gradients else 0
            if bits:
                local = gradient.cpu()
                gradient = unpack(pack(local, bits), tuple(local.shape), local.dtype, bits, str(self.device))
            error = errors.get(name)
            corrected[name] = gradient if error is None else gradient - error * gradient * gradient
        return corrected

    def _catch_up(self) -> None:
        """Update upstream where the bound allows no further batch under way."""
        most = math.inf if self.replay.k is None else self.replay.k + 1
        if len(self._under_way) < most:
            return
        if self.replay.mode == "grouped":
            self.drain()
        else:
            self._update()

    def drain(self) -> None:
        """Update upstream with all that is under way."""
        while self._under_way:
            self._update()

    def _update(self) -> None:
        batch, begun = self._under_way.popleft(), self._begun.popleft()
        self.staleness.append(self._updates - begun)
        made = batch.made if begun == self._updates else None
        if made is None:
            entering = {name: batch.inputs[name] for name in self.upstream.inputs}
            made = self.upstream(entering, replace(batch.context, moves_buffers=False))
        backward_piece({}, made, batch.gradients)
        self._update_by(self._up, batch.context.step)
        self._updates += 1

    def _update_by(self, stepper: Stepper, step: int) -> None:
        """Step with what schedules make of the optimizer's options at a step, as the executor does."""
        if self._scheduling is not None:
            stepper.take(self._scheduling.layout.options(self._scheduling.at(step)))
        stepper.step()
        stepper.zero()

    def score(self, batches: Iterable[Batch]) -> Score:
        """Return loss and accuracy in inference, with the weights as they are now."""
        total, count, right, answers = 0.0, 0, 0, 0
        for inputs, targets in batches:
            inputs, targets = self._here(inputs), self._here(targets)
            samples = self._samples(inputs)
            with torch.no_grad():
                context = Context(False, self.seed, 0, 0, samples)
                made = self._whole({name: inputs[name] for name in self._whole.inputs}, context)
            loss, _ = self._loss_for(samples)(made, targets, samples)
            total += float(loss) * samples
            count += samples
            output, target = made[self.graph.outputs[0]], next(iter(targets.values()), None)
            if target is not None and target.dim() == 1 and not target.is_floating_point() and output.dim() == 2:
                right += int((output.argmax(1) == target).sum())
                answers += samples
        return Score(total / max(count, 1), right / answers if answers else None)

    def norm(self) -> float:
        """Return the sum of all trained weights' sizes: ‖w‖₁ of Eq. 6."""
        with torch.no_grad():
            return float(sum(float(weight.abs().sum(dtype=torch.float64)) for weight in self._trained.values()))

    def state(self) -> Tensors:
        """Return copies of all weights and buffers."""
        return {name: tensor.detach().clone() for name, tensor in self.weights.tensors.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.weights.tensors.items():
            tensor.copy_(state[name])

    def _here(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _samples(self, inputs: Mapping[str, torch.Tensor]) -> int:
        for spec in self.graph.inputs:
            if spec.batch_axis is not None:
                return inputs[spec.name].shape[spec.batch_axis] // spec.rows_per_sample
        return 1

    def _loss_for(self, samples: int) -> ShareLoss:
        loss = self._losses.get(samples)
        if loss is None:
            plan = Plan(self.network.name, samples, (Stage((0, len(self.network.layers)), ("here",)),))
            loss = self._losses[samples] = ShareLoss(self.graph, plan, self.device)
        return loss
