"""CPU and GPU workers in one run, against one CPU: skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.facts.plan import BySamples, ByTiles, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.tiles import TileGeometry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.b = nn.BatchNorm2d(8)
        self.c = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.d = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.e = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.b(self.a(x)))
        x = torch.relu(self.d(self.c(x)))
        out: torch.Tensor = self.e(self.drop(x.mean((2, 3))))
        return out


def trained(cluster: mh.Cluster, plan: str | mh.Plan, folder: Path) -> tuple[dict[str, torch.Tensor], mh.TrainResult]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(60, 3, 12, 12, generator=generator, dtype=torch.float64), torch.arange(60) % 4)
    torch.manual_seed(0)
    model = Network().double()
    result = mh.train(
        model, data, loss=F.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.05, momentum=0.9), batch_size=12,
        steps=20, cluster=cluster, plan=plan, folder=folder,
    )  # fmt: skip
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, result


def beside_sums(plan: mh.Plan, graph: mh.Graph) -> mh.Plan:
    """The same tiles, whose boundary data travels beside the sums of batch norms."""
    plan = resolve(plan, graph.network)
    geometry = TileGeometry(plan, 0, graph.network)
    starts = geometry.start_names(geometry.beside_sums(through_windows=True))
    assert len(starts) > 1
    (stage,) = plan.stages
    share = msgspec.structs.replace(stage.share, forward_groups=starts)
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, share=share),))


@pytest.mark.parametrize("by", ["samples", "stages", "tiles", "tiles by groups", "tiles beside sums"])
def test_a_gpu_among_cpus_is_exact(tmp_path: Path, by: str) -> None:
    alone, _ = trained(mh.Cluster.local(1), "single", tmp_path / "alone")
    cluster = mh.Cluster.local(3, gpus=1)
    names = cluster.names
    whole = mh.capture(Network().double(), torch.randn(4, 3, 12, 12, dtype=torch.float64))
    layers = len(whole.layers)
    stages: tuple[Stage, ...] = (Stage((0, layers), names, BySamples((7, 2, 3))),)
    if by == "stages":
        stages = (Stage((0, 2), names[1:], BySamples((2, 4))), Stage((2, layers), names[:1]))
    if by.startswith("tiles"):
        share = ByTiles((3, 1, 2), backward_groups=(0,) if by == "tiles by groups" else None)
        stages = (Stage((0, layers), names, share),)
    plan = mh.Plan("Network", 12, stages, micro_batches=2 if by == "stages" else 1)
    if by == "tiles beside sums":
        plan = beside_sums(plan, whole)
    if by == "stages":
        alone, _ = trained(mh.Cluster.local(1), mh.Plan("Network", 12, (Stage((0, layers), ("local-1",)),), 2),
                           tmp_path / "micro")  # fmt: skip
    together, result = trained(cluster, plan, tmp_path / "together")
    for name, tensor in alone.items():
        scale = float(tensor.abs().max()) or 1.0
        assert float((together[name] - tensor).abs().max()) <= 1e-10 * scale, name
    for (source, target), size in result.planned_bytes.items():
        assert result.logs[source].sent_bytes[target] == 20 * size
    assert all(log.rounds == 20 and log.operators for log in result.logs.values())


@pytest.mark.parametrize("by", ["samples", "stages", "tiles"])
def test_two_workers_on_one_gpu_exchange_there(tmp_path: Path, by: str) -> None:
    """Exactly, and without a byte of a tensor in the machine's memory; with a third worker on a processor, only what
    that one gets goes through it."""
    layers = len(mh.capture(Network().double(), torch.randn(4, 3, 12, 12, dtype=torch.float64)).layers)
    micro_batches = 2 if by == "stages" else 1
    whole = mh.Plan("Network", 12, (Stage((0, layers), ("local-1",)),), micro_batches)
    alone, _ = trained(mh.Cluster.local(1), whole, tmp_path / "alone")
    for count in (2, 3):
        cluster = mh.Cluster.local(count, gpus=[0, 0])
        names = cluster.names
        share = BySamples((6, 6) if count == 2 else (4, 5, 3)) if by == "samples" else ByTiles((1,) * count, (1,))
        stages: tuple[Stage, ...] = (Stage((0, layers), names, share),)
        if by == "stages":
            stages = (Stage((0, 2), names[:1]), Stage((2, layers), names[1:2]))
            if count == 3:
                stages = (Stage((0, 1), names[:1]), Stage((1, 2), names[1:2]), Stage((2, layers), names[2:]))
        plan = mh.Plan("Network", 12, stages, micro_batches)
        together, result = trained(cluster, plan, tmp_path / f"together-{count}")
        for name, tensor in alone.items():
            scale = float(tensor.abs().max()) or 1.0
            assert float((together[name] - tensor).abs().max()) <= 1e-10 * scale, name
        assert sum(log.host_bytes for log in result.logs.values()) == 0 or count == 3
        assert result.logs[names[0]].sent_bytes[names[1]] > 0
    assert result.logs[names[1]].host_bytes > 0
