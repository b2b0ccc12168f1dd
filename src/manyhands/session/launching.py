"""Reads how a worker was launched: its rank, its place on the machine and the coordinator's address, from the variables
that torchrun and Slurm set for every process; and the address at which a worker is to be reached.

    torchrun   RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
    Slurm      SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS, SLURM_STEP_TASKS_PER_NODE, SLURM_LAUNCH_NODE_IPADDR

Others (Docker Compose, Kubernetes, systemd) set the options of `manyhands worker` as MANYHANDS_* variables, which go
before these.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.facts.errors import BadValue
from manyhands.runtime.addresses import DEFAULT_PORT, Advertised
from manyhands.session.joining import LISTEN_VARIABLE, parse_address, reachable
from manyhands.transport.security import is_loopback

AUTO, NONE, TORCHRUN, SLURM = "auto", "none", "torchrun", "slurm"
LAUNCHERS = (AUTO, NONE, TORCHRUN, SLURM)
_SLURM_FALLBACK = "SLURM_SRUN_COMM_HOST"
_MOST_RANKS = 100_000


@dataclass(frozen=True)
class Launch:
    """One of the processes that a launcher has started."""

    launcher: str
    """torchrun or slurm."""
    rank: int
    ranks: int
    """The number of processes on all machines."""
    local_rank: int
    local_ranks: int
    """The number of processes on this machine."""
    host: str
    """The machine on which the coordinator is expected."""
    port: int

    @property
    def text(self) -> str:
        """A sentence for the person who reads the worker's log."""
        place = f", {self.local_rank + 1} of {self.local_ranks} on this machine" if self.local_ranks > 1 else ""
        where = f"[{self.host}]" if ":" in self.host else self.host
        return f"Started by {self.launcher} as rank {self.rank} of {self.ranks}{place}; joining {where}:{self.port}."

    def name(self, host_name: str) -> str:
        """Return the worker's name: the machine's, with a number where several are on it."""
        return f"{host_name:.56}-{self.local_rank}" if self.local_ranks > 1 else host_name

    def compute(self, compute: str, visible_gpus: str | None) -> str:
        """Return the GPU of a worker that was started with `--compute cuda`: each on a machine has its own.

        `visible_gpus`: CUDA_VISIBLE_DEVICES. A launcher that shows each process one GPU has divided them already.
        """
        is_divided = visible_gpus is not None and len(visible_gpus.split(",")) == 1
        return f"cuda:{self.local_rank}" if compute == "cuda" and not is_divided else compute

    def advertised(self) -> Advertised | None:
        """Return the address to advertise where the coordinator is reached over loopback though other machines take
        part: its host name may stand for 127.0.1.1 on its own machine."""
        if self.ranks <= self.local_ranks:
            return None
        try:
            resolved = str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            return None
        return Advertised(reachable("0.0.0.0")) if is_loopback(resolved) else None


