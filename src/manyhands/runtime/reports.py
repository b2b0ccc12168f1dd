"""The handling of workers' reports during a run: rounds and steps that are done, copies of their state, logs."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from manyhands.executor.log import MeasuredSpan
from manyhands.facts.errors import BadValue
from manyhands.runtime.agreement import Agreement
from manyhands.runtime.control import Message
from manyhands.runtime.control_messages import Corrupt, Done, Heartbeat, Held, Holds, Progress, State, Stepped
from manyhands.runtime.control_parts import TensorEntry
from manyhands.runtime.stalls import Verdict

if TYPE_CHECKING:
    from manyhands.runtime.run import Run


class Reports:
    """The reports of one run's workers: checked, compared with each other, and entered into the run's outcome."""

    def __init__(self, run: Run, agreement: Agreement) -> None:
        self._run, self.agreement = run, agreement
        self.agreed_steps = run.first
        """Steps that all devices are done with, and whose numbers agree: no later state is trusted."""
        self._rounds: dict[int, dict[str, Progress]] = defaultdict(dict)
        """Step -> device -> its report, of rounds that some devices have ended."""
        self._listed: dict[str, tuple[TensorEntry, ...]] = {}
        """Device -> the tensors of its state."""

    def handle(self, name: str, message: Message) -> None:
        """Process a message from a worker."""
        if isinstance(message, Progress):
            self.progressed(name, message)
        elif isinstance(message, Stepped):
            self._check_step(name, message.step, self._run.steps.updated[name] + 1)
            self._run.steps.updated[name] = message.step
        elif isinstance(message, Heartbeat):
            self._run.hooks.on_arrivals(name, message.arrivals)
        elif isinstance(message, State):
            self._offered(name, message)
        elif isinstance(message, Holds):
            self._run.backups.holds(name, message)
        elif isinstance(message, Held):
            self._run.backups.held(name, message)
        elif isinstance(message, Corrupt):
            self._corrupt(name, message)
        elif isinstance(message, Done):
            offset = self._run.coordinator.members[name].clock_offset_seconds
            message.log.spans = [_moved(span, offset) for span in message.log.spans]
            self._run.outcome.logs[name] = message.log

    def _offered(self, name: str, message: State) -> None:
        """Take the offer of a copy of a worker's state: for the folder, against losses, or both."""
        if message.tensors is not None:
            self._listed[name] = message.tensors
        listed = self._listed.get(name)
        if listed is None:
            raise BadValue(
                f"Worker {name} offers its state after step {message.step}, made of the same tensors as before; "
                "it has not reported yet which those are."
            )
        if message.has_changed:
            reason = f"its copy of its state after step {message.step} has changed while it was kept"
            raise self._run.evicted(Verdict(name, reason))
        is_wanted = message.step in self._run.order.snapshots and name in self._run.keepers
        if not (is_wanted or self._run.backups.is_backup(message.step)):
            raise BadValue(f"Worker {name} offers its state after step {message.step}; nobody asked for it.")
        if is_wanted:
            self._run.gathering.take(name, message, listed)
        self._run.backups.kept(name, message, listed)

    def _corrupt(self, name: str, message: Corrupt) -> None:
        """Go on without a device whose copy has changed since it was made; the state is taken from elsewhere."""
        source = (
            message.source
            if message.tensor in self._run.handout.sources.get(name, {}).get(message.source, ())
            else name
        )
        whose = "its own copy" if source == name else f"what it gave {name}"
        raise self._run.evicted(Verdict(source, f"{whose} of {message.tensor:.80} is not what it was when it was kept"))

    def ended_round(self, name: str, message: Progress) -> bool:
        """Record that a device has ended a round, and return whether this was new."""
        if message.step <= self._run.steps.done[name]:
            return False
        self._check_step(name, message.step, self._run.steps.round_end(self._run.steps.done[name] + 1) - 1)
        self._run.stalls.ended_round(name, message.seconds, message.step, self._run.steps.done[name])
        if self._run.steps.round_of(message.step) == self._run.first:
            began = time.monotonic() - message.seconds
            self._run.times.first_round_began = min(began, self._run.times.first_round_began or began)
            self._run.members[name].resident_dataset = self._run.feed.feeder.resident_key(name)
        self._run.steps.done[name] = self._run.steps.updated[name] = message.step
        self._run.hooks.on_arrivals(name, message.arrivals)
        self._run.outcome.bytes_between |= Counter({(name, to): count for to, count in message.sent.items()})
        self._run.hooks.on_progress(name, message)
        return True

    def progressed(self, name: str, message: Progress) -> None:
        """Record the report of a round; once all devices have ended it, its steps are done."""
        if not self.ended_round(name, message):
            return
        reported = self._rounds[message.step]
        reported[name] = message
        if len(reported) < len(self._run.names):
            return
        del self._rounds[message.step]
        self._compare(message.step, reported)
        now = time.monotonic()
        first, end = self._run.steps.round_of(message.step), message.step + 1
        seconds, self._run.times.round_ended = (now - self._run.times.round_ended) / (end - first), now
        for place, step in enumerate(range(first, end)):
            self._run.feed.inputs.pop(step, None)
            parts = [reported[device].losses[place] for device in self._run.names if reported[device].losses]
            late = [reported[device].staleness[place] for device in self._run.names if reported[device].staleness]
            norms = [reported[device].grad_norms for device in self._run.names if reported[device].grad_norms]
            loss = sum(parts) if parts else None
            self._run.outcome.step_seconds.append(seconds)
            if loss is not None:
                self._run.outcome.losses.append(loss)
            if late or self._run.order.plan.order == "replay":
                self._run.outcome.staleness.append(max(late, default=0))
            if norms and place < len(norms[0]):  # the same on every device
                norm = norms[0][place]
                self._run.outcome.grad_norms.append(norm if norm is not None else math.nan)
            self._run.hooks.on_step(step, loss, seconds)
        self._run.gathering.ended(message.step)

    def _compare(self, step: int, reported: Mapping[str, Progress]) -> None:
        """Go on without a device whose numbers of a round contradict those of the others.

        To be called before anything of the round is reported, kept or safe: the next generation begins with a state
        from before it.
        """
        sums = {name: report.sums for name, report in reported.items()}
        sources = {
            name: report.not_finite_from for name, report in reported.items() if report.not_finite_from in reported
        }
        if (verdict := self.agreement.compare(step, sums, sources)) is not None:
            raise self._run.evicted(verdict)
        self.agreed_steps = step + 1

    def _check_step(self, name: str, step: int, next_end: int) -> None:
        """Go on without a device that reports a step that it cannot have done."""
        if step > next_end or step >= self._run.feed.sent:
            sent = self._run.feed.sent
            reason = f"it says that it has done step {step}; the next one was {next_end}, and {sent} were sent"
            raise self._run.evicted(Verdict(name, reason))


def _moved(span: MeasuredSpan, offset: float) -> MeasuredSpan:
    return msgspec.structs.replace(span, start=span.start + offset, end=span.end + offset)
