"""The part of a network that can be cut into tiles: its maps, up to the operator that needs all of one in one place."""

from __future__ import annotations

from manyhands.facts.network import Network, Op


def maps_of(network: Network, first: int, last: int) -> tuple[frozenset[str], int | None]:
    """Return the tensors of operators [first, last) that can be cut into tiles, and the first operator in the way.

    All have rows and columns, or all have a depth besides.
    """
    made = {name for op in network.ops[first:last] for name in op.outputs}
    maps: set[str] = set()
    axes = 0
    for index in range(first, last):
        op = network.ops[index]
        entering = [name for name in op.inputs if name not in made and network.is_map(name)]
        axes = axes or max((len(network.spatial[name]) for name in entering), default=0)
        maps.update(entering)
        if any(len(network.spatial[name]) != axes for name in entering):
            return frozenset(maps), index
        if not op.outputs or not any(name in maps for name in op.inputs):
            continue
        if op.tiling in ("local", "norm") and _makes_maps(network, index, maps):
            maps.update(op.outputs)
        elif op.tiling != "pool":
            return frozenset(maps), index
    return frozenset(maps), None if maps else first


def _makes_maps(network: Network, index: int, maps: set[str]) -> bool:
    """Return whether what an operator makes are maps that follow those it reads: what serves all places of a map must
    not be a map of its own."""
    op, followed = network.ops[index], network.followed[index]
    return all(network.is_map(name, least=1) for name in op.outputs) and all(
        name in followed for name in op.inputs if name in maps
    )


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
