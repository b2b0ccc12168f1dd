"""A cluster whose workers Ray starts: how many, and the resources that each is given there."""

from __future__ import annotations

import math

import msgspec

from manyhands.facts.errors import BadValue

MOST_WORKERS = 1000
DRIVEN_BY_CLIENT = "ray://"


class RayCluster(msgspec.Struct, frozen=True):
    """Workers as Ray actors: `Cluster.ray(...)`. Ray starts them, also in place of those that are lost; what they
    compute and send each other does not pass through Ray."""

    count: int
    num_cpus: float = 1.0
    """CPUs of each worker, as Ray counts them; also its threads."""
    num_gpus: float = 0.0
    """GPUs of each worker: 1, or none."""
    memory_bytes: int = 0
    """Memory that Ray reserves for each worker; 0: none."""
    resources: tuple[tuple[str, float], ...] = ()
    """(name, amount): custom resources of Ray that each worker takes."""
    address: str = ""
    """The Ray cluster; empty: RAY_ADDRESS, or else one that is started on this machine."""

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 1 <= self.count <= MOST_WORKERS:
            raise BadValue(f"ray: {self.count!r} workers asked for; it must be 1 to {MOST_WORKERS}.")
        if not 0 < self.num_cpus < math.inf:
            raise BadValue(f"num_cpus is {self.num_cpus}; it must be > 0.", hint="1: one CPU for each worker.")
        if self.num_gpus not in (0, 1):
            raise BadValue(
                f"num_gpus is {self.num_gpus}; it must be 0 or 1.", hint="A worker computes on one GPU: more workers."
            )
        if self.memory_bytes < 0:
            raise BadValue(f"memory_bytes is {self.memory_bytes}; it must be >= 0.")
        for name, amount in self.resources:
            if not name or not 0 < amount < math.inf:
                raise BadValue(f"resources: {name!r} is {amount}; it must be > 0.", hint="resources={'edge': 1}")
        if self.address.startswith(DRIVEN_BY_CLIENT):
            raise BadValue(
                f"address is {self.address!r:.80}: Ray Client runs this script outside of the cluster, where workers "
                "cannot reach it.",
                hint="Run the script on a machine of the Ray cluster, as with: ray job submit -- python script.py",
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"ray-{number}" for number in range(1, self.count + 1))

    @property
    def threads(self) -> int:
        """Threads of each worker."""
        return max(1, int(self.num_cpus))

    @property
    def compute(self) -> str:
        """The hardware that each worker computes on: Ray shows it only the GPU that it was given."""
        return "cuda:0" if self.num_gpus else "cpu"

    def requests(self) -> dict[str, object]:
        """Return the resources that each worker asks Ray for, as options of an actor."""
        requests: dict[str, object] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.memory_bytes:
            requests["memory"] = self.memory_bytes
        return requests | ({"resources": dict(self.resources)} if self.resources else {})
