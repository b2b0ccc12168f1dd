"""The devices of a job: workers started on this machine or in a lab, or those that join."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import BadPlan, BadValue
from manyhands.files.documents import load_cluster
from manyhands.job.arguments import local_count, plan_in
from manyhands.job.callbacks import Say
from manyhands.job.config_sections import DevicesConfig
from manyhands.session.joining import join_text, parse_address

if TYPE_CHECKING:
    from manyhands.runtime.coordinator import Coordinator


JOIN_SECONDS = 600.0
"""Longest wait for workers to join: a person walks to each device."""


@contextlib.contextmanager
def devices_for(config: DevicesConfig, say: Say) -> Iterator[Cluster | LabCluster | Coordinator]:
    """Yield the cluster whose workers are to be started here or in a lab, or a coordinator that workers have joined."""
    listen = config.listen
    if listen and config.gpus:
        raise BadValue(
            f"--gpus {config.gpus} is for workers of this machine; those that join say it themselves.",
            hint="On each device: manyhands worker --compute cuda ...",
        )
    if config.lab:
        from manyhands.session.lab_session import lab_cluster

        if listen:
            raise BadValue(f"--listen {listen} is for workers of other machines; --lab {config.lab} has its own.")
        yield lab_cluster(config.lab, scale=config.scale, slots=config.slots or 1, traces=config.traces)
    elif config.cluster:
        assert isinstance(config.cluster, (str, Path)), "a command names its cluster"
        cluster = load_cluster(config.cluster)
        if listen and all(device.kind == "local" for device in cluster.devices):
            raise BadValue(
                f"--listen {listen} is for workers of other machines; {config.cluster} is started on this one.",
                hint="Leave out one of --listen and --cluster.",
            )
        yield cluster
    elif listen:
        with _joined(config, say) as coordinator:
            yield coordinator
    else:
        yield _local(config)


def _local(config: DevicesConfig) -> Cluster:
    count = config.count
    if config.gpus > count:
        raise BadValue(
            f"--gpus is {config.gpus}; there are {count} workers, and each takes one.",
            hint=f"Add --devices {config.gpus}.",
        )
    if config.gpus:
        import torch

        if torch.cuda.device_count() < config.gpus:
            raise BadValue(
                f"--gpus is {config.gpus}; torch {torch.__version__} sees {torch.cuda.device_count()} on this machine.",
                hint="Leave out --gpus to compute on the CPU.",
            )
    cluster = Cluster.local(count, gpus=config.gpus)
    if config.plan_file:
        _check_devices(config.plan_file, cluster)
    return cluster


def _check_devices(file: str, cluster: Cluster) -> None:
    """Refuse a plan file that names devices which the cluster does not have."""
    names = plan_in(file).devices
    strange = [name for name in names if name not in cluster.names]
    if strange:
        more = local_count(names)
        raise BadPlan(
            f"{file}: names {', '.join(strange[:5])}; the devices of {cluster.name} are "
            f"{', '.join(cluster.names[:5])}{' ...' if len(cluster.names) > 5 else ''}.",
            hint=f"Ask for them: --devices {more}"
            if more
            else f"Plan for these: manyhands plan --cluster {cluster.name} ...\n"
            "Or give the cluster it was made for, whose devices join by name: --cluster FILE",
        )


@contextlib.contextmanager
def _joined(config: DevicesConfig, say: Say) -> Iterator[Coordinator]:
    """Yield a coordinator that enough workers have joined; others may come later."""
    from manyhands.runtime.addresses import DEFAULT_PORT
    from manyhands.runtime.coordinator import Coordinator
    from manyhands.runtime.heartbeats import heartbeat_interval
    from manyhands.runtime.shared_token import shared_token

    host, port = parse_address(config.listen, DEFAULT_PORT)
    count, timeout = config.count, config.worker_timeout_seconds
    with Coordinator(
        host, port, config.token or shared_token(say), on_event=say, heartbeat_timeout_seconds=timeout,
        heartbeat_seconds=heartbeat_interval(timeout), max_devices=config.max_devices, title=config.title,
    ) as coordinator:  # fmt: skip
        more = "" if count > 1 else " (more: --devices N)"
        say(f"Waiting for {count} worker(s){more}. On each device:\n{join_text(coordinator)}")
        coordinator.wait_for(count, JOIN_SECONDS)
        yield coordinator
