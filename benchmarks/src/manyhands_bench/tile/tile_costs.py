"""The costs and the communication of one network's tiles, without a cluster: the studies of TILE chapter 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.facts.network import Network
from manyhands.planner.grouping import Costs, Direction, InteriorTile, Size, kernel_layers


@dataclass(frozen=True)
class RatioCosts:
    """The costs over the optimum's at one ratio of communication to computation cost (Fig. 5.2 d and e)."""

    ratio: float
    forward_groups: int
    """The number of groups of the optimum."""
    forward_one_group: float
    forward_every_layer: float
    backward_groups: int
    backward_one_group: float
    backward_every_layer: float


def cost_sweep(network: Network, grid: Size, ratios: Sequence[float]) -> list[RatioCosts]:
    """Compare one group and an exchange at every layer with the optimum, without fixed cost, at ratios c_c / c_p."""
    tile = InteriorTile(kernel_layers(network), grid)
    rows = []
    for ratio in ratios:
        costs = Costs(1.0, ratio)
        forward, backward = tile.compare("forward", costs), tile.compare("backward", costs)
        rows.append(
            RatioCosts(
                ratio,
                len(forward.best.starts),
                _times(forward.one_group, forward.best.cost),
                _times(forward.every_layer, forward.best.cost),
                len(backward.best.starts),
                _times(backward.one_group, backward.best.cost),
                _times(backward.every_layer, backward.best.cost),
            )
        )
    return rows


def _times(cost: float, best: float) -> float:
    """Return a cost over the best; 1 if the best is 0, as for a chain of poolings, which costs nothing either way."""
    return cost / best if best else 1.0


@dataclass(frozen=True)
class Components:
    """The elements that an interior tile sends and receives in one step, by content (Fig. 5.2c)."""

    batch_size: int
    samples: int
    """The tile's part of the input and of the output's deltas, received, and of the output, sent."""
    boundary: int
    """Boundary elements, forward and backward, at the groupings that exchange least."""
    boundary_one_group: int
    boundary_every_layer: int
    weights: int
    """Partial gradients sent to the gateway, updated weights received; the same for any batch."""


def communication_components(network: Network, grid: Size, batch_sizes: Sequence[int]) -> list[Components]:
    """Return what an interior tile communicates in one step of each batch size."""
    layers = kernel_layers(network)
    tile = InteriorTile(layers, grid)
    (rows, columns), (last_rows, last_columns) = tile.tiles[0], tile.tiles[-1]
    samples = rows * columns * tile.channels[0] + 2 * last_rows * last_columns * tile.channels[-1]
    directions: tuple[Direction, Direction] = ("forward", "backward")
    least = sum(tile.boundary(way, tile.best(way, Costs(0.0, 1.0)).starts) for way in directions)
    one_group, every = (sum(tile.boundary(way, starts) for way in directions) for starts in ((0,), range(len(layers))))
    specs = [network.weights[name] for name in network.weights_of(0, layers[-1].operators[1])]
    weights = 2 * sum(spec.elements for spec in specs if spec.trainable)
    return [
        Components(size, samples * size, least * size, one_group * size, every * size, weights) for size in batch_sizes
    ]


@dataclass(frozen=True)
class TileCosts:
    """The costs of one sample for an interior tile in one direction, by grouping (Fig. 5.2 a and b)."""

    one_group: float
    every_layer: float
    best: float
    groups: int
    """The number of groups of the best."""


def tile_costs(network: Network, grid: Size, costs: Costs) -> dict[Direction, TileCosts]:
    """Return the costs of an interior tile: multiply-accumulates where only computing has a price, boundary elements
    where only communication has."""
    tile = InteriorTile(kernel_layers(network), grid)
    directions: tuple[Direction, Direction] = ("forward", "backward")
    compared = {way: tile.compare(way, costs) for way in directions}
    return {
        way: TileCosts(each.one_group, each.every_layer, each.best.cost, len(each.best.starts))
        for way, each in compared.items()
    }
