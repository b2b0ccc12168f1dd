"""The folder of a run: everything that was decided and everything that happened, each file valid at any moment.

config.yaml  cluster.yaml  profile.json  plan.yaml       the arguments, the cluster, its profile and the plan
events.jsonl  metrics.csv                                what happened, line by line
validation.csv                                           the results of each validation
live.json  round.json                                    the present state, or how the run ended (observe/live.py)
devices.json  stages.json  trace.json  plots/*.png       what each device did; measured beside predicted
tensorboard/                                             the same for TensorBoard, if asked for
checkpoints/step-000120/                                 model.safetensors (and ema.safetensors) loads into the module
best/                                                    the checkpoint with the best validation, if asked for
adapter/                                                 of a module that PEFT has wrapped: as PEFT writes it
workers/*.log                                            the output of local workers
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from manyhands.executor import checkpoint
from manyhands.executor.averaging import KEY as AVERAGE_KEY
from manyhands.executor.averaging import divided
from manyhands.executor.log import DeviceLog, MeasuredSpan
from manyhands.facts.cluster import Cluster
from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile
from manyhands.facts.network import Network, WeightSpec
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.profile import DeviceProfile, Profile
from manyhands.files.documents import make_folder, read_document, write_document, write_failed, write_text_atomic
from manyhands.files.plain import open_plain
from manyhands.graph.graph import Graph
from manyhands.observe.append import LineFile, Metrics
from manyhands.observe.tensorboard import TensorBoardLog
from manyhands.observe.validation_log import COLUMNS as VALIDATION_COLUMNS
from manyhands.observe.validation_log import Row, ValidationLog
from manyhands.runtime.living import Living
from manyhands.runtime.order import RunState
from manyhands.runtime.state import constant_weights
from manyhands.weights.adapters import peft_model_of, sampled_digest
from manyhands.weights.mapped import is_mapped

COLUMNS = ("step", "epoch", "loss", "seconds", "samples_per_second", "staleness", "grad_norm")
KEPT_CHECKPOINTS = 3
FROZEN = "frozen_weights"
"""The fact of a checkpoint that tells the weights apart which it does not hold."""
ADAPTER, PLOTS = "adapter", "plots"
"""The sub-folders with what PEFT reads, and with the pictures."""


class RunRecord:
    """The writer of a run's folder."""

    def __init__(self, folder: Path, *, steps_done: int | None = None) -> None:
        """`steps_done`: of the run that goes on in this folder; None: a new run begins, in a folder without another."""
        self.folder = folder
        self.living: Living | None = None
        """Shows the run to others while it goes on."""
        self.board: TensorBoardLog | None = None
        """Writes the same for TensorBoard, if asked for."""
        try:
            make_folder(folder, is_private=True)
        except OSError as error:
            raise write_failed(folder, error, what="the folder") from error
        if steps_done is not None:
            self._forget_after(steps_done)
        elif self._rows() or checkpoint.is_any(folder):
            raise BadFile(
                f"{folder}: holds another run already.",
                hint="Give another folder, or go on with that run: resume=True, or manyhands train --resume FOLDER.",
            )
        self.validations = ValidationLog(folder, steps_done)
        self._events = LineFile(folder / "events.jsonl")
        try:
            self._metrics = Metrics(folder / "metrics.csv", COLUMNS)
            for broken in checkpoint.broken_after(folder, steps_done) if steps_done is not None else ():
                self.event("broken checkpoint", message=broken.message, used_step=steps_done)
        except BaseException:
            self._events.close()
            raise

    def close(self) -> None:
        with contextlib.ExitStack() as all_files:  # closes each, even if another fails to close
            if self.board is not None:
                all_files.callback(self.board.close)
            all_files.callback(self._metrics.close)
            all_files.callback(self._events.close)

    def event(self, event: str, /, **facts: Any) -> None:
        self._events.write_event(event, **facts)
        if self.board is not None:
            self.board.event(event, facts)

    def decided(self, config: Mapping[str, Any], cluster: Cluster, profile: Profile, plan: Plan) -> None:
        """Write what the run was given and what was decided: configuration, cluster, profile, plan."""
        write_document(self.folder / "config.yaml", dict(config))
        write_document(self.folder / "cluster.yaml", cluster.to_dict())
        write_document(self.folder / "profile.json", msgspec.to_builtins(profile.devices))
        write_document(self.folder / "plan.yaml", plan.to_dict())
        if self.board is not None:
            self.board.decided(config, plan.to_dict())

    def measured(self, cluster: Cluster, profile: Profile) -> None:
        """Write what was measured while training, in place of what the run began with."""
        write_document(self.folder / "cluster.yaml", cluster.to_dict())
        write_document(self.folder / "profile.json", msgspec.to_builtins(profile.devices))

    def step(
        self, step: int, epoch: int, loss: float | None, seconds: float, samples: int, staleness: int | None = None,
        grad_norm: float | None = None,
    ) -> None:  # fmt: skip
        if self.living is not None:
            self.living.stepped(step, epoch, loss, seconds, samples, grad_norm)
        self._metrics.write(step=step, epoch=epoch, loss=loss, seconds=seconds, staleness=staleness,
                            grad_norm=grad_norm,
                            samples_per_second=samples / seconds if seconds else 0.0)  # fmt: skip
        if self.board is not None:
            self.board.step(step, epoch, loss, seconds, samples, staleness, grad_norm)

    def validated(self, row: Row) -> None:
        """Write the results of a validation: `step` is the number of steps done."""
        self.validations.add(row)
        facts = {name: value for name, value in row.items() if name in VALIDATION_COLUMNS}
        self.event("validated", **facts, metrics={name: row[name] for name in row if name not in facts})
        if self.board is not None:
            self.board.validated(row)

    def losses(self) -> list[float]:
        """Return every step's loss so far, from the file."""
        return [float(row["loss"]) for row in self._rows() if row.get("loss")]

    def grad_norms(self) -> list[float]:
        """Return the norm of every step's gradients so far, from the file; empty where they were not clipped by it."""
        return [float(row["grad_norm"]) for row in self._rows() if row.get("grad_norm")]

    def _rows(self) -> list[dict[str, str]]:
        path = self.folder / "metrics.csv"
        if not path.exists():
            return []
        try:
            with io.TextIOWrapper(open_plain(path), newline="", errors="replace") as file:
                return list(csv.DictReader(file))
        except (OSError, csv.Error) as error:
            raise BadFile(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error

    def _forget_after(self, steps_done: int) -> None:
        """Remove the lines of steps after the checkpoint: these steps are run again."""
        rows = [row for row in self._rows() if row.get("step", "").isdigit() and int(row["step"]) < steps_done]
        lines = [",".join(COLUMNS), *(",".join(row.get(column) or "" for column in COLUMNS) for row in rows)]
        write_text_atomic(self.folder / "metrics.csv", "\n".join(lines) + "\n")

    def checkpoint(
        self, module: nn.Module, graph: Graph, state: RunState, optimizer: Optimizer, seed: int, facts: dict[str, Any]
    ) -> Path:
        """Write a checkpoint of the whole network, whichever devices held its parts.

        The metrics of the steps that led to it are on disk first.
        """
        path = self.folder / "metrics.csv"
        try:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise write_failed(path, error) from error
        kept, (optimizer_state, _) = full_state(module, graph, state.weights), divided(state.optimizer)
        frozen = left_out(graph, kept)
        saved = checkpoint.save(
            self.folder,
            checkpoint.Checkpoint(
                step=state.steps_done, model=kept, optimizer_tensors=optimizer_state, optimizer_scalars=state.scalars,
                optimizer=optimizer, seed=seed, facts=facts | ({FROZEN: frozen} if frozen else {}),
                ema=averaged_state(module, graph, state),
            ),
        )  # fmt: skip
        checkpoint.prune(self.folder, KEPT_CHECKPOINTS)
        self.event("checkpoint", step=state.steps_done, path=str(saved.relative_to(self.folder)))
        return saved

    def devices(
        self,
        logs: Mapping[str, DeviceLog],
        planned_bytes: Mapping[tuple[str, str], int],
        bytes_by_use: Mapping[str, Any],
    ) -> None:
        """Write what each device did, and the bytes that by the plan travel in a round, by pair and by use."""
        planned = [{"from": a, "to": b, "bytes_per_step": size} for (a, b), size in planned_bytes.items()]
        document = {
            "devices": {name: log.to_dict() for name, log in logs.items()},
            "planned": planned,
            "bytes_by_use": dict(bytes_by_use),
        }
        write_document(self.folder / "devices.json", document)
        if self.board is not None:
            self.board.devices({name: log.peak_bytes for name, log in logs.items()})


def full_state(module: nn.Module, graph: Graph, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the module's state dict with trained values, tied names included; what the graph does not use stays.

    Weights that no step changes are left out where they are mapped from a file, in which they stay, and where PEFT has
    wrapped the module, whose checkpoints are of what is trained only.
    """
    state, constants = {}, constant_weights(graph.network)
    is_adapted = peft_model_of(module) is not None
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    for name, tensor in module.state_dict().items():
        original = graph.aliases.get(name, name)
        trained = weights.get(original)
        is_constant = original in constants if trained is not None else is_mapped(tensor) or name in frozen
        if is_constant and (is_mapped(tensor) or (is_adapted and name in frozen)):
            continue
        state[name] = trained if trained is not None else tensor
    return state


def averaged_state(module: nn.Module, graph: Graph, state: RunState) -> dict[str, torch.Tensor] | None:
    """Return a copy of the module's state dict with the averages of its weights; None: no average is kept."""
    averages = divided(state.optimizer)[1]
    if not averages:
        return None
    averaged = full_state(module, graph, {**state.weights, **averages})
    return {name: tensor.detach().clone() for name, tensor in averaged.items()}


def left_out(graph: Graph, kept: Collection[str]) -> str:
    """Return the digest of the graph's parameters that a checkpoint does not hold; empty: it holds all."""
    absent = {s.name: graph.state[s.name] for s in graph.weights if s.name not in kept and not s.buffer}
    return sampled_digest(absent) if absent else ""


def resumed_state(graph: Graph, loaded: checkpoint.Checkpoint) -> RunState:
    """Return the state that a checkpoint holds."""
    if loaded.facts.get(FROZEN, now := left_out(graph, loaded.model)) != now:
        raise BadFile(
            "The model's frozen weights are not those that the run was started with; its checkpoint holds what is "
            "trained only.",
            hint="Give the model the same weights again: the same files, or the same seed.",
        )
    weights, averages = {}, {}
    for spec in graph.weights:
        tensor = _stored(loaded.model, spec)
        weights[spec.name] = tensor if tensor is not None else graph.state[spec.name]
        if spec.trainable and loaded.ema is not None and (average := _stored(loaded.ema, spec)) is not None:
            averages[spec.name + AVERAGE_KEY] = average
    return RunState(weights, {**loaded.optimizer_tensors, **averages}, dict(loaded.optimizer_scalars), loaded.step)


def _stored(tensors: Mapping[str, torch.Tensor], spec: WeightSpec) -> torch.Tensor | None:
    """Return a weight of a checkpoint, or its average, as the model has it; None: the file does not have it."""
    tensor, expected = tensors.get(spec.name), (spec.dtype, spec.shape)
    if tensor is not None and (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) != expected:
        raise BadFile(
            f"The checkpoint's '{spec.name}' is {tensor.dtype} {tuple(tensor.shape)}; the model's is {expected}.",
            hint="Resume with the model the run was started with.",
        )
    return tensor


def new_folder(job: str, *names: str) -> Path:
    """Make and return a folder like runs/train-tiny-digits-20260102-030405, with a number appended if that exists."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([job, *names])).replace("..", "_")
    base = Path("runs") / f"{plain[:100]}-{stamp}"
    folder, number = base, 1
    while True:
        try:
            make_folder(folder.parent)
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise write_failed(folder, error, what="the folder") from error


def one_step(spans: Sequence[MeasuredSpan], step: int) -> list[MeasuredSpan]:
    """Return the spans of a step, shifted so that the first begins at 0."""
    step_spans = [span for span in spans if span.step == step]
    start = min((span.start for span in step_spans), default=0.0)
    return [msgspec.structs.replace(span, start=span.start - start, end=span.end - start) for span in step_spans]


def read_decided(folder: Path, network: Network) -> tuple[Cluster, Profile, Plan]:
    """Return the cluster and the profile that a run decided upon, and its plan, from its folder."""
    profiles = decode(read_document(folder / "profile.json"), dict[str, DeviceProfile], str(folder / "profile.json"))
    for profile in profiles.values():
        profile.check_matches(network)
    cluster = Cluster.from_dict(read_document(folder / "cluster.yaml"))
    return cluster, Profile(profiles), Plan.from_dict(read_document(folder / "plan.yaml"))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run."""
    raw = read_document(folder / "config.yaml")
    if not isinstance(raw, dict):
        raise BadFile(f"{folder / 'config.yaml'}: is not the configuration of a run.")
    return raw
