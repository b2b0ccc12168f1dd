"""What a step costs beside its layers: measured on workers, stored, and told from a run that took a known time."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.executor.log import DeviceLog, MeasuredSpan
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.plans.local_profiles import StepCosts, keep_step_costs, stored_step_costs, with_costs
from manyhands.runtime.outcome import Outcome
from manyhands.session import step_costs
from manyhands.session.opening import open_session
from manyhands.session.step_costs import (
    USUAL,
    MachineUse,
    are_costs_known,
    costs_of,
    with_known_step_costs,
    with_step_costs,
)

THREE = Cluster.local(3, delay_seconds=0.001, bytes_per_second=1e12, memory_bytes_per_second=1e15)
"""Links and memory without cost, so that sums of known costs remain."""
GATHER, LAYERS = 0.009, 0.020
MESSAGE = (GATHER - 0.001) / 4
"""An exchange among three is two messages sent and two received."""


def outcome(names: tuple[str, ...], step: float, gathers: int) -> Outcome:
    """Return a run in which each of the exchanges of a step took GATHER."""

    def log(name: str) -> DeviceLog:
        spans = [MeasuredSpan(name, "compute", at, at + GATHER, "reduce", "") for at in range(gathers)]
        spans.append(MeasuredSpan(name, "send", 0.0, 9.0, "reduce", "gradients"))  # on a thread of its own
        return DeviceLog(name, spans=spans)

    return Outcome(step_seconds=[9.0] * 5 + [step] * step_costs.COUNTED, logs={name: log(name) for name in names})


def test_costs_are_those_with_which_the_run_is_predicted() -> None:
    graph = step_costs._captured()
    plan = step_costs._plan(graph.network, THREE)
    exchanges, sum_messages, sum_delays = 6, 8, 2
    """Of three batch norms, forward and backward; of the gradients' sum in two rounds."""
    known = LAYERS + exchanges * GATHER + sum_messages * MESSAGE + sum_delays * 0.001
    costs = costs_of(outcome(THREE.names, known + 0.005, exchanges), plan, graph.network, THREE, LAYERS)
    assert costs.message_seconds == pytest.approx(MESSAGE)
    assert costs.round_seconds == pytest.approx(0.005, abs=0.0025)  # the sum's delays pass beside its messages
    assert costs_of(outcome(THREE.names, 0.001, 6), plan, graph.network, THREE, LAYERS).round_seconds == 0.0


def test_what_other_programs_took_meanwhile_is_no_cost() -> None:
    graph = step_costs._captured()
    plan = step_costs._plan(graph.network, THREE)
    quiet = costs_of(outcome(THREE.names, 0.2, 6), plan, graph.network, THREE, LAYERS)
    halved = costs_of(outcome(THREE.names, 0.4, 6), plan, graph.network, THREE, LAYERS, own_part=0.5)
    assert halved.message_seconds == pytest.approx((GATHER / 2 - 0.001) / 4)
    more_messages = (6 * 4 + 8) * (quiet.message_seconds - halved.message_seconds)
    assert halved.round_seconds == pytest.approx(quiet.round_seconds + more_messages)


def test_the_part_of_the_machine_that_was_left_to_a_run() -> None:
    use = MachineUse.since_now([])

    def earlier(own: float, busy: float, idle: float) -> float:
        """Return the part where the run, the machine and its idle cores had so many seconds."""
        before = (use.own_seconds - own, use.busy_seconds - busy, use.idle_seconds - idle)
        return MachineUse(use.processes, *before).own_part()

    assert earlier(own=1e6, busy=2e6, idle=0.0) == pytest.approx(0.5, abs=0.01)
    assert earlier(own=1e6, busy=2e6, idle=1e6) == pytest.approx(1.0, abs=0.01)  # there was a core for both
    assert earlier(own=0.0, busy=1e6, idle=0.0) == 0.2


def test_one_worker_has_no_messages() -> None:
    graph, one = step_costs._captured(), Cluster.local(1, memory_bytes_per_second=1e15)
    plan = step_costs._plan(graph.network, one)
    costs = costs_of(outcome(one.names, LAYERS + 0.003, 0), plan, graph.network, one, LAYERS)
    assert costs.message_seconds == 0.0
    assert costs.round_seconds == pytest.approx(0.003)


def test_costs_are_kept_for_as_many_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    costs = StepCosts(0.001, 0.002)
    assert stored_step_costs(THREE, 1) is None
    keep_step_costs(costs, THREE, 1)
    assert stored_step_costs(THREE, 1) == costs
    assert stored_step_costs(Cluster.local(2), 1) is None
    assert stored_step_costs(THREE, 2) is None
    device = with_costs(THREE, costs).devices[2]
    assert (device.message_seconds, device.round_seconds) == (0.001, 0.002)
    (kept,) = (tmp_path / "machines").rglob("*.costs.json")
    kept.write_text('{"message_seconds": -1, "round_seconds": 0}')
    assert stored_step_costs(THREE, 1) is None  # what cannot be used is measured again
    with pytest.raises(BadValue, match="must be finite"):
        StepCosts(float("nan"), 0.0)


@pytest.mark.xdist_group("training")
def test_workers_measure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    with open_session(Cluster.local(2), threads=1) as session:
        measured = with_step_costs(session, session.cluster)
        assert all(0 < d.message_seconds < 0.1 and 0 <= d.round_seconds < 1 for d in measured.devices)
        monkeypatch.setattr(step_costs, "measure_step_costs", lambda session, cluster: StepCosts(0.5, 0.25))
        assert with_step_costs(session, session.cluster) == measured
        again = with_step_costs(session, session.cluster, refresh=True)
        assert again.devices[0].message_seconds == 0.5


@pytest.mark.xdist_group("training")
def test_the_usual_costs_stand_in_until_there_is_time_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    with open_session(Cluster.local(2), threads=1) as session:
        assert not are_costs_known(session, session.cluster)
        assert with_known_step_costs(session, session.cluster).devices[1].round_seconds == USUAL.round_seconds
        keep_step_costs(StepCosts(0.5, 0.25), session.cluster, session.threads)
        assert are_costs_known(session, session.cluster)
        assert with_known_step_costs(session, session.cluster).devices[1].round_seconds == 0.25
