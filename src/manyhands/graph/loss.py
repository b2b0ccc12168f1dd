"""The way in which a loss combines over samples: how the losses of the shares of a batch give the loss of the batch.

    mean     loss(batch) = sum of n_i / N * loss(share_i)     F.cross_entropy, F.mse_loss
    sum      loss(batch) = sum of loss(share_i)               reduction="sum"
    whole    neither: all samples must be in one place        class weights, a masked mean, RMSE, a contrastive loss

Numbers alone cannot show it: weights of classes look like a mean where all example targets are alike. So a walk over
the graph proves it from what each operator does, for any data (loss_proof.py), and a run on drawn data must agree
(loss_trial.py). In doubt it is "whole".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from manyhands.facts.network import LossCombination
from manyhands.graph.graph import Graph
from manyhands.graph.labels import check_labels
from manyhands.graph.loss_proof import LossProof
from manyhands.graph.loss_trial import agrees, one_thread
from manyhands.graph.tape import bind_inputs
from manyhands.graph.trees import tree_leaves, tree_map


def combination(graph: Graph, outputs: Any, target: Any) -> LossCombination:
    """Return how `graph.loss` combines over samples. `outputs` and `target` are examples, as the loss takes them.

    A mean-reduced cross entropy counts as a mean as long as no target is its ignored class; code that shares a batch
    must look for it (has_ignored). If the example target has one, or there are two such classes, it is "whole". An
    example target that names a class without an output is refused: the loss would fail on it, for another reason.
    """
    assert graph.loss is not None, "the graph was captured without a loss"
    check_labels(graph, target)
    proof = LossProof(graph.loss, _penalties(graph))
    proved = proof.combination()
    if proved == "whole" or len({number for _, number in proof.ignored}) > 1:
        return "whole"
    made = {spec.name: spec for node in graph.nodes for spec in node.outputs}
    examples = [torch.ones(made[name].shape, dtype=getattr(torch, made[name].dtype)) for name in graph.penalties]
    inputs = bind_inputs(graph.loss, ([outputs, examples] if examples else outputs, target))
    if _is_found(proof.ignored, inputs):
        return "whole"
    with one_thread():
        return proved if agrees(graph.loss, proved, inputs) else "whole"


def _penalties(graph: Graph) -> frozenset[str]:
    """Return the inputs of the loss that are made from weights alone, whatever the samples."""
    if graph.loss is None or not graph.penalties:
        return frozenset()
    return frozenset(tree_leaves(graph.loss.input_tree[0][0][1]))


def ignored_class(graph: Graph) -> int | None:
    """Return the class whose targets a mean-reduced cross entropy in `graph.loss` leaves out; None: there is none."""
    return next((number for _, number in _ignored(graph)), None)


def has_ignored(graph: Graph, target: Any) -> bool:
    """Return whether a target holds the ignored class where the loss looks for it.

    Such a batch must not be shared: its loss is a mean over the other targets, and shares differ in how many they have.
    """
    ignored = _ignored(graph)
    if graph.loss is None or not ignored:
        return False
    blank = tree_map(lambda _: None, graph.loss.input_tree[0][0])
    return _is_found(ignored, bind_inputs(graph.loss, (blank, target)))


def _ignored(graph: Graph) -> list[tuple[str, int]]:
    if graph.loss is None:
        return []
    proof = LossProof(graph.loss, _penalties(graph))
    proof.combination()
    return proof.ignored


def _is_found(ignored: list[tuple[str, int]], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a target holds its ignored class; class numbers given as floats are cut off, as the loss does."""
    return any(bool((tensors[leaf].long() == number).any()) for leaf, number in ignored if not tensors[leaf].is_meta)
