"""Folds batch norms that follow a convolution into its weights, in a graph at rest (DECNN Eq. 1 has constants only).

    conv ── batch norm ── relu          w·x          ·γ/√(var+ε) + β − mean·γ/√(var+ε)
    conv ──────────────── relu          (γw/√…)·x + (β + (b − mean)·γ/√…)

Nothing is approximated; sums are rounded in another order. For inference only: running statistics are constants.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import torch

from manyhands.graph import ops
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Node, Value, Weight, values_of, weights_of


def at_rest(graph: Graph) -> Graph:
    """Return the network for inference: batch norms folded where possible, nothing that keeps running statistics."""
    readers = Counter(name for node in graph.nodes for name in values_of(node))
    uses = Counter(name for node in graph.nodes if not node.updates for name in weights_of(node))
    makers = {node.outputs[0].name: node for node in graph.nodes if not node.updates}
    state, nodes, place = dict(graph.state), list[Node](), dict[str, int]()
    for node in graph.nodes:
        if node.updates and node.updates not in graph.carried:
            continue
        source = node.arguments[0] if node.arguments else None
        maker = makers.get(source.name) if isinstance(source, Value) else None
        if maker is not None and readers[maker.outputs[0].name] == 1 and _may_fold(graph, maker, node, uses):
            nodes[place[maker.name]] = _folded(maker, node, state)
            makers[node.outputs[0].name] = maker
            continue
        place[node.name] = len(nodes)
        nodes.append(node)
    used = {name for node in nodes for name in weights_of(node)}
    return msgspec.structs.replace(
        graph,
        nodes=tuple(nodes),
        weights=tuple(spec for spec in graph.weights if spec.name in used),
        aliases={alias: name for alias, name in graph.aliases.items() if name in used},
        state={name: tensor for name, tensor in state.items() if name in used},
    )


def _may_fold(graph: Graph, maker: Node, norm: Node, uses: Counter[str]) -> bool:
    if norm.target != "aten.batch_norm.default" or maker.target not in ops.CONVOLUTION or "transpose" in maker.target:
        return False
    if maker.outputs[0].name in graph.outputs or not all(
        isinstance(argument, Weight) for argument in norm.arguments[1:5]
    ):
        return False
    weights = (*weights_of(maker), *weights_of(norm))
    are_weights = all(argument is None or isinstance(argument, Weight) for argument in maker.arguments[1:3])
    return are_weights and isinstance(maker.arguments[1], Weight) and all(uses[name] == 1 for name in weights)


def _folded(maker: Node, norm: Node, state: dict[str, torch.Tensor]) -> Node:
    """Return the convolution that makes what the batch norm made; its bias takes the place of the batch norm's."""
    gamma, beta, mean, variance = (state[argument.name] for argument in norm.arguments[1:5])
    scale = gamma / torch.sqrt(variance + norm.arguments[7])
    weight, bias = maker.arguments[1], maker.arguments[2] if len(maker.arguments) > 2 else None
    before = state[bias.name] if bias is not None else torch.zeros_like(mean)
    filters = state[weight.name]
    state[weight.name] = (filters * scale.view(-1, *(1 for _ in filters.shape[1:]))).to(filters.dtype).detach()
    state[norm.arguments[2].name] = (beta + (before - mean) * scale).to(beta.dtype).detach()
    return msgspec.structs.replace(
        maker, arguments=(maker.arguments[0], weight, norm.arguments[2], *maker.arguments[3:]), outputs=norm.outputs
    )
