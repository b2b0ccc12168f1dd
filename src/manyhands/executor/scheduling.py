"""The schedulers of a run: PyTorch's own objects, stepped in the coordinator as a training loop would step them.

    for step, batch in enumerate(loader):     the numbers of a step are read before its batch is sent
        optimizer.step()
        scheduler.step()                      interval "step"
        if the epoch ends: scheduler.step()   interval "epoch"
        if it is validated here: scheduler.step(metrics[monitor])         ReduceLROnPlateau

The numbers are a few steps ahead of the devices, except that those after a validation wait for it. They are kept since
the last checkpoint: steps that are run again after a loss get the same ones. A checkpoint holds what was observed, and
a resumed run steps the schedulers through it again: nothing of theirs is stored that would be code.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhands.executor.by_name import error_text
from manyhands.executor.rates import RateLayout, others
from manyhands.executor.schedules import check_ends, scheduler
from manyhands.executor.torch_optimizers import stand_ins
from manyhands.facts.errors import BadValue, ManyhandsError
from manyhands.facts.optimizer import Optimizer

Interval = Literal["step", "epoch"]
FACT = "schedule"
"""The fact of a checkpoint that `Scheduling.facts` returns."""
_NEEDS_VALIDATION = 'Add validate=data, validate_every="epoch" or a number of steps.'


@dataclass(frozen=True)
class Scheduled:
    """A scheduler with when it is stepped: after each step or epoch; one that needs a metric, after validation."""

    scheduler: Any
    interval: Interval = "step"
    frequency: int = 1
    """It is stepped once in so many steps of an epoch, epochs, or validations."""
    monitor: str = "loss"
    """The metric that ReduceLROnPlateau is given."""

    @property
    def needs_metric(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)

    @property
    def name(self) -> str:
        return type(self.scheduler).__name__


class Scheduling:
    """The numbers of each step, by schedulers over PyTorch's groups: those of the optimizer's `all_groups`."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], scheduled: Sequence[Scheduled]) -> None:
        self._groups, self._scheduled = groups, scheduled
        self.layout = RateLayout.of_groups(groups)
        self._fixed = others(groups)
        self._start = [copy.deepcopy(each.scheduler.state_dict()) for each in scheduled]
        self._first = self.layout.read(groups)
        self.steps_per_epoch = 1
        self.validates_after: Callable[[int], bool] | None = None
        """Whether the network is validated after so many steps; None: it never is."""
        self._front = 0
        """The step whose numbers the groups have now."""
        self._numbers = {0: self._first}
        self._observed: dict[int, dict[str, float]] = {}
        """Steps done -> the metrics that were observed then, of those that are monitored."""

    @classmethod
    def by_name(cls, optimizer: Optimizer) -> Scheduling | None:
        """Return the schedules that the optimizer names; None: it has none."""
        if not optimizer.schedule:
            return None
        made, groups = stand_ins(optimizer)
        return cls(groups, [Scheduled(scheduler(optimizer, torch_optimizer)) for torch_optimizer in made])

    @property
    def monitored(self) -> frozenset[str]:
        """The metrics that schedulers need."""
        return frozenset(each.monitor for each in self._scheduled if each.needs_metric)

    def begin(self, steps_per_epoch: int, last_step: int) -> None:
        """Note how long an epoch and the run are; refuse schedules that end before it."""
        self.steps_per_epoch = steps_per_epoch
        for interval, count in (("step", last_step), ("epoch", last_step // steps_per_epoch)):
            stepped = [each for each in self._scheduled if each.interval == interval and not each.needs_metric]
            for each in stepped:
                check_ends([each.scheduler], count // each.frequency)

    def check(self) -> None:
        """Refuse a scheduler that needs a metric where nothing is validated."""
        for each in self._scheduled:
            if each.needs_metric and self.validates_after is None:
                raise BadValue(
                    f"{each.name} needs the '{each.monitor}' of a validation, and there is none.",
                    hint=_NEEDS_VALIDATION,
                )

    # Numbers of steps

    def is_known(self, step: int) -> bool:
        """Return whether the numbers of a step can be told: no validation before it is outstanding."""
        return not any(self._is_awaited(done) for done in range(self._front + 1, step + 1))

    def at(self, step: int) -> tuple[float, ...]:
        """Return the numbers of a step, in the order of the layout."""
        while self._front < step:
            self._advance()
        return self._numbers[step]

    def learning_rate(self, step: int) -> float | None:
        """Return the learning rate of the first group at a step; None: it is not known, or no longer."""
        numbers = self._numbers.get(step)
        return None if numbers is None else numbers[0]

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a validation, for the schedulers that need them.

        It comes when all steps before it are done and none after it was sent. One that nobody awaits, because it is
        made again after a loss, changes nothing.
        """
        steps_done = self._front + 1
        if not self._is_awaited(steps_done):
            return
        missing = sorted(self.monitored - set(metrics))
        if missing:
            raise BadValue(
                f"A schedule follows '{missing[0]}', which the validation does not give: {', '.join(sorted(metrics))}.",
                hint='Name one of these: scheduler={"scheduler": ..., "monitor": "loss"}.',
            )
        self._observed[steps_done] = {name: float(metrics[name]) for name in sorted(self.monitored)}

    @property
    def name(self) -> str:
        """The key of this among those that listen to validations."""
        return FACT

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints hold beside `facts`: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned."""

    def forget_before(self, step: int) -> None:
        """Forget numbers of earlier steps, which will not be run again, but of the last one done."""
        for old in [earlier for earlier in list(self._numbers) if earlier < min(step, self._front) - 1]:
            del self._numbers[old]

    def _is_awaited(self, steps_done: int) -> bool:
        is_due = bool(self.monitored) and self.validates_after is not None and self.validates_after(steps_done)
        return is_due and steps_done not in self._observed

    def _advance(self) -> None:
        """Step every scheduler that is due after the step whose numbers the groups have now."""
        done = self._front + 1
        assert not self._is_awaited(done), "a validation is outstanding"
        in_epoch = self._front % self.steps_per_epoch + 1
        epochs, is_epoch_end = done // self.steps_per_epoch, done % self.steps_per_epoch == 0
        for each in self._scheduled:
            if each.needs_metric:
                continue
            if each.interval == "step" and in_epoch % each.frequency == 0:
                self._step(each)
            if each.interval == "epoch" and is_epoch_end and epochs % each.frequency == 0:
                self._step(each)
        if done in self._observed:
            number = sum(other <= done for other in self._observed)
            for each in self._scheduled:
                if each.needs_metric and number % each.frequency == 0:
                    self._step(each, self._observed[done][each.monitor])
        self._front = done
        now = others(self._groups)
        if any(new.get(name) != value for new, fixed in zip(now, self._fixed) for name, value in fixed.items()):
            raise BadValue(
                "A schedule has changed an option of the optimizer other than lr, momentum, betas and weight_decay."
            )
        self._numbers[done] = self.layout.read(self._groups)

    def _step(self, each: Scheduled, *metric: float) -> None:
        try:
            each.scheduler.step(*metric)
        except ManyhandsError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise BadValue(
                f"The schedule {each.name} cannot go on after step {self._front}: {error_text(error)}"
            ) from error

    # From one run to the next

    def facts(self, steps_done: int) -> dict[str, Any]:
        """Return what a checkpoint of so many steps holds: what was observed, and the numbers of the last step done."""
        observed = [
            [step, {name: str(value) for name, value in metrics.items()}]  # JSON has no nan
            for step, metrics in sorted(dict(self._observed).items())
            if step <= steps_done
        ]
        last = self._numbers.get(max(steps_done - 1, 0))
        return {FACT: {"observed": observed, "rates": list(last) if last is not None else []}}

    def resume(self, facts: Mapping[str, Any], steps_done: int) -> None:
        """Step the schedulers to where a run of `facts` was; refuse others than those it was started with."""
        stored = facts.get(FACT)
        if not isinstance(stored, dict):
            raise BadValue(
                "The run was started without a schedule; one is given now. It would not go on as it was.",
                hint="Leave the scheduler out, or start a new run.",
            )
        self._observed = _read_observed(stored.get("observed"), steps_done)
        while self._front < steps_done - 1:
            self._advance_again()
        now, was = list(self.at_front()), stored.get("rates")
        if was and now != was:
            raise BadValue(
                f"The run's learning rates and momenta were {was} at step {self._front}; by the schedule given now "
                f"they are {now}. It would not go on as it was.",
                hint="Give the same scheduler, as it was when the run was started, or start a new run.",
            )
        if steps_done and self._front < steps_done and not self._is_awaited(steps_done):
            self._advance_again()

    def at_front(self) -> tuple[float, ...]:
        return self._numbers[self._front]

    def _advance_again(self) -> None:
        self._advance()
        del self._numbers[self._front - 1]

    def rewind(self, steps_done: int) -> None:
        """Put the schedulers, which are the caller's objects, where a loop of so many steps would have left them."""
        if self._front <= steps_done:
            while self._front < steps_done and self.is_known(self._front + 1):
                self._advance()
            return
        for each, state in zip(self._scheduled, self._start):
            each.scheduler.load_state_dict(copy.deepcopy(state))
        for group, options in zip(self._groups, self.layout.options(self._first)):
            for name, value in options.items():
                _put(group, name, value)
        self._front, self._numbers = 0, {0: self._first}
        while self._front < steps_done:
            self._advance_again()


def _put(group: Any, name: str, value: Any) -> None:
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _read_observed(stored: Any, steps_done: int) -> dict[int, dict[str, float]]:
    """Return what a checkpoint says was observed; it is a file, and may hold anything."""
    observed: dict[int, dict[str, float]] = {}
    for entry in stored if isinstance(stored, list) else ():
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], int):
            raise BadValue(f"The checkpoint's schedule has observed {entry!r:.80}; it must be a step and metrics.")
        step, metrics = entry
        if not 0 < step <= steps_done or not isinstance(metrics, dict):
            raise BadValue(f"The checkpoint of step {steps_done} has observed {entry!r:.80}.")
        try:
            observed[step] = {str(name): float(value) for name, value in metrics.items()}
        except (TypeError, ValueError) as error:
            raise BadValue(f"The checkpoint's schedule has observed {metrics!r:.80}; it must be numbers.") from error
    return observed


def is_scheduler(value: object) -> bool:
    """Return whether something is a scheduler of PyTorch, or of the same methods."""
    if inspect.isclass(value):  # which makes one of an optimizer
        return False
    has_methods = all(callable(getattr(value, name, None)) for name in ("step", "state_dict"))
    return isinstance(value, LRScheduler) or (has_methods and not isinstance(value, torch.optim.Optimizer))
