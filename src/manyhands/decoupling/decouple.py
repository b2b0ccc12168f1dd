"""Scheme 1 of DECNN: a network whose channels are groups that meet only at a few shuffles.

trace ──▶ read: which widths must agree ──▶ group convolutions, place shuffles ──▶ widths ──▶ new graph and layers
"""

from __future__ import annotations

from math import prod
from reprlib import repr as brief
from typing import Any, Literal

from torch import fx, nn

from manyhands.decoupling.grouping import ALL, candidates, choose, group_layers, keeps_width, stays_dense
from manyhands.decoupling.reading import Reading
from manyhands.decoupling.report import DecoupleReport, ShuffleReport, totals
from manyhands.decoupling.rewriting import Rewriting
from manyhands.decoupling.tracing import example, propagate, shape_of, trace
from manyhands.decoupling.widths import Widths
from manyhands.facts.errors import BadValue

MOST_GROUPS, MOST_WIDEN = 256, 16.0


class Decoupled(fx.GraphModule):
    """A decoupled network: an nn.Module like any other, with `report`."""

    @property
    def report(self) -> DecoupleReport:
        report: DecoupleReport = self.meta["decoupled"]
        return report


def decouple(
    model: nn.Module,
    groups: int = 4,
    shuffles: int | Literal["all"] = 3,
    widen: float = 1.5,
    *,
    weights: Literal["fresh", "original"] = "fresh",
    inputs: Any = None,
) -> Decoupled:
    """Return a copy of a convolutional network in which groups of channels work alone but for a few shuffles.

    Convolutions become grouped, except the first, gates and what makes the output; channels are widened and rounded up
    to the groups; `shuffles` of them (or "all": one in every block) deal out channels among groups. `weights` are
    "fresh", or "original": made of the model's own, as a start for fine-tuning. `inputs` is an example batch, or the
    shape of one sample, for finding shapes; nothing is computed with it. The original model is not changed.
    """
    _check(groups, shuffles, widen, weights)
    if isinstance(model, Decoupled):
        raise BadValue("This network is decoupled already.", hint="Decouple the network it was made of.")
    graph = trace(model)
    batch = example(model, inputs)
    traced = fx.GraphModule(model, graph, type(model).__name__)
    propagate(traced, batch)
    before = totals(traced)
    widths = Widths(groups, widen)
    reading = Reading(traced.graph, model, widths)
    widths.spread()
    grouped = group_layers(reading, widths)
    possible = candidates(reading, widths, grouped) if groups > 1 else []
    chosen = choose(reading, shuffles, possible, sum(len(reading.layers[name].calls) for name in grouped))
    for candidate in chosen:
        widths.require(reading.forms[candidate.convolution.all_input_nodes[0]].width, groups**2)
    widths.spread()
    grouped = group_layers(reading, widths)
    writing = Rewriting(model, reading, widths, grouped, original=weights == "original")
    writing.rewrite(chosen)
    made = Decoupled(writing.parts, traced.graph, f"Decoupled{type(model).__name__}")
    made.graph.eliminate_dead_code()  # sizes that were only read for views
    made.graph.lint()
    made.recompile()
    made.training = model.training
    propagate(made, batch)
    shapes = {str(node.target): (shape_of(node) or ())[1:] for node in made.graph.nodes if node.op == "call_module"}
    made.meta["decoupled"] = DecoupleReport(
        network=type(model).__name__,
        input=tuple(batch.shape[1:]),
        groups=groups,
        widen=widen,
        shuffles_wanted=shuffles,
        weights=weights,
        before=before,
        after=totals(made),
        convolutions=len(grouped),
        grouped=sum(not layer.dense for layer in grouped.values()),
        shuffles=tuple(
            ShuffleReport(
                name,
                str(candidate.convolution.target),
                shapes[name],
                prod(shapes[name]) * batch.dtype.itemsize,
                candidate.depth,
            )
            for name, candidate in zip(writing.shuffles, chosen, strict=True)
        ),
        dense=tuple(stays_dense(reading, grouped)),
        kept=tuple(keeps_width(reading, grouped, widths)),
        concats=tuple(writing.concats),
    )
    return made


def _check(groups: int, shuffles: int | str, widen: float, weights: str) -> None:
    if not isinstance(groups, int) or not 1 <= groups <= MOST_GROUPS:
        raise BadValue(
            f"groups={brief(groups)} must be a number from 1 to {MOST_GROUPS}.", hint="The paper has groups=4."
        )
    if shuffles != ALL and (not isinstance(shuffles, int) or isinstance(shuffles, bool) or shuffles < 0):
        raise BadValue(f'shuffles={brief(shuffles)} must be a number, or "all".', hint="The paper has shuffles=3.")
    if not isinstance(widen, (int, float)) or not 0 < widen <= MOST_WIDEN:
        raise BadValue(
            f"widen={brief(widen)} must be above 0 and at most {MOST_WIDEN:g}.", hint="The paper has widen=1.5."
        )
    if weights not in ("fresh", "original"):
        raise BadValue(f"weights={brief(weights)} is unknown.", hint='Use "fresh" or "original".')
