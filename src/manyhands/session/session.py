"""A cluster that is ready: its workers have started or joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import TimedOut
from manyhands.profiler.this_machine import identify
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.retry_policy import RetryPolicy

REJOIN_SECONDS = 60.0
Say = Callable[[str], None]


@dataclass
class Session:
    """The connected workers, and what is known of them."""

    coordinator: Coordinator
    cluster: Cluster
    is_local: bool
    """Whether every worker is a process of this machine, started here."""
    threads: int
    has_links: bool = False
    """Whether the links are known from a file; else they are measured."""
    scale: float | None = None
    """Time scale of a lab: how many times slower than real time everything runs; None: this is no lab."""
    stands_in: bool = False
    """Whether plain processes behind shaped links stand in for a lab, which is impossible here."""
    kind: str = ""
    """A prefix for stored profiles that machine and network alone do not identify: those of a lab at a scale."""

    @property
    def others_may_join(self) -> bool:
        """Whether workers may join that were not started here."""
        return not self.is_local and self.scale is None

    @property
    def rejoin_seconds(self) -> float:
        """Seconds that a job with too few workers waits for others to join, or to join again; 0: none can."""
        return REJOIN_SECONDS if self.others_may_join else 0.0

    def begin(self, retry_policy: RetryPolicy) -> None:
        """Keep the devices that a job begins with: as many of those present as it may use. Refuse if they are fewer
        than it needs."""
        retry_policy.begins_with(len(self.cluster.devices))
        for name in self.cluster.names[retry_policy.max_devices :] if retry_policy.max_devices is not None else ():
            self.cluster = self.cluster.without(name)

    def go_on_without_lost(self, retry_policy: RetryPolicy) -> list[str]:
        """Remove the lost devices from the cluster, and return their names: a job that has not begun yet begins without
        them.

        Remove none if too few would remain, or if all were started here: one that ends so early would not work.
        """
        present = {member.name for member in self.coordinator.alive() if not member.is_leaving}
        lost_names = [name for name in self.cluster.names if name not in present]
        if not self.others_may_join or len(self.cluster.names) - len(lost_names) < retry_policy.min_devices:
            return []
        for name in lost_names:
            self.cluster = self.cluster.without(name)
        return lost_names

    def wait_for_enough(self, retry_policy: RetryPolicy) -> bool:
        """Wait for others if some were lost and too few remain to begin with; return whether there are enough again.

        The limit is that for the first workers. A cluster file's devices have given names, and are awaited by name.
        """
        present = [member.name for member in self.coordinator.alive()]
        if not self.others_may_join or all(name in present for name in self.cluster.names):
            return False
        awaited = self.cluster.names if self.has_links else retry_policy.min_devices
        self.coordinator.on_event(f"Waiting for others to join: {len(present)} of {retry_policy.min_devices} are here.")
        try:
            self.coordinator.wait_for(awaited, self.coordinator.join_limit_seconds)
        except TimedOut:
            return False
        if not self.has_links:
            self.cluster = self.coordinator.cluster(self.cluster.name)
            self.begin(retry_policy)
        return True


def usable_cores() -> int:
    return identify().cores
