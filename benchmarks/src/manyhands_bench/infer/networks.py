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
"""The number of times a network is measured, and the factor by which later times are shorter than the first, in which
kernels are chosen."""


@dataclass(frozen=True)
class DecnnNetwork:
    """A network of the paper's section 4, and the factor by which it is wider once decoupled."""

    model: str
    widen: float
    shape: tuple[int, ...] = SHAPE
    paper_seconds: float = 0.0
    """Seconds of the original network on one Raspberry Pi 4B (section 4.3)."""

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
    """A network and its measured profile: forward passes of one sample on one thread."""

    network: Network
    profile: DeviceProfile

    @property
    def seconds(self) -> float:
        """The seconds of one sample."""
        return sum(layer.ladder[0].forward_seconds for layer in self.profile.layers)

    def scaled(self, factor: float) -> ProfiledNetwork:
        """Return the same network on a machine that is `factor` times slower."""
        layers = tuple(
            LayerTiming(layer.layer, tuple(_slower(timing, factor) for timing in layer.ladder))
            for layer in self.profile.layers
        )
        return ProfiledNetwork(self.network, msgspec.structs.replace(self.profile, layers=layers))

    def on(self, cluster: Cluster) -> Profile:
        """Return a profile in which every device of a cluster is as fast as this one."""
        return Profile({name: msgspec.structs.replace(self.profile, device=name) for name in cluster.names})


def _slower(timing: Timing, factor: float) -> Timing:
    return Timing(timing.samples, factor * timing.forward_seconds, factor * timing.backward_seconds)


def network_graph(subject: DecnnNetwork, *, decoupled: bool) -> Graph:
    """Return the captured network with batch norms folded and weights drawn at random: measurements do not depend on
    them."""
    with torch.device("meta"):
        module: nn.Module = build(subject.model)
    if decoupled:
        module = decouple(module, GROUPS, SHUFFLES, subject.widen, inputs=subject.shape)
    return _drawn_graph(module, subject, f"{subject.model}_decoupled" if decoupled else subject.model)


def half_graph(subject: DecnnNetwork) -> Graph:
    """Return half of the decoupled network's groups as a network of its own, which has nothing to exchange."""
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
    """Measure networks with one thread on one core, each with the kernels that are fastest for one sample: chosen once,
    in about `seconds` seconds. Then all take turns, so that a drift of the machine's speed affects them alike.

    The thread's computing time counts, not the time that passes: networks are compared, and whatever else goes on while
    one of them is measured must not favour the other."""
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
    """Return the profile with each layer's least median: other processes and a reduced clock only add to it."""
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        seconds = min(layer.ladder[0].forward_seconds for layer in same)
        timing = msgspec.structs.replace(same[0].ladder[0], forward_seconds=seconds)
        layers.append(LayerTiming(same[0].layer, (timing,)))
    return msgspec.structs.replace(profiles[0], layers=tuple(layers))


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Confine this process to one core within the context."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Library:
    """The networks, each captured and measured once, when it is first requested."""

    def __init__(self, seconds: float, say: Progress) -> None:
        self.seconds, self.say = seconds, say
        self._known: dict[tuple[DecnnNetwork, bool], ProfiledNetwork] = {}
        self._graphs: dict[tuple[DecnnNetwork, bool], Graph] = {}

    def graph(self, subject: DecnnNetwork, *, decoupled: bool) -> Graph:
        """Return the captured network, which is kept: several parts of the bench run it."""
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
        """Drop the captured networks, whose weights take memory."""
        self._graphs.clear()
