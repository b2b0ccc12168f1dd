"""The part of a network that can be cut into tiles: its maps, up to the operator that needs all of one in one place."""

from __future__ import annotations

from math import prod

from manyhands.facts.network import Network, Op

MAP_AXES = (4, 5)


def maps_of(network: Network, first: int, last: int) -> tuple[frozenset[str], int | None]:
    """Return the tensors of operators [first, last) that can be cut into tiles, and the first operator in the way."""
    made = {name for op in network.ops[first:last] for name in op.outputs}
    maps: set[str] = set()
    for index in range(first, last):
        op = network.ops[index]
        maps.update(name for name in op.inputs if name not in made and _is_map(network, name, least=2))
        if not op.outputs or not any(name in maps for name in op.inputs):
            continue
        if op.tiling in ("local", "norm") and all(_is_map(network, name, least=1) for name in op.outputs):
            maps.update(op.outputs)
        elif op.tiling != "pool":
            return frozenset(maps), index
    return frozenset(maps), None if maps else first


def _is_map(network: Network, tensor: str, least: int) -> bool:
    spec = network.tensors[tensor]
    is_map = len(spec.shape) in MAP_AXES and spec.batch_axis == 0 and not spec.pairs_samples
    return is_map and prod(spec.shape[-2:]) >= least


def tileable_layers(network: Network) -> tuple[int, Op | None]:
    """Return how many leading layers can be cut into tiles, up to global pooling, and the operator that ends them."""
    maps, obstacle = maps_of(network, 0, len(network.ops))
    end = len(network.layers) if obstacle is None else network.layer_of_op[obstacle]
    if obstacle is not None:  # what is read there again must have been a map all along
        maps, _ = maps_of(network, 0, network.layers[end - 1].last if end else 0)
    while end and not any(name in maps for op in _ops(network, end - 1) for name in op.outputs):
        end -= 1
    return end, network.ops[obstacle] if obstacle is not None else None


def _ops(network: Network, layer: int) -> tuple[Op, ...]:
    return network.ops[network.layers[layer].first : network.layers[layer].last]
