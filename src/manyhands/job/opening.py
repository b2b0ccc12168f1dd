"""Opens a run: captures the model, checks it, makes the run folder, and says how to resume when something fails."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.executor import checkpoint
from manyhands.facts.errors import ManyhandsError
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import check_one_network
from manyhands.graph.unsupported import refuse_unsupported
from manyhands.graph.verify import Verified
from manyhands.job.aftermath import Aftermath
from manyhands.job.callbacks import Say
from manyhands.job.evaluation import captured
from manyhands.job.padding_check import check_padding
from manyhands.job.resume_hint import Words, point_to_checkpoint
from manyhands.job.self_check import SelfChecks, self_check
from manyhands.job.workload import Workload, check_same, go_on_with_data, resumed_from
from manyhands.observe.live import RunState as Ending
from manyhands.observe.recent import remember
from manyhands.observe.tensorboard import TensorBoardLog, need_tensorboard
from manyhands.runtime.living import Living
from manyhands.runtime.order import RunState
from manyhands.runtime.record import RunRecord, new_folder, resumed_state
from manyhands.weights.mapped import is_mapped, refuse_without_values


@dataclass(frozen=True)
class OpenedRun:
    """A run that is about to begin, or to be resumed: its graph, its folder, and where it begins."""

    graph: Graph
    record: RunRecord
    start: RunState
    folder: Path
    last_step: int
    is_resumed: bool
    graphs: Mapping[int, Graph] = field(default_factory=dict)
    """The graph of each length of samples, the longest of which is `graph`; under 0 the only one."""
    metric_names: tuple[str, ...] = ()
    """The names of the results of a validation."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint says besides from which the run goes on."""
    finish_checks: Callable[[], None] = lambda: None
    """Waits for the self-check, which goes on in a thread of its own, and raises what it has found: to be called before
    the first step, and before anything else uses the module."""


@contextlib.contextmanager
def open_run(
    workload: Workload,
    *,
    command: str = "train",
    document: Mapping[str, Any] | None = None,
    on_captured: Callable[[Graph], None] = lambda graph: None,
    tensorboard: bool = False,
    checks_meanwhile: bool = False,
) -> Iterator[OpenedRun]:
    """Capture the model and make the folder, and yield both.

    The message of an error in the middle tells how to resume: as a command line, if `document` holds the workload that
    it was started with. `on_captured` may refuse the graph before anything is made. `checks_meanwhile`: the self-check
    may go on in a thread while workers start and are measured; `finish_checks` waits for it.
    """
    config = workload.config
    if tensorboard:
        need_tensorboard()
    refuse_unsupported(workload.model)
    folder, resumed = resumed_from(config.folder, config.resume, config.say)
    examples = workload.examples()
    with workload.computing():
        graphs = {
            length: captured(workload.model, data, workload.loss, granularity=config.granularity, name=config.name)
            for length, data in examples.items()
        }
    check_one_network(graphs)
    graph = graphs[max(graphs)]
    on_captured(graph)
    refuse_without_values(graph.state)
    metric_names = workload.check_watched(graph)
    checks = [self_check(graphs[length], workload, config.verify, examples[length]) for length in graphs]
    with SelfChecks(checks) as checking:
        if not checks_meanwhile or workload.lengths is not None or any(map(is_mapped, graph.state.values())):
            checking.result()
            if config.verify is not False:
                check_padding(workload)
        yield from _opened(workload, command, document, folder, resumed, graphs, checking, tensorboard, metric_names)


def _opened(
    workload: Workload,
    command: str,
    document: Mapping[str, Any] | None,
    folder: str | Path | None,
    resumed: checkpoint.Checkpoint | None,
    graphs: Mapping[int, Graph],
    checking: SelfChecks,
    tensorboard: bool,
    metric_names: tuple[str, ...],
) -> Iterator[OpenedRun]:
    """Make the folder, yield the run, and write how it ended."""
    config, last_step, graph = workload.config, workload.last_step, graphs[max(graphs)]

    def finish_checks() -> None:
        for check in checking.new_results():
            _record_check(record, check, config.say if config.verify is not False else None)

    start = resumed_state(graph, resumed) if resumed is not None else RunState(dict(graph.state))
    if resumed is not None:
        check_same(resumed, workload, last_step)
        go_on_with_data(resumed, workload, config.say)
    is_new = folder is None or not Path(folder).exists()
    where = Path(folder) if folder is not None else new_folder(command, graph.name)
    record = RunRecord(where, steps_done=resumed.step if resumed is not None else None)
    if tensorboard:
        record.board = TensorBoardLog(where, start.steps_done)
    living = record.living = Living(
        where, command=command, model=graph.name, first_step=start.steps_done, steps=workload.known_steps or 0,
        batch_size=workload.batch_size,
    )  # fmt: skip
    ending: tuple[Ending, str] = ("ended", "")
    try:
        record.event("started", model=graph.name, step=start.steps_done, steps=workload.known_steps)
        if checking.is_over:
            finish_checks()
        remember(where)
        if config.on_opened is not None:
            living.shown_at(config.on_opened(where) or "")
        living.noted("starting workers")
        facts = resumed.facts if resumed is not None else {}
        yield OpenedRun(
            graph, record, start, where, last_step, resumed is not None, graphs, metric_names, facts, finish_checks
        )
    except BaseException as error:
        is_stop = isinstance(error, KeyboardInterrupt)
        ending = ("stopped", "") if is_stop else ("failed", str(getattr(error, "message", error))[:500])
        words = Words(command, where, document)
        with contextlib.suppress(ManyhandsError):  # a full disk, say, must not hide the first error
            if isinstance(error, KeyboardInterrupt):
                error.args = (_stopped(record, last_step, words.resume),)
            else:
                record.event("failed", kind=type(error).__name__, message=str(getattr(error, "message", error))[:500])
        if isinstance(error, ManyhandsError):
            point_to_checkpoint(error, words, workload.optimizer)
        raise
    finally:
        living.close(*ending)
        with Aftermath([], record, config.say).surviving("The run's files could not be closed"):
            record.close()
        if is_new and not (where / "checkpoints").exists():  # it never began: leave nothing behind
            shutil.rmtree(where, ignore_errors=True)


def _record_check(record: RunRecord, check: Verified, say: Say | None) -> None:
    """Record the result of the self-check in the folder; if it could not be made, report that too."""
    if not check.note:
        record.event(
            "verified", samples=check.samples, seconds=check.seconds, largest_relative_difference=check.difference
        )
        return
    text = f"The captured graph was not compared with the module: {check.note}."
    record.event("note", text=text)
    if say is not None:
        say(text)


def _stopped(record: RunRecord, last_step: int, resume_command: str) -> str:
    """Return the message for the user who stopped a run: the step of the last checkpoint, and how to resume."""
    newest = checkpoint.latest(record.folder)
    if newest is None:
        record.event("stopped", step=0, steps=last_step)
        return "It had not begun: nothing is kept."
    step = int(newest.name.rpartition("-")[2])
    record.event("stopped", step=step, steps=last_step, checkpoint=str(newest.relative_to(record.folder)))
    if step >= last_step:
        return f"All {last_step} steps are done. Checkpoint: {newest}"
    return f"{step} of {last_step} steps are done. Checkpoint: {newest}\nGo on with: {resume_command}"
