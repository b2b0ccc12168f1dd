"""The calls of forward and backward passes: the phases of the micro-batch, the runner, what other stages here get."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from manyhands.executor.bound_calls import Call
from manyhands.executor.graph_part import GraphPart
from manyhands.executor.in_flight_micro_batch import Phase
from manyhands.schedule.actions import Backward, Forward

if TYPE_CHECKING:
    from manyhands.executor.executor import Executor

_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD


def bind_forward(executor: Executor, part: GraphPart, action: Forward) -> Call:
    """Return the call of a forward pass over some operators of a stage."""
    stage, number, order = action.stage, action.micro_batch, executor.plan.order
    runner, in_flight, exchange = part.runners[stage], part.in_flight, part.exchange
    is_recomputed = action.part == "again" and order != "replay"  # in the midst of the backward pass
    runs_ahead = order == "replay" and action.part != "again" and not runner.geometry.is_last
    ends_here = action.last == runner.geometry.last and action.part not in ("interior", "partial")

    def call() -> None:
        in_flight.begin_pass(stage, number)
        batch = in_flight.fed(number)
        if not is_recomputed:
            batch.enter(stage, _FORWARD)
        executor.settled_step = None
        context = in_flight.context(stage, number)
        if action.part in ("ahead", "again"):
            context = replace(context, records=action.part == "again", moves_buffers=action.part == "ahead")
        if runs_ahead:
            batch.updates_before = part.updates.count
        runner.forward(action, context)
        if is_recomputed or not ends_here:
            return
        exchange.pass_values(stage, number)
        in_flight.end_forward(stage, batch, awaits_gradients=runner.geometry.runs_backward)
        if not executor.plan.is_training:
            executor.answer(runner, number)

    return call


def bind_backward(executor: Executor, part: GraphPart, action: Backward) -> Call:
    """Return the call of a backward pass over some operators of a stage."""
    stage, number = action.stage, action.micro_batch
    runner, in_flight, exchange = part.runners[stage], part.in_flight, part.exchange
    of_weights, of_inputs = action.part == "weights", action.part == "inputs"
    ends_here = action.first == runner.geometry.backward_first and action.part != "rim"

    def call() -> None:
        in_flight.begin_pass(stage, number)
        batch = in_flight[number]
        if not of_weights:  # which may have been put off until the rest is done
            batch.enter(stage, _BACKWARD)
        runner.backward(action, in_flight.context(stage, number))
        if not ends_here:
            return
        if not of_weights:
            exchange.pass_gradients(stage, number)
        if not of_inputs:
            in_flight.end_backward(stage, batch)

    return call
