"""A cluster made ready: its workers started or joined, its layers measured."""

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
    """Workers at hand, and what is known of them."""

    coordinator: Coordinator
    cluster: Cluster
    is_local: bool
    """Every worker is a process of this machine, started here."""
    threads: int
    has_links: bool = False
    """The links are known from a file; else they are measured."""
    scale: float | None = None
    """How many times slower than in life everything goes here; None: this is no lab."""
    stands_in: bool = False
    """Plain processes behind shaped links, where a lab was asked for and there can be none."""
    kind: str = ""
    """What profiles are kept for, beside machine and network, where these do not say it: a lab at a scale."""

    @property
    def others_may_join(self) -> bool:
        """Whether somebody may come who was not started here."""
        return not self.is_local and self.scale is None

    @property
    def rejoin_seconds(self) -> float:
        """How long a job with too few workers waits for others to join, or to join again; 0: nobody can."""
        return REJOIN_SECONDS if self.others_may_join else 0.0

    def begin(self, retry_policy: RetryPolicy) -> None:
        """Take those that a job begins with: as many of the devices at hand as it may use. Refused where they are fewer
        than it needs."""
        retry_policy.begins_with(len(self.cluster.devices))
        for name in self.cluster.names[retry_policy.max_devices :] if retry_policy.max_devices is not None else ():
            self.cluster = self.cluster.without(name)

    def go_on_without_lost(self, retry_policy: RetryPolicy) -> list[str]:
        """Who of the cluster is gone, and no longer in it: a job that has not begun yet begins without them. Nobody
        where too few would be left, or where all were started here: one of those that ends so early would not work."""
        here = {member.name for member in self.coordinator.alive() if not member.is_leaving}
        gone = [name for name in self.cluster.names if name not in here]
        if not self.others_may_join or len(self.cluster.names) - len(gone) < retry_policy.min_devices:
            return []
        for name in gone:
            self.cluster = self.cluster.without(name)
        return gone

    def wait_for_enough(self, retry_policy: RetryPolicy) -> bool:
        """Wait for others where some were lost and too few are left to begin with; whether there are enough again.

        They are waited for as long as the first ones were. A cluster of a file is one of given names, which are waited
        for by name.
        """
        here = [member.name for member in self.coordinator.alive()]
        if not self.others_may_join or all(name in here for name in self.cluster.names):
            return False
        wanted = self.cluster.names if self.has_links else retry_policy.min_devices
        self.coordinator.on_event(f"Waiting for others to join: {len(here)} of {retry_policy.min_devices} are here.")
        try:
            self.coordinator.wait_for(wanted, self.coordinator.join_limit_seconds)
        except TimedOut:
            return False
        if not self.has_links:
            self.cluster = self.coordinator.cluster(self.cluster.name)
            self.begin(retry_policy)
        return True


def usable_cores() -> int:
    return identify().cores


# Measuring
