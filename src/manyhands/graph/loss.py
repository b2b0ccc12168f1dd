"""The way in which a loss combines over samples: how the losses of the shares of a batch give the loss of the batch.

    mean      loss(batch) = sum of n_i / N * loss(share_i)     F.cross_entropy, F.mse_loss
    sum       loss(batch) = sum of loss(share_i)               reduction="sum"
    weighted  a mean or sum, given totals of all targets       class weights, ignored targets, a masked mean
    whole     neither: all samples must be in one place        RMSE, a contrastive loss

Numbers alone cannot show it: weights of classes look like a mean where all example targets are alike. So a walk over
the graph proves it from what each operator does, for any data (loss_proof.py), and a run on drawn data must agree
(loss_trial.py). In doubt it is "whole". The totals that a weighted loss is given are in loss_totals.py.
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.facts.errors import BadGraph
from manyhands.facts.network import LossCombination
from manyhands.graph.graph import Graph
from manyhands.graph.labels import check_labels
from manyhands.graph.loss_proof import LossProof
from manyhands.graph.loss_totals import POWERS, LossTotals, totals_of
from manyhands.graph.loss_trial import agrees, one_thread
from manyhands.graph.precision import left
from manyhands.graph.tape import bind_inputs
from manyhands.graph.trees import tree_leaves


def combination(graph: Graph, outputs: Any, target: Any) -> LossCombination:
    """Return how `graph.loss` combines over samples. `outputs` and `target` are examples, as the loss takes them.

    A mean-reduced cross entropy counts as a mean, as it is where no target is its ignored class; if the example target
    has one, or there are two such classes, it is "weighted". Shares of both are computed with totals. An example target
    that names a class without an output is refused: the loss would fail on it, for another reason.
    """
    assert graph.loss is not None, "the graph was captured without a loss"
    check_labels(graph, target)
    proof = LossProof(graph.loss, _penalties(graph))
    proved = proof.combination()
    made = {spec.name: spec for node in graph.nodes for spec in node.outputs}
    examples = [torch.ones(made[name].shape, dtype=getattr(torch, made[name].dtype)) for name in graph.penalties]
    inputs = bind_inputs(graph.loss, ([outputs, examples] if examples else outputs, target))
    with one_thread(), left():
        if proved != "whole" and not proof.ignored:
            return proved if agrees(graph.loss, proved, inputs) else "whole"
        totals = totals_of(graph.loss)
        claim, power = _proved(graph, totals) if totals is not None else ("whole", 0)
        if claim == "whole" or not agrees(graph.loss, claim, inputs, power):
            return "whole"
    if proved == "whole" or len({number for _, number in proof.ignored}) > 1 or _is_found(proof.ignored, inputs):
        return "weighted"
    return proved


def _penalties(graph: Graph) -> frozenset[str]:
    """Return the inputs of the loss that are made from weights alone, whatever the samples."""
    if graph.loss is None or not graph.penalties:
        return frozenset()
    return frozenset(tree_leaves(graph.loss.input_tree[0][0][1]))


def loss_totals(graph: Graph) -> LossTotals | None:
    """Return the totals that shares of a batch need to compute `graph.loss`; None: it does without."""
    if graph.loss is None or graph.loss_combination == "whole":
        return None
    if graph.loss_combination != "weighted" and ignored_class(graph) is None:
        return None
    totals = totals_of(graph.loss)
    if totals is None:
        raise BadGraph(f"The loss is said to be {graph.loss_combination}; its targets have no totals.")
    return totals


def weighted_combination(graph: Graph, totals: LossTotals) -> tuple[LossCombination, int]:
    """Return how a loss that is given its totals combines over samples, and the power of n/N that scales these."""
    claim, power = _proved(graph, totals)
    if claim == "whole":
        raise BadGraph(
            f"The loss is said to be {graph.loss_combination}; given its totals, it is no sum or mean over samples."
        )
    return claim, power


def _proved(graph: Graph, totals: LossTotals) -> tuple[LossCombination, int]:
    for power in POWERS:
        powers = dict.fromkeys((total.name for total in totals.totals), power)
        claim = LossProof(totals.loss, _penalties(graph), powers).combination()
        if claim != "whole":
            return claim, power
    return "whole", 0


def ignored_class(graph: Graph) -> int | None:
    """Return the class whose targets a mean-reduced cross entropy in `graph.loss` leaves out; None: there is none."""
    return next(iter(ignored_classes(graph)), None)


def ignored_classes(graph: Graph) -> list[int]:
    """Return the classes whose targets mean-reduced cross entropies in `graph.loss` leave out, one for each of them."""
    if graph.loss is None:
        return []
    proof = LossProof(graph.loss, _penalties(graph))
    proof.combination()
    return [number for _, number in proof.ignored]


def _is_found(ignored: list[tuple[str, int]], tensors: dict[str, torch.Tensor]) -> bool:
    """Return whether a target holds its ignored class; class numbers given as floats are cut off, as the loss does."""
    return any(bool((tensors[leaf].long() == number).any()) for leaf, number in ignored if not tensors[leaf].is_meta)
