"""Data that stays where it is: several edges and a server that have parts of the same samples, over real processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset

import manyhands as mh
from manyhands.data.silo import write_silo
from manyhands.executor.feeder import Feeder
from manyhands.executor.messages import ROW_BYTES
from manyhands.facts.errors import BadData, BadPlan, BadValue, ManyhandsError, UnknownName
from manyhands.facts.plan import Codec, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.regrouping import regrouped
from manyhands.job.base import Job
from manyhands.runtime.control_parts import TensorEntry
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.processes import WorkerProcess
from manyhands.schedule.policy import Schedule
from manyhands.session import measuring
from manyhands.split.job import SplitResult
from manyhands.split.session import two
from manyhands.split.silo_job import silo_stages
from manyhands.split.silos import _check_entry, joined
from manyhands.split.training import split_train
from real_runs import BATCH, SGD, assert_close

STEPS = 8
SAMPLES = 4 * BATCH
CLASSES = 3
SILOS = {"edge-a": ("left",), "edge-b": ("right",), "server": ("target",)}


class Halves(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Samples of which two have a half each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.left = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
        self.right = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
        self.classes = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"left": self.left[index], "right": self.right[index]}, self.classes[index]


class Both(nn.Module):
    """A branch for each, in turns, dropout and batch norm among them, and a head that joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.right = nn.ModuleList([nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)])
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        right = self.right[1](self.right[0](right)).relu()
        left = self.left(left)
        right = self.right[2](right).relu()
        out: Tensor = self.head(torch.cat((left, right), 1))
        return out


def network() -> Both:
    torch.manual_seed(3)
    return Both().double()


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "write_pictures", lambda *_: None)
        patch.setattr(measuring, "MEASURE_SECONDS", 0.1)
        yield


def write_silos(folder: Path, rows: dict[str, Any] | None = None) -> dict[str, Path]:
    """Files of three devices; `rows`: the samples that each has, in its own order."""
    data = Halves()
    everything = {"left": data.left, "right": data.right, "target": data.classes}
    found = {}
    for device, names in SILOS.items():
        own = numpy.asarray((rows or {}).get(device, range(SAMPLES)))
        found[device] = folder / f"{device}.npz"
        arrays = {name: everything[name].numpy()[own] for name in names}
        write_silo(found[device], [f"user-{one}" for one in own], arrays)
    return found


