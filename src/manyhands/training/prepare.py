"""`mh.prepare`: a step of training on a cluster, for the loop that a user already has.

    step = mh.prepare(model, loss, optimizer, cluster=mh.Cluster.local(4))
    for batch in loader:
        loss = step(batch)
    step.close()                        # the model has the trained weights

Each step trains on one batch exactly as one device would: the same job, plan, executor and recovery as `mh.train`, with
the loop in place of its loader.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack

import msgspec
import torch
from torch import nn

from manyhands.data.kept import KeptBatches
from manyhands.data.pushed import BatchRows, PushedBatches, pair_of, samples_in
from manyhands.executor.feeder import check_batch
from manyhands.executor.rates import EACH_UPDATES, Accumulation
from manyhands.facts.allowed_optimizers import allow_optimizers
from manyhands.facts.errors import BadData, BadPlan, BadValue
from manyhands.facts.plan import Plan
from manyhands.graph.own_loss import LABELS, OWN_LOSS
from manyhands.job.config import takes
from manyhands.job.evaluation import EvaluateResult
from manyhands.job.given_optimizer import OptimizerLike, read_optimizer
from manyhands.job.notebook import shown_in_notebook
from manyhands.job.opening import open_run
from manyhands.planner.task import TileOptions
from manyhands.plans.planning import is_strategy
from manyhands.plans.tiles import check_tiles
from manyhands.runtime.gpu_settings import gpu_math
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.smaller_batches import plan_for
from manyhands.session.opening import expect_session, open_session
from manyhands.training.current_weights import CurrentWeights
from manyhands.training.loop_optimizer import LoopOptimizer, clear_absent
from manyhands.training.pending_loss import PendingLoss
from manyhands.training.prepare_config import PrepareConfig
from manyhands.training.prepare_options import PrepareOptions
from manyhands.training.pushed_training import LoopWorkload, PushedTraining
from manyhands.training.train import TrainJob

Loss = Callable[..., torch.Tensor] | Literal["own"]

_prepared: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PreparedStep]] = weakref.WeakKeyDictionary()
"""The step that each module was last prepared for."""


@takes(PrepareConfig)
def prepare(
    model: nn.Module,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    *,
    example: Any = None,
    **options: Unpack[PrepareOptions],
) -> PreparedStep:
    """Return a step that trains `model` on one batch after another over a cluster, for a loop of your own.

    `loss = step(batch)` trains exactly as one device would; `step.evaluate(batch)` gives loss and outputs by the
    current weights; after `step.close()`, or at the end of `with mh.prepare(...) as step`, the model holds the trained
    weights. The options are those of `mh.train`, without what the loop decides: data, epochs, batch size.

    loss            any callable (output, target) that torch.export can capture; left out: the loss that the model's
                    forward returns, given the target as its labels if it takes any
    optimizer       as for `mh.train`. With an optimizer of torch.optim every step has the rates that its groups have
                    when it is called: schedulers stay in the loop
    example         a batch like those to come: workers start and are measured now. Left out: at the first batch
    """
    config = shown_in_notebook(PrepareConfig.from_keywords("mh.prepare", options))
    return PreparedStep(config, model, loss if loss is not None else OWN_LOSS, optimizer, example)


class PreparedStep:
    """A step of training on a cluster, called with each batch of a loop."""

    def __init__(
        self, config: PrepareConfig, model: nn.Module, loss: Loss, optimizer: OptimizerLike | None, example: Any,
        *, is_accumulated: bool = False,
    ) -> None:  # fmt: skip
        """`example`: a batch to get ready with; None: the first one. `is_accumulated`: several steps may add up their
        gradients for one update (`push`)."""
        if optimizer is None:
            raise BadValue("optimizer is not given.", hint='Give the loop\'s own, or mh.Optimizer("SGD", lr=0.1).')
        self._config, self._model, self._loss, self._optimizer = config, model, loss, optimizer
        self._is_accumulated = is_accumulated
        self._training: PushedTraining | None = None
        self._finalizer: Any = None
        self._is_closed = False
        if isinstance(model, nn.Module):
            before = _prepared.pop(model, lambda: None)()
            if before is not None:
                before.close()
            _prepared[model] = weakref.ref(self)
        expect_session(config.cluster)
        if example is not None:
            self.begin(*self._pair((example,)))

    # Training

    def __call__(self, *batch: Any) -> PendingLoss:
        """Train on one batch: a pair (inputs, target), or both as two arguments. Return its loss, a number that is
        waited for when it is read."""
        return self.push(*self._pair(batch))

    def push(self, inputs: Any, targets: Any, accumulation: Accumulation = EACH_UPDATES) -> PendingLoss:
        """Train on a batch that nobody writes to from here on; `accumulation`: what becomes of its gradients."""
        training = self._begun(inputs, targets)
        size, graph = training.job.workload.batch_size, training.job.graph
        if (samples := samples_in(inputs)) > size:
            raise BadData(
                f"The batch has {samples} samples; the loop began with batches of {size}, and none may be larger.",
                hint="Begin with the largest: mh.prepare(..., example=batch).",
            )
        check_batch(graph, samples, inputs, targets)
        if samples < size:
            plan_for(training.plan, graph.network, samples, training.batches.end)
        with training.ending_on_failure():
            step, future = training.push(inputs, targets, accumulation)
        return PendingLoss(step, future, training)

    def evaluate(self, *batch: Any) -> EvaluateResult:
        """Return loss, accuracy and output for a batch of any size, by the current weights, in evaluation mode.

        Training is not changed by it. The steps before are waited for.
        """
        inputs, targets = self._pair(batch)
        training = self._begun(inputs, targets)
        with training.ending_on_failure():
            return training.evaluated(inputs, targets)

    # The state

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict with the current weights, as copies."""
        if self._training is not None:
            self._training.refresh()
        return {name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in self._model.state_dict().items()}  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the current weights to a file, which `torch.load` reads for the plain module."""
        torch.save(self.state_dict(), path)

    @property
    def steps_done(self) -> int:
        """The number of steps so far, those under way too; of a resumed run, those before as well."""
        return self._training.batches.end if self._training is not None else 0

    @property
    def folder(self) -> Path | None:
        """The run's folder; None: nothing has begun."""
        return self._training.job.folder if self._training is not None else None

    @property
    def plan(self) -> Plan | None:
        """The current plan; None: nothing has begun."""
        return self._training.plan if self._training is not None else None

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """For each time that workers were lost, joined or left: how the run went on, from which step, after how many
        seconds. Complete after `evaluate`, `state_dict` or `close`."""
        return self._training.recoveries if self._training is not None else []

    # The end

    def close(self) -> None:
        """End the workers, after the steps under way; the model then holds the trained weights."""
        self._is_closed = True
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> PreparedStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # the first error is the one to show
            self.close()

    def __repr__(self) -> str:
        where = "closed" if self._is_closed else "not begun" if self._training is None else f"run {self.folder}"
        return f"<PreparedStep: {type(self._model).__name__}, {self.steps_done} steps, {where}>"

    # Getting ready

    def _pair(self, batch: tuple[Any, ...]) -> tuple[Any, Any]:
        return pair_of(batch, LABELS if self._loss == OWN_LOSS else None)

    def _begun(self, inputs: Any, targets: Any) -> PushedTraining:
        """Return the training, begun with this batch if there is none yet."""
        if self._training is not None:
            self._training.raise_error()
        if self._is_closed or (self._training is not None and self._training.is_closed):
            raise BadValue("The step is closed.", hint="Prepare another: step = mh.prepare(model, loss, optimizer).")
        return self._training or self.begin(inputs, targets)

    def begin(self, inputs: Any, targets: Any) -> PushedTraining:
        """Capture the model, start and measure workers, and plan for batches like this one."""
        config = replace(self._config, batch_size=samples_in(inputs), shuffle=False)
        allow_optimizers(config.allow_optimizers)
        optimizer = LoopOptimizer(read_optimizer(self._model, self._optimizer), accumulates=self._is_accumulated)
        with contextlib.ExitStack() as stack, torch.random.fork_rng(devices=[]):  # the loop's shuffling draws on it
            stack.enter_context(optimizer.given.frozen())
            workload = LoopWorkload(
                self._model, BatchRows(inputs, targets), self._loss, optimizer.given.optimizer, config,
                config.batch_norm, precision=config.precision,
            )  # fmt: skip
            training = _opened(config, workload, optimizer, stack)
            _watch(self._model, training, stack)
            training.resources = stack.pop_all()
        self._training = training
        self._finalizer = weakref.finalize(self, training.close)
        return training


