"""A fixed list of timm's networks, spread over its families of architectures, with random weights.

The list was drawn by `draw_timm_names` from timm 1.0.31: the families (timm's modules) in turn, networks of each in an
order drawn with seed 0, those with more than 40 million weights left out. It is kept here, so that another version of
timm is measured on the same networks; names that an installed version lacks are left out and counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch
from torch import nn

from manyhands_bench.networks.subject import Subject, first_that_runs, images

SIDE = 128
"""The side of images for networks that take any."""
MOST_WEIGHTS = 40_000_000
COUNT = 110
TIMM_NAMES: tuple[str, ...] = ()


def timm_names() -> list[str]:
    """Return the names of the list that the installed version has."""
    import timm

    return [name for name in TIMM_NAMES if timm.is_model(name)]


def timm_subject(name: str) -> Subject:
    """Return a network of timm with batches of the smallest size that it takes: its own, if that is fixed."""
    import timm

    module: nn.Module = timm.create_model(name, pretrained=False)
    config = module.pretrained_cfg  # a dict
    channels, height, width = config["input_size"]
    sizes = [(channels, height, width)]
    if not config.get("fixed_input_size"):
        least = config.get("min_input_size") or (channels, SIDE, SIDE)
        sizes = [tuple(max(a, b) for a, b in zip(least, (channels, SIDE, SIDE))), *sizes]
    return Subject(module, first_that_runs(module, [images(*size) for size in sizes]))


def draw_timm_names(count: int = COUNT, seed: int = 0) -> list[str]:
    """Return a list of networks spread over the families of the installed version of timm, sorted. It takes a minute:
    every network that is considered is built without memory to count its weights."""
    import timm

    def is_small(name: str) -> bool:
        with torch.device("meta"):
            module = timm.create_model(name, pretrained=False)
        return sum(weight.numel() for weight in module.parameters()) <= MOST_WEIGHTS

    families = {family: timm.list_models(module=family) for family in timm.list_modules()}
    return spread(families.values(), is_small, count, seed)


def spread(families: Iterable[list[str]], fits: Callable[[str], bool], count: int, seed: int) -> list[str]:
    """Return `count` of the names that fit, or all of them, sorted: in each round one of every family, in a drawn
    order."""
    generator = random.Random(seed)
    orders = [generator.sample(sorted(family), len(family)) for family in families]
    chosen: set[str] = set()
    while len(chosen) < count and any(orders):
        for order in orders:
            while order:
                name = order.pop()
                if name not in chosen and fits(name):
                    chosen.add(name)
                    break
            if len(chosen) == count:
                break
    return sorted(chosen)
