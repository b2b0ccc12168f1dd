"""Drawn scenarios of `manyhands bench auto`: a network, unequal devices, their links and a batch size; always the same.

Every property is dealt from a deck of its own (each card as often as any other, shuffled), so that a few dozen
scenarios cover all of them, and which goes with which is chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from manyhands.facts.catalogue import CATALOGUE
from manyhands.facts.cluster import Cluster

SEED = 10
COUNT = 60
SUBJECTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("resnet18", (3, 224, 224)), ("resnet50", (3, 224, 224)), ("vgg16", (3, 224, 224)), ("mobilenetv2", (3, 224, 224)),
    ("unet", (3, 256, 256)), ("unet", (3, 512, 512)), ("yolov2", (3, 416, 416)), ("yolov2-16", (3, 608, 608)),
    ("resnet18", (3, 512, 512)), ("resnet50", (3, 448, 448)),
)  # fmt: skip
"""Classification at the usual size and larger, segmentation, detection."""
FAMILIES = (
    ("pi3", "pi4", "pi5"),
    ("pi4", "pi5", "laptop"),
    ("jetson-nano", "jetson-tx2", "jetson-nx"),
    ("pi5", "laptop", "jetson-nano"),
    ("pi3", "pi4", "pi5", "jetson-nano", "jetson-tx2", "jetson-nx", "laptop"),
)
"""Kinds of devices that are found together: in one cupboard, at home, in a laboratory; or any."""
DEVICES = (2, 3, 4, 5, 6, 7, 8)
MEMORIES = (1.0, 1.0, 0.5, 0.25)
"""Parts of the devices' memory that are free: other programs run on them too."""
RATES_MBIT = (10, 30, 100, 300, 1000)
DELAYS = ("0.3 ms", "2 ms")
BATCHES = (1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 64, 128, 256)
"""Batch sizes, small ones twice as often: devices with little memory train with few samples."""
LINKS = ("alike", "alike", "islands", "weak")
"""All pairs alike; two islands of fast links with a slow one between them; one device behind a slow link."""
MOST_KINDS = 3
SLOWER = 0.2
"""Rate of a link between islands, or to the weak device, over that of the others; never below the slowest rate."""

T = TypeVar("T")


@dataclass(frozen=True)
class PlanningScenario:
    """One drawn planning problem."""

    number: int
    model: str
    shape: tuple[int, ...]
    cluster: Cluster
    rate_mbit: int
    memory: float
    links: str
    batch_size: int

    def __str__(self) -> str:
        counts = {device.kind: 0 for device in self.cluster.devices}
        for device in self.cluster.devices:
            counts[device.kind] += 1
        devices = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        memory = "" if self.memory == 1 else f" with {self.memory:.0%} of their memory"
        links = {"alike": "", "islands": " in two islands", "weak": ", one device behind a weak link"}[self.links]
        shape = "x".join(map(str, self.shape))
        return f"{self.model} {shape} batch {self.batch_size} on {devices}{memory}, {self.rate_mbit} Mbit/s{links}"


def drawn_scenarios(count: int = COUNT, seed: int = SEED) -> list[PlanningScenario]:
    draw = random.Random(seed)
    subjects, sizes = _dealt(draw, SUBJECTS, count), _dealt(draw, DEVICES, count)
    rates, batches = _dealt(draw, RATES_MBIT, count), _dealt(draw, BATCHES, count)
    memories, links = _dealt(draw, MEMORIES, count), _dealt(draw, LINKS, count)
    delays, families = _dealt(draw, DELAYS, count), _dealt(draw, FAMILIES, count)
    scenarios = []
    for number in range(count):
        kinds = _kinds(draw, families[number], sizes[number])
        cluster = _cluster(f"drawn-{number}", kinds, memories[number], rates[number], delays[number], links[number])
        model, shape = subjects[number]
        scenarios.append(
            PlanningScenario(
                number, model, shape, cluster, rates[number], memories[number], links[number], batches[number]
            )
        )
    return scenarios


def _dealt(draw: random.Random, cards: Sequence[T], count: int) -> list[T]:
    deck = [cards[place % len(cards)] for place in range(count)]
    draw.shuffle(deck)
    return deck


def _kinds(draw: random.Random, family: Sequence[str], count: int) -> list[str]:
    """Return devices of two or three kinds, each kind at least once: what people own is unequal, but not all
    different."""
    chosen = draw.sample(family, min(count, draw.randint(2, MOST_KINDS)))
    return chosen + [draw.choice(chosen) for _ in range(count - len(chosen))]


def _cluster(name: str, kinds: Sequence[str], memory: float, rate_mbit: int, delay: str, links: str) -> Cluster:
    rate, slower = f"{rate_mbit} Mbit/s", f"{max(RATES_MBIT[0], rate_mbit * SLOWER):g} Mbit/s"
    devices = [
        {"name": f"{kind.removeprefix('jetson-')}-{place}", "kind": kind, "port": rate,
         "memory": f"{memory * CATALOGUE[kind].free_bytes:.0f} B"}
        for place, kind in enumerate(kinds, 1)
    ]  # fmt: skip
    names = [str(device["name"]) for device in devices]
    slow = {"alike": [], "islands": _across(names), "weak": [(names[-1], other) for other in names[:-1]]}[links]
    slow_links = [{"between": list(pair), "rate": slower, "delay": delay} for pair in slow]
    return Cluster.from_dict(
        {"name": name, "devices": devices, "link": {"rate": rate, "delay": delay}, "links": slow_links}
    )


def _across(names: Sequence[str]) -> list[tuple[str, str]]:
    half = (len(names) + 1) // 2
    return [(a, b) for a in names[:half] for b in names[half:]]
