"""The devices of a job: workers started on this machine or in a lab, or those that join."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import BadPlan, BadValue
from manyhands.facts.plan import Plan
from manyhands.files.documents import load_cluster, read_document
from manyhands.job.named import Say, Wish, _local_count
from manyhands.session.joining import LISTEN_VARIABLE, join_text, parse_address

if TYPE_CHECKING:
    from manyhands.runtime.coordinator import Coordinator


JOIN_SECONDS = 600.0
"""How long workers are waited for: a person walks to each device."""


@contextlib.contextmanager
def machines_for(wish: Wish, token: str, say: Say) -> Iterator[Cluster | LabCluster | Coordinator]:
    """Workers to be started here, or those that join."""
    listen = wish.listen
    if listen and wish.gpus:
        raise BadValue(
            f"--gpus {wish.gpus} is for workers of this machine; those that join say it themselves.",
            hint="On each device: manyhands worker --compute cuda ...",
        )
    if wish.lab:
        from manyhands.session.lab_session import lab_cluster

        if listen:
            raise BadValue(f"--listen {listen} is for workers of other machines; --lab {wish.lab} has its own.")
        yield lab_cluster(wish.lab, scale=wish.scale, slots=wish.slots or 1, traces=wish.traces)
    elif wish.cluster:
        cluster = load_cluster(wish.cluster)
        if listen and all(device.kind == "local" for device in cluster.devices):
            raise BadValue(
                f"--listen {listen} is for workers of other machines; {wish.cluster} is started on this one.",
                hint="Leave out one of --listen and --cluster.",
            )
        with _told(listen, token):
            yield cluster
    elif listen:
        with _joined(wish, token, say) as coordinator:
            yield coordinator
    else:
        yield _local(wish)


def _local(wish: Wish) -> Cluster:
    count = wish.count
    if wish.gpus > count:
        raise BadValue(
            f"--gpus is {wish.gpus}; there are {count} workers, and each takes one.", hint=f"Add --devices {wish.gpus}."
        )
    if wish.gpus:
        import torch

        if torch.cuda.device_count() < wish.gpus:
            raise BadValue(
                f"--gpus is {wish.gpus}; torch {torch.__version__} sees {torch.cuda.device_count()} on this machine.",
                hint="Leave out --gpus to compute on the CPU.",
            )
    cluster = Cluster.local(count, gpus=wish.gpus)
    if wish.has_plan_file:
        _check_devices(wish.plan, cluster)
    return cluster


def _check_devices(file: str, cluster: Cluster) -> None:
    """A plan file names the devices that are there."""
    names = Plan.from_dict(read_document(file)).devices
    strange = [name for name in names if name not in cluster.names]
    if strange:
        more = _local_count(names)
        raise BadPlan(
            f"{file}: names {', '.join(strange[:5])}; the devices of {cluster.name} are "
            f"{', '.join(cluster.names[:5])}{' ...' if len(cluster.names) > 5 else ''}.",
            hint=f"Ask for them: --devices {more}"
            if more
            else f"Plan for these: manyhands plan --cluster {cluster.name} ...\n"
            "Or give the cluster it was made for, whose devices join by name: --cluster FILE",
        )


@contextlib.contextmanager
def _told(listen: str, token: str) -> Iterator[None]:
    """Where a cluster's devices join, and what they must know, for whoever opens the session."""
    said = {name: text for name, text in ((LISTEN_VARIABLE, listen), ("MANYHANDS_TOKEN", token)) if text}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


@contextlib.contextmanager
def _joined(wish: Wish, token: str, say: Say) -> Iterator[Coordinator]:
    """A coordinator that enough workers have joined; others may come later."""
    from manyhands.runtime.coordinator import DEFAULT_PORT, Coordinator
    from manyhands.runtime.heartbeats import heartbeat_interval
    from manyhands.runtime.shared_token import shared_token

    host, port = parse_address(wish.listen, DEFAULT_PORT)
    count, beat_seconds = wish.count, heartbeat_interval(wish.silence)
    with Coordinator(
        host, port, token or shared_token(say), on_event=say, heartbeat_timeout_seconds=wish.silence,
        heartbeat_seconds=beat_seconds, max_devices=wish.max_devices, title=wish.model,
    ) as coordinator:  # fmt: skip
        more = "" if count > 1 else " (more: --devices N)"
        say(f"Waiting for {count} worker(s){more}. On each device:\n{join_text(coordinator)}")
        coordinator.wait_for(count, JOIN_SECONDS)
        yield coordinator