EDGES_HAVE = {"edge-a": list(range(SAMPLES))[::-1], "edge-b": list(range(5, SAMPLES)), "server": list(range(SAMPLES))}
"""The first five are not with edge-b; edge-a has its samples the other way round."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, quick: None) -> Iterator[Coordinator]:
    """Workers with silos of their own."""
    files = write_silos(tmp_path_factory.mktemp("silos"), EDGES_HAVE)
    with Coordinator(logs=tmp_path_factory.mktemp("logs")) as coordinator:
        coordinator.start_workers([WorkerProcess((name,), silo=str(path)) for name, path in files.items()], 1, 60)
        yield coordinator


def train(cloud: Any, folder: Path, **options: Any) -> tuple[SplitResult, nn.Module]:
    model = options.pop("model", None) or network()
    given = {
        "loss": functional.cross_entropy, "optimizer": SGD, "batch_size": BATCH, "seed": 5, "steps": STEPS, "bits": 32,
        "k": 0, "data": None, **options,
    }  # fmt: skip
    return split_train(model, given.pop("data"), cloud=cloud, folder=folder, **given), model


@pytest.fixture(scope="module")
def whole(three: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return alone(Halves(), three, tmp_path_factory.mktemp("alone") / "run")


def alone(data: Dataset[Any], three: Coordinator, folder: Path) -> dict[str, Tensor]:
    """The joined samples by one device."""
    model = network()
    mh.train(
        model, data, loss=functional.cross_entropy, optimizer=SGD, batch_size=BATCH, seed=5, steps=STEPS,
        cluster=three, plan="single", folder=folder, backup_every=0,
    )  # fmt: skip
    return model.state_dict()


@pytest.mark.slow
def test_joined_by_id_it_is_exactly_one_device(three: Coordinator, tmp_path: Path) -> None:
    """What one silo lacks is left out; the order is the first device's; only row numbers leave the coordinator."""
    before = dict(three.endpoint.sent_bytes)
    result, model = train(three, tmp_path / "run")
    common = Subset(Halves(), [one for one in EDGES_HAVE["edge-a"] if one in EDGES_HAVE["edge-b"]])
    sent = {name: three.endpoint.sent_bytes[name] - before.get(name, 0) for name in three.members}
    state = dict.fromkeys(three.members, 0)
    for name, tensor in network().state_dict().items():
        owner = {"left": "edge-a", "right": "edge-b", "head": "server"}[name.partition(".")[0]]
        state[owner] += tensor.numel() * tensor.element_size()
    assert {name: sent[name] - state[name] for name in sent} == dict.fromkeys(sent, STEPS * BATCH * ROW_BYTES)
    assert_close(model.state_dict(), alone(common, three, tmp_path / "alone"))
    assert [stage.devices for stage in result.plan.stages] == [("edge-a",), ("edge-b",), ("server",)]
    assert result.staleness == [0] * STEPS
    feature = BATCH * 8 * 8
    assert result.bytes_between == {
        (one, other): STEPS * feature
        for edge in ("edge-a", "edge-b")
        for one, other in ((edge, "server"), ("server", edge))
    }
    assert result.bytes_up == result.bytes_down == 2 * STEPS * feature


@pytest.mark.slow
def test_edges_run_ahead_by_k_at_most_and_pack(three: Coordinator, tmp_path: Path) -> None:
    result, _ = train(three, tmp_path / "run", k="3@0,1@1", bits=8, steps=7, mode="window")
    per_epoch = (SAMPLES - 5) // BATCH
    assert max(result.staleness) > 0
    assert max(result.staleness[:per_epoch]) <= 3
    assert max(result.staleness[per_epoch:]) <= 1
    assert len(result.losses) == 7
    assert result.bytes_up == 2 * 7 * (BATCH * 8 + 16)
    rival, _ = train(three, tmp_path / "rival", k=5, bits="auto", rival="cross-silo", steps=4)
    assert rival.staleness == [0] * 4
    assert rival.bytes_up == 2 * 4 * BATCH * 8 * 8


@pytest.mark.slow
def test_a_data_set_is_divided_into_files(whole: dict[str, Tensor], tmp_path: Path) -> None:
    """Local processes: each gets its own part; what is held out is evaluated as usual."""
    test = Subset(Halves(), range(10))
    result, model = train(None, tmp_path / "run", silos=SILOS, data=Halves(), test=test)
    assert_close(model.state_dict(), whole)
    data = Halves()
    with torch.no_grad():
        right = model.eval()(data.left[:10], data.right[:10]).argmax(1) == data.classes[:10]
    assert result.accuracy == pytest.approx(float(right.double().mean()))


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_samples(three: Coordinator, tmp_path: Path) -> None:
    train(three, tmp_path / "run", steps=3)
    _, model = train(three, tmp_path / "run", resume=True)
    _, once = train(three, tmp_path / "once")
    assert_close(model.state_dict(), once.state_dict())
    config = tmp_path / "run" / "config.yaml"
    config.write_text(re.sub(r"ids: \S+", "ids: others", config.read_text()))
    with pytest.raises(BadValue, match="other samples"):
        train(three, tmp_path / "run", resume=True, steps=STEPS + 1)


@pytest.mark.parametrize("entry", [("left", "float32", (2**40,)), ("left", "object", (3,)), ("left", "int8", (-1, 4))])
def test_what_a_worker_says_of_its_samples_is_looked_at(entry: tuple[str, str, tuple[int, ...]]) -> None:
    with pytest.raises(BadData, match="edge-a says that one sample of its left"):
        _check_entry("edge-a", TensorEntry(*entry))


