"""The networks of `manyhands bench infer`: captured as they are and decoupled, and measured on one core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from manyhands.decoupling.decouple import decouple
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing
from manyhands.graph.folding import at_rest
from manyhands.graph.graph import Graph
from manyhands.inference.infer import captured_at_rest
from manyhands.models.registry import build
from manyhands.profiler.measure import measure_network
from manyhands_bench.figures import Progress

GROUPS = 4
SHUFFLES = 3
SHAPE = (3, 224, 224)
TURNS, LATER_TURNS = 5, 5
"""How often a network is measured, and how much shorter than the first time, in which kernels are chosen."""


@dataclass(frozen=True)
class DecnnNetwork:
    """A network of the paper's section 4, and how much wider it is once decoupled."""

    model: str
    widen: float
    shape: tuple[int, ...] = SHAPE
    paper_seconds: float = 0.0
    """One Raspberry Pi 4B, the original network (section 4.3)."""

    def __str__(self) -> str:
        return f"{self.model} {'x'.join(map(str, self.shape))}"

    @property
    def decoupled_text(self) -> str:
        return f"{GROUPS} groups, x{self.widen:g}, {SHUFFLES} shuffles"


VGG16 = DecnnNetwork("vgg16", 1.75, paper_seconds=4.8)
RESNET34 = DecnnNetwork("resnet34", 1.75, paper_seconds=1.25)
RESNET50 = DecnnNetwork("resnet50", 1.5, paper_seconds=1.44)
SUBJECTS = (VGG16, RESNET34, RESNET50)


@dataclass(frozen=True)
class ProfiledNetwork:
    """A network that was measured: forward passes of one sample, one thread."""

    network: Network
    profile: DeviceProfile

    @property
    def seconds(self) -> float:
        """Return the seconds of one sample."""
        return sum(layer.ladder[0].forward_seconds for layer in self.profile.layers)

    def scaled(self, factor: float) -> ProfiledNetwork:
        """The same on a machine that many times slower."""
        layers = tuple(
            LayerTiming(layer.layer, tuple(_slower(timing, factor) for timing in layer.ladder))
            for layer in self.profile.layers
        )
        return ProfiledNetwork(self.network, msgspec.structs.replace(self.profile, layers=layers))

    def on(self, cluster: Cluster) -> Profile:
        """Every device of a cluster as fast as this one."""
        return Profile({name: msgspec.structs.replace(self.profile, device=name) for name in cluster.names})


def _slower(timing: Timing, factor: float) -> Timing:
    return Timing(timing.samples, factor * timing.forward_seconds, factor * timing.backward_seconds)


def network_graph(subject: DecnnNetwork, *, decoupled: bool) -> Graph:
    """Captured, batch norms folded, with weights that were drawn: what is measured does not depend on them."""
    with torch.device("meta"):
        module: nn.Module = build(subject.model)
    if decoupled:
        module = decouple(module, GROUPS, SHUFFLES, subject.widen, inputs=subject.shape)
    return _drawn_graph(module, subject, f"{subject.model}_decoupled" if decoupled else subject.model)


def half_graph(subject: DecnnNetwork) -> Graph:
    """Half of the decoupled network's groups as a network of its own, which has nothing to exchange."""
    with torch.device("meta"):
        module = decouple(build(subject.model), GROUPS // 2, 0, subject.widen / 2, inputs=subject.shape)
    return _drawn_graph(module, subject, f"{subject.model}_half")


def _drawn_graph(module: nn.Module, subject: DecnnNetwork, name: str) -> Graph:
    module = module.to_empty(device="cpu").eval()
    _draw(module)
    return at_rest(captured_at_rest(module, torch.zeros(subject.shape), granularity="blocks", name=name))


@torch.no_grad()
def _draw(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            inputs = parameter[0].numel()
            parameter.normal_(0.0, (2.0 / inputs) ** 0.5, generator=generator)
        else:
            parameter.fill_(0.5)
    for name, buffer in module.named_buffers():
        buffer.fill_(1.0 if name.endswith("var") else 0.0)


def measured(graphs: Mapping[bool, Graph], seconds: float, say: Progress) -> dict[bool, ProfiledNetwork]:
    """One thread on one core, each network with the kernels that are fastest for one sample: chosen once, in about so
    many seconds. Then all in turns, so that a machine whose speed drifts does so for all.

    What the thread computes counts, not what passes: networks are compared, and whatever else goes on while one of them
    is measured must not favour the other."""
    profiles: dict[bool, list[DeviceProfile]] = {key: [] for key in graphs}
    with one_core():
        for number in range(TURNS):
            for key, graph in graphs.items():
                say(f"measuring {graph.name}, {number + 1} of {TURNS}")
                repeats = profiles[key]
                repeats.append(
                    measure_network(
                        graph, ladder=(1,), threads=1, seconds=seconds / LATER_TURNS if repeats else seconds,
                        kernels=repeats[0].kernels if repeats else None, training=False, alone=True,
                    )
                )  # fmt: skip
    return {key: ProfiledNetwork(graphs[key].network, _fastest(repeats)) for key, repeats in profiles.items()}


def _fastest(profiles: Sequence[DeviceProfile]) -> DeviceProfile:
    """Return the least median of each layer: other processes and a reduced clock only add to it."""
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        seconds = min(layer.ladder[0].forward_seconds for layer in same)
        timing = msgspec.structs.replace(same[0].ladder[0], forward_seconds=seconds)
        layers.append(LayerTiming(same[0].layer, (timing,)))
    return msgspec.structs.replace(profiles[0], layers=tuple(layers))


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This process on one core only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Library:
    """Networks as they are asked for: each is captured and measured once. Large ones are not kept."""

    def __init__(self, seconds: float, say: Progress) -> None:
        self.seconds, self.say = seconds, say
        self._known: dict[tuple[DecnnNetwork, bool], ProfiledNetwork] = {}
        self._graphs: dict[tuple[DecnnNetwork, bool], Graph] = {}

    def graph(self, subject: DecnnNetwork, *, decoupled: bool) -> Graph:
        """Kept: what is run is run by several parts of the bench."""
        key = (subject, decoupled)
        if key not in self._graphs:
            self.say(f"capturing {subject.model}{' decoupled' if decoupled else ''}")
            self._graphs[key] = network_graph(subject, decoupled=decoupled)
        return self._graphs[key]

    def profiled(self, subject: DecnnNetwork, *, decoupled: bool) -> ProfiledNetwork:
        if (subject, decoupled) not in self._known:
            graphs = {
                is_decoupled: self._graphs.get((subject, is_decoupled))
                or network_graph(subject, decoupled=is_decoupled)
                for is_decoupled in (False, True)
            }
            for is_decoupled, profiled in measured(graphs, self.seconds, self.say).items():
                self._known[subject, is_decoupled] = profiled
        return self._known[subject, decoupled]

    def forget(self) -> None:
        """Weights take memory."""
        self._graphs.clear()
