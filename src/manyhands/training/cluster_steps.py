"""The steps of Lightning's own loop, done on a cluster: each call of `training_step` is one step of `mh.prepare`.

    the loop                                      here
    optimizer.step(closure)
      closure: training_step(batch, batch_idx) ─▶ forward, backward, sums, clipping, update on the workers ─▶ loss
               zero_grad, loss.backward()         of a number: nothing
      update                                      nothing: no parameter here has a gradient
    validation, checkpoints, hooks                the current weights are loaded first

So all that the loop does between two steps is done by Lightning itself, and by nobody else. What would see a difference
is refused: gradients are on the workers, and an update that the loop leaves out has been made there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from manyhands.data.pushed import pair_of
from manyhands.executor.rates import Accumulation
from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph.own_loss import OWN_LOSS
from manyhands.training.current_weights import CurrentWeights
from manyhands.training.prepare import PreparedStep
from manyhands.training.prepare_config import PrepareConfig
from manyhands.training.pushed_training import PushedTraining
from manyhands.training.step_form import BatchForm, StepForm


class ClusterSteps:
    """Does the steps of one `fit` on a cluster. The cluster begins with the first batch."""

    def __init__(self, module: nn.Module, config: PrepareConfig, *, is_accumulated: bool = False) -> None:
        """`is_accumulated`: several steps may add up their gradients for one update."""
        self.module, self._config, self._is_accumulated = module, config, is_accumulated
        self.prepared: PreparedStep | None = None
        self._form: StepForm
        self._batch_form: BatchForm
        self._hooks: CurrentWeights | None = None
        self._optimizer_hooks: list[Any] = []
        self._versions: tuple[Any, ...] = ()
        self._was_updated = True
        """Whether the loop has made the update of the step before: its optimizer's step was called."""

    @contextlib.contextmanager
    def in_place_of_training_step(self) -> Iterator[None]:
        """Do the steps of the module within this context; at its end the cluster is closed."""

        def training_step(batch: Any, batch_idx: int) -> Any:
            return self(batch)

        methods = {"training_step": training_step, "configure_gradient_clipping": lambda *_, **__: None}
        self.module.__dict__.update(methods)  # clipping: workers have done it
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to show
                self.close()
            raise
        finally:
            for name in methods:
                del self.module.__dict__[name]
            self.close()

    @property
    def training(self) -> PushedTraining | None:
        """The training; None: it has not begun, or is closed."""
        training = self.prepared._training if self.prepared is not None else None
        return training if training is not None and not training.is_closed else None

    # One step

    def __call__(self, batch: Any) -> Any:
        """Train on a batch, and return its loss as training_step would."""
        trainer: Any = self.module.trainer
        with torch.autocast("cpu", enabled=False):  # the loop's own; the network is captured with its precision
            if self.prepared is None:
                self._begin(trainer, batch)
            self._check()
            accumulation = Accumulation(
                1.0 / trainer.accumulate_grad_batches, not trainer.fit_loop._should_accumulate()
            )
            assert self.prepared is not None
            number = float(self.prepared.push(*pair_of(self._batch_form.divided(batch), None), accumulation))
        self._was_updated = not accumulation.updates
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
        loss = torch.tensor(number, dtype=dtype, requires_grad=True)
        notes = self._form.notes
        for name, options in notes.logged:
            self.module.log(name, loss, **options)  # type: ignore[operator]
        return {"loss": loss} if notes.returns_dict else loss

    def _begin(self, trainer: Any, batch: Any) -> None:
        """Capture the module by its first batch, and start the workers."""
        (optimizer,) = trainer.optimizers
        form = BatchForm.of(batch)
        try:
            self._prepare(form, batch, optimizer)
        except CaptureFailed:
            if form.kind == "whole":
                raise
            self._prepare(BatchForm("whole"), batch, optimizer)  # what looked like a target goes into the network
        training = self.training
        assert training is not None
        self._hooks = CurrentWeights(self.module, training.refresh)
        self._optimizer_hooks = [
            optimizer.register_step_post_hook(lambda *_: self._updated()),
            optimizer.register_state_dict_pre_hook(lambda *_: self.load_optimizer()),
        ]
        self._versions = self._current_versions()
        left_out = self._form.notes.left_out
        if left_out:
            warnings.warn(
                f"training_step logs {' and '.join(map(repr, left_out))}, which will not be logged: workers return the "
                "loss of a step and nothing else. Log what is computed of outputs in validation_step.",
                UserWarning,
                stacklevel=2,
            )

    def _prepare(self, form: BatchForm, batch: Any, optimizer: Any) -> None:
        self._batch_form, self._form = form, StepForm.named(self.module, form, batch)
        prepared = PreparedStep(
            self._config, self._form, OWN_LOSS, optimizer, None, is_accumulated=self._is_accumulated
        )
        try:
            prepared.begin(*pair_of(form.divided(batch), None))
        except CaptureFailed as error:
            if self._form.refusal is not None:
                raise self._form.refusal from error
            raise
        self.prepared = prepared

    def _updated(self) -> None:
        """Note that the loop's own optimizer has made its step, with the numbers that the workers had."""
        training = self.training
        if training is None:
            return
        if self._was_updated:
            raise BadValue(
                "The optimizer was stepped without a step of the network before it.",
                hint="Let optimizer_step call optimizer.step(closure=optimizer_closure) once for every batch.",
            )
        training.optimizer.check_unchanged(training.batches.end - 1)
        self._was_updated = True

    def _check(self) -> None:
        """Refuse what was done here since the last step and workers would not know of."""
        if not self._was_updated:
            raise BadValue(
                "The update of the last step was left out here; the workers have made it.",
                hint="Take out optimizer_step of the module; accumulate_grad_batches= leaves out updates.",
            )
        versions = self._current_versions()
        if versions == self._versions:
            return
        training = self.training
        if training is None:
            return
        changed = self._changed(training, versions)
        if changed:
            raise BadValue(
                f"'{changed}' was changed here while the workers train it.",
                hint="Take out the hook or callback that changes weights, or what is trained, during training.",
            )
        self._versions = versions

    def _changed(self, training: PushedTraining, versions: tuple[Any, ...]) -> str:
        """Return the name of a parameter that has changed here; empty: none has, they were loaded."""
        is_current = training._loaded == training.batches.end
        for name, parameter in self.module.named_parameters():
            kept = training.state.weights.get(name)
            if kept is not None and not (is_current and torch.equal(parameter.detach(), kept.to(parameter.dtype))):
                return name
        return "" if [v[1] for v in versions] == [v[1] for v in self._versions] else "requires_grad"

    def _current_versions(self) -> tuple[Any, ...]:
        return tuple((parameter._version, parameter.requires_grad) for parameter in self.module.parameters())

    # Between steps

    def refresh(self) -> None:
        """Load the current weights into the module."""
        if self.training is not None:
            self.training.refresh()

    def load_optimizer(self) -> None:
        """Load what the workers' optimizers keep into the loop's, for a checkpoint of Lightning's."""
        training = self.training
        if training is not None:
            with training.ending_on_failure():
                training.optimizer.take_back(training.settle())

    def close(self) -> None:
        """End the workers; module and optimizer have what was trained."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
        for handle in self._optimizer_hooks:
            handle.remove()
        self._optimizer_hooks = []
        if self.prepared is not None:
            self.prepared.close()
