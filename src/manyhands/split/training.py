"""`mh.split_train`: an edge that has the data, and a server, train one network over a changing link (SPLIT).

The network is cut in two. The edge runs ahead of the gradients that come back and replays (schedule/replay.py);
features travel packed; where the cut is, how far the edge runs ahead and how many bits a feature has follow the link
(controller.py). Everything else is a training job like any other (job.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.given import given
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.files.traces import read_link_trace
from manyhands.graph.regrouping import regrouped
from manyhands.job.config import takes
from manyhands.job.notebook import shown_in_notebook
from manyhands.job.opening import open_run
from manyhands.job.workload import Workload
from manyhands.runtime.coordinator import Coordinator
from manyhands.split.arguments import DOCUMENT
from manyhands.split.config import SplitConfig
from manyhands.split.job import SplitJob, SplitResult
from manyhands.split.options import SplitOptions
from manyhands.split.session import LOCAL_SILENCE_SECONDS, Cloud, Two, open_two
from manyhands.split.silo_job import SiloJob
from manyhands.split.silos import JoinedSilos, check_resumed, joined
from manyhands.split.transfer import begin_with, frozen

CLOUD_SILENCE_SECONDS = 10.0
"""A mobile link is silent for some seconds now and then, and comes back."""


@takes(SplitConfig)
def split_train(
    model: nn.Module,
    data: Dataset[Any] | None,
    *,
    loss: Callable[..., torch.Tensor],
    optimizer: Optimizer,
    **options: Unpack[SplitOptions],
) -> SplitResult:
    """Train `model` on `data` with an edge, where the data is, and a server, over the link between them.

    Options that `mh.train` also has mean the same. The model holds the trained weights when this returns. All options
    are described in `SplitConfig`.
    """
    return split_with(SplitConfig.from_keywords("mh.split_train", options), model, data, loss, optimizer)


def split_with(
    config: SplitConfig,
    model: nn.Module,
    data: Dataset[Any] | None,
    loss: Callable[..., torch.Tensor],
    optimizer: Optimizer,
) -> SplitResult:
    """Train a split as its configuration says, and return the result."""
    trace = read_link_trace(config.trace) if isinstance(config.trace, (str, Path)) else config.trace
    dialled = Cloud.parse(config.cloud, config.token) if isinstance(config.cloud, str) else None
    usual = LOCAL_SILENCE_SECONDS if dialled is None else CLOUD_SILENCE_SECONDS
    config = replace(shown_in_notebook(config), silence_seconds=config.silence_seconds or usual)
    with contextlib.ExitStack() as stack:
        silos: JoinedSilos | None = None
        if config.silos is not None or config.labels == "cloud" or isinstance(config.cloud, Coordinator):
            silos = stack.enter_context(
                joined(
                    model, data, config.holders, cloud=dialled if isinstance(config.cloud, str) else config.cloud,
                    edge_slowdown=config.edge_slowdown, server_slowdown=config.server_slowdown, say=config.say,
                    silence_seconds=config.silence_seconds or usual,
                )
            )  # fmt: skip
        has_many = silos is not None and len(silos.edges) > 1
        samples = given(data).data if silos is None else silos.example
        if samples is None:
            raise BadValue("There is no data.", hint="Give a data set, or workers that have their own.")
        config = replace(config, granularity="operators" if has_many else config.granularity)
        workload = Workload(model, samples, loss, optimizer, config)
        if config.weights is not None and config.resume is False:
            begin_with(model, config.weights, config.say)
        stack.enter_context(
            frozen(
                model, samples, config.freeze, granularity=config.granularity, name=config.name, say=config.say
            )
        )  # fmt: skip
        stored = dict(config.config or {})
        run = stack.enter_context(open_run(workload, command="split", document=stored.get(DOCUMENT)))
        if silos is not None:
            if silos.has_labels_there and not has_many:
                config = replace(config, labels="cloud")
            config = replace(config, test=silos.named(config.test))
            workload = replace(workload, data=silos.samples, config=config)
            if run.is_resumed:
                check_resumed(run.folder, silos)
        job: SplitJob | SiloJob
        if silos is not None and has_many:
            graph = regrouped(run.graph, [silos.holders.get(edge, ()) for edge in silos.edges])
            job = SiloJob(workload, silos.session, replace(run, graph=graph)).among(silos, trace, data)
        else:
            config.cut_in(run.graph.network)  # an impossible cut is refused before anything is started
            two = silos.two if silos is not None else stack.enter_context(_ends(config, dialled, run.folder))
            job = SplitJob(workload, two.session, run).between(two, trace)
        planned = job.prepared()
        facts = {**workload.facts, "steps": run.last_step, **config.facts}
        if silos is not None:
            facts |= {"silos": {name: list(names) for name, names in silos.holders.items()}, "ids": silos.fingerprint}
        run.record.decided({**stored, **facts}, planned.cluster, planned.profile, planned.plan)
        if config.on_planned is not None:
            config.on_planned(planned)
        result = job.train(planned, config.on_step)
        job.finish(job.last_planned, result)
    return result


@contextlib.contextmanager
def _ends(config: SplitConfig, cloud: Cloud | None, folder: Path) -> Iterator[Two]:
    """Yield the edge and the server: those that were given, or processes that are started for this run."""
    if isinstance(config.cloud, Two):
        yield config.cloud
        return
    with open_two(
        cloud, edge_slowdown=config.edge_slowdown, server_slowdown=config.server_slowdown, logs=folder / "workers",
        say=config.say, silence_seconds=config.silence_seconds or LOCAL_SILENCE_SECONDS,
    ) as two:  # fmt: skip
        yield two
