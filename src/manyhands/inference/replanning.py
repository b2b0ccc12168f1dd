"""Plans an inference stream again when devices come or go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError, unknown
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel, Profile
from manyhands.planner.inference import (
    INFERENCE_STRATEGIES,
)
from manyhands.plans.inference import plan_for

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph
    from manyhands.session.session import Session


def replan_inference(
    plan: Plan,
    network: Network,
    cluster: Cluster,
    profile: Profile,
    objective: str = "latency",
    strategy: str = "auto",
    home: str = "",
) -> Plan:
    """Return a plan for the devices of `cluster`, which remain: by the same strategy, or if that has none, by any.

    The answers of a stream do not depend on each other, so nothing of the old plan has to be kept.
    """
    if strategy not in INFERENCE_STRATEGIES:
        raise unknown("strategy", strategy, INFERENCE_STRATEGIES)
    home = home if home in cluster.names else ""
    tries = dict.fromkeys((strategy, "auto") if len(cluster.names) > 1 else ("single",))
    refusal: ManyhandsError | None = None
    for name in tries:
        try:
            return plan_for(network, cluster, profile, objective=objective, strategy=name, home=home).plan
        except ManyhandsError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def sized(plan: Plan, batch_size: int) -> Plan:
    """Return the plan with batches of another size; 0: as it is."""
    return msgspec.structs.replace(plan, batch_size=batch_size) if batch_size else plan


class InferenceReplanner:
    """Plans for the present devices when a stream's workers change; knows every device that was ever present."""

    def __init__(
        self, session: Session, graph: Graph, cluster: Cluster, profile: Profile, objective: str = "latency",
        strategy: str = "auto", home: str = "",
    ) -> None:  # fmt: skip
        from manyhands.job.replanning import Replanner

        self.objective, self.strategy, self.home = objective, strategy, home
        self.batch_size = 0
        """The samples of a batch, in place of a plan's; 0: the plan's."""
        self._network = graph.network
        self._known = Replanner(session, graph, cluster, profile, strategy, None, 0.0, 0, training=False)

    def __call__(self, plan: Plan, names: tuple[str, ...]) -> tuple[Plan, dict[str, Mapping[str, Kernel]]]:
        """Return a plan for the named devices, and their kernels; a device that was not measured yet is measured."""
        cluster, profile = self._known.present(plan, names)
        new_plan = replan_inference(plan, self._network, cluster, profile, self.objective, self.strategy, self.home)
        return sized(new_plan, self.batch_size), self.kernels(new_plan)

    def kernels(self, plan: Plan) -> dict[str, Mapping[str, Kernel]]:
        return self._known.kernels(plan)
