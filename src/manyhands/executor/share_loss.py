"""The loss of a share of the batch, and what it adds to the whole batch's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manyhands.executor.loss_scale import LossScale
from manyhands.facts.plan import Plan
from manyhands.graph.graph import Graph
from manyhands.graph.labels import check_leaves, labels_of
from manyhands.graph.loss import loss_totals, weighted_combination
from manyhands.graph.loss_totals import LOSS_TOTALS, LossTotals
from manyhands.graph.nodes import values_of
from manyhands.graph.piece import Context, Piece
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights


def target_names(graph: Graph) -> tuple[str, ...]:
    """Return the loss's inputs that are targets."""
    assert graph.loss is not None
    return tuple(dict.fromkeys(tree_leaves(graph.loss.input_tree[0][1])))


def trained_weights(graph: Graph) -> set[str]:
    """Return the weights that a gradient reaches: one that the loss does not depend on has none, as on one device."""
    network = graph.network
    reached = _outputs_in_loss(graph)
    weights: set[str] = set()
    for op in reversed(network.ops):
        if any(name in reached and network.tensors[name].differentiable for name in op.outputs):
            reached.update(op.inputs)
            weights.update(name for name in op.weights if network.weights[name].trainable)
    return weights


def _outputs_in_loss(graph: Graph) -> set[str]:
    """Return the network's outputs that the loss depends on; without a loss, all of them."""
    if graph.loss is None:
        return set(graph.outputs)
    reached = set(graph.loss.outputs)
    for node in reversed(graph.loss.nodes):
        makes = any(spec.name in reached and spec.dtype.startswith(("float", "bfloat")) for spec in node.outputs)
        if makes and node.target != "aten.detach.default":
            reached.update(values_of(node))
    names = zip(tree_leaves(graph.loss.input_tree[0][0]), tree_leaves(graph.loss_tree), strict=True)
    return {output for name, output in names if name in reached}


def shared_totals(graph: Graph, plan: Plan) -> LossTotals | None:
    """Return the totals that devices need where they compute the loss of parts of a batch; None: they need none."""
    last = plan.stages[-1]
    is_shared = plan.micro_batches > plan.steps_per_round or (len(last.devices) > 1 and last.share.splits_samples)
    return loss_totals(graph) if plan.is_training and is_shared else None


class ShareLoss:
    """The captured loss over some samples, scaled so that the shares' losses add up to the batch's."""

    def __init__(self, graph: Graph, plan: Plan, device: torch.device, scale: LossScale | None = None) -> None:
        """`scale`: what the loss is scaled by where gradients begin; None: nothing."""
        assert graph.loss is not None, "the graph was captured without a loss"
        self.scale = scale
        self.loss, self.plan, self.is_mean = graph.loss, plan, graph.loss_combination != "sum"
        self.labels = labels_of(graph.loss)
        self.totals, self.power = shared_totals(graph, plan), 0
        if self.totals is not None:
            claim, self.power = weighted_combination(graph, self.totals)
            self.loss, self.is_mean = self.totals.loss, claim == "mean"
        self.piece = Piece(self.loss, Weights.copied(graph.loss, device=device))
        inputs = tree_leaves(graph.loss.input_tree[0][0])
        self.outputs = dict(zip(inputs, tree_leaves(graph.loss_tree), strict=True))
        """Input of the loss -> output of the network."""

    def __call__(
        self, values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], samples: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this share's part of the loss, and its gradients by output. Where the loss has totals, `targets` holds
        those of the whole batch too."""
        leaves = {name: values[name].detach() for name in dict.fromkeys(self.outputs.values())}
        for tensor in leaves.values():
            if tensor.is_floating_point() and self.plan.is_training:
                tensor.requires_grad_()
        inputs = {name: leaves[output] for name, output in self.outputs.items()} | dict(targets)
        if self.totals is not None:
            inputs |= self.totals.inputs(inputs.pop(LOSS_TOTALS), samples / self.plan.step_size, self.power)
        with torch.set_grad_enabled(self.plan.is_training):
            try:
                value = self.piece(inputs, Context(samples=samples))[self.loss.outputs[0]]
            except IndexError:
                check_leaves(self.labels, inputs, "The targets")
                raise
            if self.is_mean:
                value = value * (samples / self.plan.step_size)
            begin = value if self.scale is None else value * self.scale.scale
        if self.plan.is_training:
            torch.autograd.backward([begin])
        return value.detach(), {name: t.grad for name, t in leaves.items() if t.grad is not None}
