"""`mh.split_train`: an edge that has the data, and a server, train one network over a changing link (SPLIT).

The network is cut in two. The edge runs ahead of the gradients that come back and replays (schedule/replay.py);
features travel packed; where the cut is, how far the edge runs ahead and how many bits a feature has follows the link
(controller.py). Everything else is a training job like any other (job.py, job.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.given import given
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.trace import LinkTrace
from manyhands.files.traces import read_link_trace
from manyhands.graph.regrouping import regrouped
from manyhands.job.base import OnOpened, OnPlanned, OnStep, opened
from manyhands.job.options import Options
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.order import WAIT_LIMIT_SECONDS
from manyhands.session.session import Say
from manyhands.split.job import Asked, SplitJob, SplitResult
from manyhands.split.session import LOCAL_SILENCE_SECONDS, Cloud, Two, open_two
from manyhands.split.silo_job import SiloJob
from manyhands.split.silos import Joined, Silos, check_resumed, joined
from manyhands.split.transfer import begin_with, frozen

CLOUD_SILENCE_SECONDS = 10.0
"""A mobile link says nothing for some seconds now and then, and is there again."""


def split_train(
    model: nn.Module,
    data: Dataset[Any] | None,
    *,
    loss: Callable[..., torch.Tensor],
    optimizer: Optimizer,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool = True,
    cut: int | str = "auto",
    bits: int | str = "auto",
    k: int | str | None = 5,
    mode: str = "grouped",
    trace: str | Path | LinkTrace | None = None,
    cloud: str | Two | Coordinator | None = None,
    token: str = "",
    seed: int = 0,
    edge_slowdown: float = 1.0,
    server_slowdown: float = 1.0,
    edge_side: str = "upstream",
    labels: str = "edge",
    silos: Silos | None = None,
    freeze: int | str = 0,
    weights: str | Path | None = None,
    rival: str = "",
    error_feedback: bool = True,
    pack_gradients: bool = False,
    least_bits: int | Mapping[int, int] | None = None,
    calibrate_seconds: float = 0.0,
    allowed_drop: float = 0.01,
    data_name: str = "",
    memory_bytes: float | None = None,
    delay_seconds: float = 0.0,
    folder: str | Path | None = None,
    resume: bool | str | Path = False,
    test: Dataset[Any] | None = None,
    verify: bool | None = None,
    granularity: str = "blocks",
    backup_every: int | None = None,
    silence_seconds: float | None = None,
    name: str = "",
    config: Mapping[str, Any] | None = None,
    on_opened: OnOpened | None = None,
    on_planned: OnPlanned | None = None,
    on_step: OnStep | None = None,
    say: Say | None = None,
    limit_seconds: float = WAIT_LIMIT_SECONDS,
    engine: Mapping[str, Any] | None = None,
) -> SplitResult:
    """Train `model` on `data` with an edge, where the data is, and a server, over the link between them.

    cut         "auto": where it is fastest, again and again as the link changes; a layer's number or name: there;
                "edge": nothing leaves the edge
    bits        of a packed feature: 2, 4, 8, 16, 32, or "auto": as many as is fastest, not fewer than `least_bits`
    k           how many updates a gradient may be late. 0: exactly as one device trains; None: no bound; by epoch:
                "4@0,5@8"; "auto": as a calibration found it, else 5. With cut="auto" it is a limit: where running
                ahead gains nothing, fewer save the replay
    mode        "grouped": K+1 batches, and the next when all of them are done; "window": never more than K+1 under way
    trace       rates that the link between local processes follows: a file of `seconds mbit_per_second`, or one for up
                and one for down, "UP,DOWN". Where one stands for both directions the run says so
    cloud       "HOST:PORT" of `manyhands split serve`, which is dialled from here; None: a process of this machine
    edge_slowdown
                the edge takes so many times as long, for a device that is not at hand
    edge_side   "upstream": the data is the network's input; "downstream": its output is, as of a generator
    labels      "edge", or "cloud": the server has them, in a file of its own (`manyhands split serve --silo FILE`; of
                local processes it is given `data`'s), and they do not travel
    silos       who has what of `data`, by the names of the model's arguments: {"edge-a": ("left",), "edge-b":
                ("right",), "server": ("target",)}. Everybody gets a file of that and nothing else. With `cloud` an
                mh.Coordinator, its workers have silos (`manyhands worker --silo FILE`), and `data` may be None
    weights     what to begin with: a run's folder, a checkpoint, or a .safetensors file, as far as names and shapes fit
    freeze      so many of the first layers, or those before a layer's name, are not trained, and no gradients return
                to them
    rival       decide as another would: edge-only, jointdnn, k0, uncompressed, unbounded; among silos cross-silo
    least_bits  for all cuts, or by cut; None: as a calibration found it for this network, `data_name` and batch size,
                now (`calibrate_seconds` > 0, losing no more than `allowed_drop`) or before; else eight
    memory_bytes
                of the edge; None: no limit. Where everything fits, a lost server means that the edge goes on alone
    backup_every
                steps between two copies that edge and server keep of each other's part; None: as often as takes a
                hundredth of the link's time; 0: none, a lost server costs what came after the last checkpoint
    silence_seconds
                an end that says nothing for so long is lost; None: 5 s, and 10 s where a cloud is dialled

    Everything else is as in `mh.train`. The model holds the trained weights when this returns.
    """
    asked = Asked(
        cut, bits, k, mode, rival, labels, edge_side, error_feedback, pack_gradients, least_bits, memory_bytes,
        delay_seconds, data_name, calibrate_seconds, allowed_drop,
    )  # fmt: skip
    way = trace if isinstance(trace, LinkTrace) or trace is None else read_link_trace(trace)
    if way is not None and isinstance(cloud, str):
        raise BadValue("A trace is played between processes of this machine; the cloud has a link of its own.")
    there = Cloud.parse(cloud, token) if isinstance(cloud, str) else None
    silence = silence_seconds or (LOCAL_SILENCE_SECONDS if there is None else CLOUD_SILENCE_SECONDS)
    with contextlib.ExitStack() as stack:
        found: Joined | None = None
        if silos is not None or asked.labels == "cloud" or isinstance(cloud, Coordinator):
            found = stack.enter_context(
                joined(
                    model, data, silos, cloud=there if isinstance(cloud, str) else cloud, edge_slowdown=edge_slowdown,
                    server_slowdown=server_slowdown, say=say, silence_seconds=silence,
                )
            )  # fmt: skip
        has_many = found is not None and len(found.edges) > 1
        own = given(data).data if found is None else found.example
        if own is None:
            raise BadValue("There is no data.", hint="Give a data set, or workers that have their own.")
        options = Options(model, own, loss, optimizer, batch_size, epochs, steps, shuffle, "synchronised", seed)
        granularity = "operators" if has_many else granularity
        if weights is not None and resume is False:
            begin_with(model, weights, say)
        stack.enter_context(frozen(model, own, freeze, granularity=granularity, name=name, say=say))
        run = stack.enter_context(
            opened(
                options, folder=folder, resume=resume, granularity=granularity, name=name, say=say, command="split",
                typed=(config or {}).get("split_wish"), on_opened=on_opened, verify=verify,
            )
        )  # fmt: skip
        if found is not None:
            options, test = replace(options, data=found.samples), found.named(test)
            if found.has_labels_there and not has_many:
                asked = replace(asked, labels="cloud")
            if run.is_resumed:
                check_resumed(run.folder, found)
        job: SplitJob | SiloJob
        if found is not None and has_many:
            graph = regrouped(run.graph, [found.holders.get(edge, ()) for edge in found.edges])
            job = SiloJob(
                options, graph, found.session, run.record, run.start, run.last_step, run.folder, say, test,
                limit_seconds,
            )  # fmt: skip
            job.ask(asked, found, way, data)
        else:
            asked.cut_in(run.graph.network)  # what is no cut is found before anything is started
            two = found.two if found is not None else stack.enter_context(
                _ends(
                    cloud if isinstance(cloud, Two) else None, there, edge_slowdown, server_slowdown, run.folder, say,
                    silence,
                )
            )  # fmt: skip
            job = SplitJob(
                options, run.graph, two.session, run.record, run.start, run.last_step, run.folder, say, test,
                limit_seconds,
            )  # fmt: skip
            job.ask(asked, two, way, backup_every, dict(engine or {}))
        planned = job.prepared()
        facts = {**options.facts, "steps": run.last_step, **asked.facts, "freeze": freeze}
        if found is not None:
            facts |= {"silos": {name: list(names) for name, names in found.holders.items()}, "ids": found.fingerprint}
        run.record.decided({**dict(config or {}), **facts}, planned.cluster, planned.profile, planned.plan)
        if on_planned is not None:
            on_planned(planned)
        result = job.train(planned, on_step)
        job.finish(job.last_planned, result, loss)
    return result


@contextlib.contextmanager
def _ends(
    given: Two | None, cloud: Cloud | None, edge_slowdown: float, server_slowdown: float, folder: Path,
    say: Say | None, silence_seconds: float,
) -> Iterator[Two]:  # fmt: skip
    if given is not None:
        yield given
        return
    with open_two(
        cloud, edge_slowdown=edge_slowdown, server_slowdown=server_slowdown, logs=folder / "workers", say=say,
        silence_seconds=silence_seconds,
    ) as two:  # fmt: skip
        yield two