@pytest.mark.slow
def test_labels_at_the_cloud_do_not_travel(three: Coordinator, whole: dict[str, Tensor], tmp_path: Path) -> None:
    """One edge: its inputs are fed as always, of the target only numbers; everything else is decided as usual."""

    class Pairs(Halves):
        ids = tuple(f"user-{one}" for one in range(SAMPLES))

        def __getitem__(self, index: int) -> Any:
            return (self.left[index], self.right[index]), self.classes[index]

    result, model = train(
        two(three, "edge-a", "server"), tmp_path / "run", labels="cloud", silos={"server": ("target",)}, data=Pairs(),
        cut="cat", granularity="operators",
    )  # fmt: skip
    assert_close(model.state_dict(), whole)
    assert result.plan.devices == ("edge-a", "server")
    assert result.logs["server"].received_bytes["coordinator"] == STEPS * BATCH * ROW_BYTES, "nothing but numbers"
    with pytest.raises(BadValue, match="labels are at the cloud"):
        train(two(three, "edge-a", "server"), tmp_path / "edge", labels="cloud", cut="edge", data=Pairs())


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"rival": "jointdnn"}, UnknownName, "rival"),
        ({"cut": 2}, BadValue, "features meet"),
        ({"silos": {"edge-a": ("left", "right")}}, BadValue, "edge-a has no right"),
        ({"model": nn.Sequential(nn.Linear(6, 3))}, BadValue, "A silo has left, right; Sequential takes input"),
    ],
)
def test_what_cannot_be_is_said(
    three: Coordinator, tmp_path: Path, wrong: dict[str, Any], error: type[ManyhandsError], words: str
) -> None:
    with pytest.raises(error, match=words):
        train(three, tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()
    assert three.silos == {}


@pytest.mark.parametrize(
    ("silos", "words"),
    [
        ({"edge-a": ("top",), "server": ("target",)}, "must name some of left, right, target"),
        ({"edge-a": ("left",)}, "a server, and one edge"),
        ({"edge-a": (), "server": ("target",)}, "must name"),
    ],
)
def test_who_is_to_have_what_is_checked_first(silos: Any, words: str) -> None:
    with pytest.raises(BadValue, match=words), joined(network(), Halves(), silos):
        pass
    with pytest.raises(BadValue, match="no data to divide"), joined(network(), None, SILOS):
        pass


class Mixed(nn.Module):
    """The head reads one edge's data itself, or one edge what another made."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.left, self.right, self.way = nn.Linear(6, 8), nn.Linear(4, 8), way
        self.head = nn.Linear(16, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one = self.left(left)
        other = self.right(right) if not self.way else right
        if self.way == "raw":
            other = torch.cat((right.relu(), right), 1)
        if self.way == "meeting":
            other = self.right(right + one[:, :4])
        out: Tensor = self.head(torch.cat((one.relu(), other), 1))
        return out


@pytest.mark.slow
def test_where_edges_meet() -> None:
    example = {"left": torch.zeros(4, 6), "right": torch.zeros(4, 4)}
    graph = capture(Both(), example, granularity="operators")
    found = regrouped(graph, [("left",), ("right",)]).network
    stages = silo_stages(found, SILOS, "server", Codec(8))
    as_written = silo_stages(graph.network, SILOS, "server", Codec())
    assert as_written[-1].layers[0] < stages[-1].layers[0], "the rest of a branch would be the server's"
    names = [layer.name for layer in found.layers]
    assert [stage.devices[0] for stage in stages] == ["edge-a", "edge-b", "server"]
    assert names[stages[-1].layers[0]] == "cat"
    assert stages[-1].codec == Codec(8)
    for way, words in (("raw", "edge-b would send its data itself"), ("meeting", "gives edge-b no layers")):
        odd = capture(Mixed(way), example, granularity="operators").network
        with pytest.raises(BadValue, match=words):
            silo_stages(odd, SILOS, "server", Codec())


class Shared(nn.Module):
    """Two edges have an input in common, and each makes its own of it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(16, CLASSES)

    def forward(self, left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
        masks = mask.to(left.dtype), mask.to(right.dtype)
        one = self.left(masks[0] * left).relu()
        other = self.right(masks[1] * right).relu()
        out: Tensor = self.head(torch.cat((one, other), 1))
        return out


@pytest.mark.slow
def test_what_edges_have_in_common_goes_with_each() -> None:
    example = {"left": torch.zeros(4, 6), "right": torch.zeros(4, 6), "mask": torch.zeros(4, 6, dtype=torch.int64)}
    graph = capture(Shared(), example, granularity="operators")
    found = regrouped(graph, [("left", "mask"), ("right", "mask")]).network
    holders = {"edge-a": ("left", "mask"), "edge-b": ("right", "mask"), "server": ("target",)}
    first, second, last = silo_stages(found, holders, "server", Codec())
    firsts = [found.ops[found.layers[stage.layers[0]].first] for stage in (first, second)]
    assert [op.inputs for op in firsts] == [("mask",), ("mask",)]
    assert last.devices == ("server",)


@pytest.mark.slow
def test_the_coordinator_has_numbers_in_place_of_data(three: Coordinator) -> None:
    with joined(network(), None, None, cloud=three) as found:
        assert found.holders == SILOS
        inputs, target = found.samples[3]
        assert inputs == {"left": torch.tensor(3), "right": torch.tensor(3)}
        assert target == torch.tensor(3)
        made_up, _ = found.example[0]
        assert {name: (one.dtype, one.shape) for name, one in made_up.items()} == {
            "left": (torch.float64, (6,)), "right": (torch.float64, (4,)),
        }  # fmt: skip
        graph = capture(Both().double(), {name: one[None] for name, one in made_up.items()}, granularity="operators")
        stages = (Stage((0, 3), ("edge-b",)), Stage((3, len(graph.network.layers)), ("server",)))
        graph = regrouped(graph, [("left",), ("right",)])
        plan = resolve(Plan("Both", BATCH, stages, order="replay"), graph.network)
        with pytest.raises(BadPlan, match="edge-b reads 'left', which only edge-a has"):
            Feeder(graph, Schedule(plan, graph.network), three.endpoint, with_targets=False, local=three.silos)
    assert three.silos == {}


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])
def test_a_device_that_comes_back_with_its_samples_goes_on(tmp_path: Path, is_same: bool) -> None:
    """In another order, even; with other samples the run ends, and says so."""
    files = write_silos(tmp_path, EDGES_HAVE)
    (tmp_path / "later").mkdir()
    again = EDGES_HAVE | {"edge-b": EDGES_HAVE["edge-b"][::-1] if is_same else list(range(8, SAMPLES))}
    later = write_silos(tmp_path / "later", again)
    with Coordinator() as coordinator:
        coordinator.start_workers([WorkerProcess((name,), silo=str(path)) for name, path in files.items()], 1, 60)
        _, once = train(coordinator, tmp_path / "once")

        def killing(step: int, loss: float, seconds: float) -> None:
            if step == 3 and coordinator.members["edge-b"].facts.pid == first:
                os.kill(first, signal.SIGKILL)
                coordinator.local.processes.pop("edge-b").wait(10)
                coordinator.start_workers([WorkerProcess(("edge-b",), silo=str(later["edge-b"]))], 1, 60)

        first = coordinator.members["edge-b"].facts.pid
        if is_same:
            result, model = train(coordinator, tmp_path / "run", on_step=killing)
            assert_close(model.state_dict(), once.state_dict())
            assert len(result.losses) == STEPS
        else:
            with pytest.raises(BadData, match="other samples"):
                train(coordinator, tmp_path / "run", on_step=killing)