def _opened(
    config: PrepareConfig, workload: LoopWorkload, optimizer: LoopOptimizer, stack: contextlib.ExitStack
) -> PushedTraining:
    """Return a training that is ready for its first batch; `stack` has what is to be closed after it."""
    tiles, plan = config.tile_options, config.plan
    opened = stack.enter_context(
        open_run(
            workload, command="prepare",
            on_captured=lambda graph: check_tiles(graph.network, tiles if plan == "tiles" else None),
            tensorboard=config.tensorboard,
        )
    )  # fmt: skip
    session = stack.enter_context(
        open_session(
            config.cluster, logs=opened.folder / "workers", say=config.say, silence_seconds=config.silence_seconds,
            rendezvous=config.rendezvous,
        )
    )  # fmt: skip
    retry_policy = RetryPolicy(config.replan, config.min_devices, config.max_devices, session.rejoin_seconds)
    session.begin(retry_policy)
    session.coordinator.gpu_math = gpu_math(exact=config.exact)
    job = TrainJob(workload, session, opened)
    decided: dict[str, Any] = {
        "plan": "given" if isinstance(plan, Plan) else str(plan), "micro_batches": config.micro_batches,
    }  # fmt: skip
    if plan == "tiles":
        decided["tiles"] = msgspec.to_builtins(tiles or TileOptions())
    planned = replace(job.planned(retry_policy, decided if opened.is_resumed else None), steps=0)
    if planned.plan.steps_per_round > 1:
        raise BadPlan(
            f"The plan's order is '{planned.plan.order}', whose rounds have {planned.plan.steps_per_round} steps; a "
            "loop has the loss of each step before the next.",
            hint="Use order: 1f1b.",
        )
    opened.record.decided({**workload.facts, **decided}, planned.cluster, planned.profile, planned.plan)
    if config.on_planned is not None:
        config.on_planned(planned)
    job._show(planned)
    if not opened.is_resumed:
        job.begin_with(*optimizer.given.state())
    kept = stack.enter_context(KeptBatches(opened.folder))
    strategy = str(plan) if not isinstance(plan, Plan) and is_strategy(str(plan)) else "auto"
    batches = PushedBatches(opened.start.steps_done, kept)
    return PushedTraining(job, planned, strategy, retry_policy, batches, optimizer)


def _watch(model: nn.Module, training: PushedTraining, stack: contextlib.ExitStack) -> None:
    """Keep a module that is trained elsewhere usable: its weights are loaded when it is used, and steps of PyTorch's
    optimizers that were left in the loop do nothing."""
    stack.callback(CurrentWeights(model, training.refresh).remove)
    stack.callback(clear_absent, model)
    for torch_optimizer in training.optimizer.given.objects:
        stack.callback(torch_optimizer.register_step_pre_hook(lambda *_: clear_absent(model)).remove)
