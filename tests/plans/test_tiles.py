"""Grids as a user writes them: rows and columns, or a depth besides."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.facts.errors import BadPlan, BadValue
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles
from manyhands.plans.tiles import check_tiles, parse_grid, tile_options


@cache
def volumes() -> Network:
    module = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 2, 3, padding=1))
    return mh.capture(module, torch.zeros(2, 1, 9, 8, 6)).network


@cache
def pictures() -> Network:
    return mh.capture(nn.Conv2d(1, 2, 3, padding=1), torch.zeros(2, 1, 8, 6)).network


def test_grids_have_two_or_three_numbers() -> None:
    assert parse_grid("3x2") == (3, 2)
    assert parse_grid(" 2X3x1 ") == (2, 3, 1)
    for text in ("3", "2x", "0x3", "2x2x0", "1x2x3x4", "axb"):
        with pytest.raises(BadValue, match="is not a grid of tiles"):
            parse_grid(text)


def test_sizes_alone_determine_the_grid() -> None:
    assert tile_options(None, None, None).grid is None
    assert tile_options(None, "2,1", None).grid == (2, 1)
    deep = tile_options(None, None, "1,1", "3,1")
    assert (deep.grid, deep.sizes) == ((2, 1, 2), ((3, 1), None, (1, 1)))
    assert tile_options("2x1x1", None, None, "3,1").depths == (3, 1)
    with pytest.raises(BadPlan, match="--depths has 2 numbers; the grid has 1 depths"):
        tile_options("2x1", None, None, "3,1")


def test_every_tile_has_some_of_the_depth() -> None:
    check_tiles(volumes(), tile_options("9x1x1", None, None))
    with pytest.raises(BadPlan, match="10 depths of tiles cannot be cut out of the 9 depths of"):
        check_tiles(volumes(), tile_options("10x1x1", None, None))
    with pytest.raises(BadPlan, match="7 columns of tiles cannot be cut out of the 6 columns of"):
        check_tiles(volumes(), tile_options("1x7", None, None))


def test_a_plan_that_cuts_the_depth() -> None:
    plan = mh.tile_plan(volumes(), mh.Cluster.local(4), (2, 1, 2), depths=(2, 1))
    share = plan.stages[0].share
    assert isinstance(share, ByTiles)
    assert (share.grid, share.depths) == ((2, 1, 2), (2, 1))
    assert mh.simulate(plan, volumes(), mh.Cluster.local(4)).seconds > 0
    with pytest.raises(BadPlan, match="cuts the depth of maps; those of Conv2d have rows and columns only"):
        mh.tile_plan(pictures(), mh.Cluster.local(2), (2, 1, 1))
    with pytest.raises(BadValue, match="it must be two whole numbers"):
        mh.tile_plan(pictures(), mh.Cluster.local(2), (2,))