def launched(environment: Mapping[str, str], launcher: str = AUTO) -> Launch | None:
    """Return how this process was launched; None where no launcher has started it.

    `launcher`: where the variables are looked for. BadValue where that launcher has not set them.
    """
    if launcher not in LAUNCHERS:
        raise BadValue(
            f"--launcher is '{launcher:.40}'; it must be one of {', '.join(LAUNCHERS)}.",
            hint="Leave it out: the variables of torchrun and Slurm are recognised.",
        )
    if launcher == NONE:
        return None
    is_torchrun = all(environment.get(name) for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE"))
    is_slurm = bool(environment.get("SLURM_PROCID")) and bool(environment.get("SLURM_STEP_ID"))
    if launcher == TORCHRUN and not is_torchrun:
        raise BadValue(
            "--launcher torchrun: MASTER_ADDR, RANK and WORLD_SIZE are not set, so torchrun has not started this.",
            hint="torchrun --nproc-per-node 2 --no-python manyhands worker",
        )
    if launcher == SLURM and not is_slurm:
        raise BadValue(
            "--launcher slurm: SLURM_PROCID and SLURM_STEP_ID are not set, so srun has not started this.",
            hint="srun --ntasks 2 manyhands worker",
        )
    if is_torchrun and launcher != SLURM:  # first: Slurm may have started torchrun
        return _by_torchrun(environment)
    return _by_slurm(environment) if is_slurm else None


def _by_torchrun(environment: Mapping[str, str]) -> Launch:
    ranks = _number(environment, "WORLD_SIZE", 1)
    local_ranks = _number(environment, "LOCAL_WORLD_SIZE", 1) if environment.get("LOCAL_WORLD_SIZE") else ranks
    return Launch(
        TORCHRUN, _number(environment, "RANK", 0), ranks,
        _number(environment, "LOCAL_RANK", 0) if environment.get("LOCAL_RANK") else 0, local_ranks,
        environment["MASTER_ADDR"], _port(environment),
    )  # fmt: skip


def _by_slurm(environment: Mapping[str, str]) -> Launch:
    host = environment.get("SLURM_LAUNCH_NODE_IPADDR") or environment.get(_SLURM_FALLBACK) or ""
    if not host:
        raise BadValue(
            f"Slurm has started this, but neither SLURM_LAUNCH_NODE_IPADDR nor {_SLURM_FALLBACK} is set.",
            hint="Say where the coordinator is: manyhands worker --join HOST:PORT",
        )
    ranks = _number(environment, "SLURM_NTASKS", 1) if environment.get("SLURM_NTASKS") else 1
    node = _number(environment, "SLURM_NODEID", 0) if environment.get("SLURM_NODEID") else 0
    tasks = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE") or "")
    local_rank = _number(environment, "SLURM_LOCALID", 0) if environment.get("SLURM_LOCALID") else 0
    local_ranks = tasks[node] if node < len(tasks) else ranks
    return Launch(SLURM, _number(environment, "SLURM_PROCID", 0), ranks, local_rank, local_ranks, host,
                  _port(environment))  # fmt: skip


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: '2(x3),1' -> [2, 2, 2, 1]. Empty where it is something else."""
    counts: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None or len(counts) + int(match.group(2) or 1) > _MOST_RANKS:
            return []
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
    text = environment[name]
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < least or int(text) > _MOST_RANKS:
        raise BadValue(
            f"{name} is '{text:.40}'; it must be a number from {least} to {_MOST_RANKS}.",
            hint="A launcher sets it. Where something else does: manyhands worker --launcher none --join HOST:PORT",
        )
    return int(text)


def _port(environment: Mapping[str, str]) -> int:
    """Return the coordinator's port: MANYHANDS_LISTEN is what the coordinator of the same job listens on."""
    listen = environment.get(LISTEN_VARIABLE, "")
    return parse_address(listen, DEFAULT_PORT)[1] if listen else DEFAULT_PORT


# The address of this worker


def check_data_port(port: int, slots: int) -> int:
    """Return `port`, the first of as many as there are workers on this machine; refuse one out of range."""
    if not 0 <= port <= 65536 - slots:
        more = f": {slots} workers take {slots} ports, one after another" if slots > 1 else ""
        raise BadValue(f"--data-port is {port}; it must be 1 to {65536 - slots}{more}.")
    return port


def parse_health_port(text: str, slots: int) -> tuple[str, int]:
    """Return where health is to be answered: PORT at loopback, or HOST:PORT."""
    if slots > 1:
        raise BadValue(
            f"--health-port {text:.80} is for one worker; --slots {slots} are as many processes.",
            hint="Start a worker for each, with a port of its own.",
        )
    host, port = ("127.0.0.1", text) if re.fullmatch(r"\d{1,9}", text) else (None, "")
    if host is not None and int(port) <= 65535:
        return host, int(port)
    if host is not None:
        raise BadValue(f"--health-port is {text:.80}; it must be at most 65535.")
    return parse_address(text)


def parse_advertise(text: str) -> Advertised:
    """Return the address at which others reach this worker: HOST, one of this machine's own, or HOST:PORT, from which
    another machine forwards to it.

    BadValue where HOST alone is no address of this machine: nobody would be reached there.
    """
    host, port = parse_address(text, 0)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadValue(
            f"--advertise {text:.80}: {error.strerror or error}.", hint="Write an IP address, or HOST:PORT."
        ) from error
    address = str(resolved[0])
    if address in ("0.0.0.0", "::"):
        raise BadValue(f"--advertise {text:.80} stands for every address; others need one.", hint=_choice())
    if not port and not _is_of_this_machine(address, family):
        raise BadValue(
            f"--advertise {host:.80}: {address} is not an address of this machine.",
            hint=f"{_choice()} Where another machine forwards a port to this one: --advertise {host:.80}:PORT "
            "--data-port PORT",
        )
    return Advertised(address, port)


def _is_of_this_machine(address: str, family: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _choice() -> str:
    from manyhands.runtime.identity import addresses

    listed = [f"{address} ({interface})" for address, interface in addresses().items() if "%" not in address]
    return f"This machine has {', '.join(listed[:6])}." if listed else "This machine has no address but loopback."
