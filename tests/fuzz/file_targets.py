"""Parsers of documents on disk: clusters, plans, profiles, graphs, checkpoints, traces, what a run leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from safetensors.torch import save as save_tensors

from fuzz.judging import Build, Target
from hand_made import chain
from hand_made import cluster as made_cluster
from hand_made import profile as made_profile
from manyhands.executor import checkpoint, checkpoint_files, packing_cost
from manyhands.facts.calibration import Calibration, Tried
from manyhands.facts.cluster import Cluster
from manyhands.facts.lab import play
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Codec, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.trace import parse_link_trace, parse_trace
from manyhands.files.documents import load_cluster, read_document
from manyhands.files.traces import read_link_trace
from manyhands.graph import store
from manyhands.graph.document_reader import read_document as read_graph
from manyhands.lab import record
from manyhands.observe.append import LineFile, Metrics
from manyhands.observe.live import Live, LiveDevice, LiveLink, LiveRound, LiveSpan, LiveStage, read_live
from manyhands.observe.watching import RunWatch
from manyhands.plans import networks
from manyhands.profiler.store import load_profile
from manyhands.runtime.record import COLUMNS, read_config, read_decided
from manyhands.split.stored_calibration import calibration_path, find_calibration

SEEDS = Path(__file__).parent / "seeds"
NETWORK = chain(4)
CLUSTER = made_cluster(["d0", "d1", "d2"])


def put(path: Path, data: bytes) -> Path:
    """Quicker than Path.write_bytes; nothing is forced to disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)
    return path


def _json(document: Any) -> bytes:
    return json.dumps(msgspec.to_builtins(document)).encode()


def document_target(folder: Path) -> Target:
    """YAML as such: anchors, merges, tags, and whatever else it has."""
    seeds = [
        b"a: 1\nb: [1, 2.5, x]\nc: {d: null, e: true}\n", b"a: &a {x: 1}\nb: {<<: *a, y: 2}\n",
        b"- !!str 7\n- 0x1f\n- .inf\n",
        b"a: &a [1, 2]\nb: [*a, *a]\n", b"text: |\n  more\n  than one line\n", b"? [a, b]\n: c\n",
        b"'k': \"\\u00e9\"\n# end\n",
        b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c]\n",
        b"a: &a {k: 1}\nb: &b {<<: [*a, *a]}\nc: &c {<<: [*b, *b]}\nd: &d {<<: [*c, *c]}\n", b"&a [*a]\n",
        b"when: 2001-12-14t21:59:43.10-05:00\n",
    ]  # fmt: skip
    path = folder / "document.yaml"
    return Target("YAML documents", lambda data: str(read_document(put(path, data)))[:100], seeds, share=1.5)


def json_target(folder: Path) -> Target:
    path = folder / "document.json"
    seeds = [b'{"a": [1, 2.5, "x", null, true], "b": {"c": -1e3}}', b"[]", b'"text"', b"17"]
    return Target("JSON documents", lambda data: str(read_document(put(path, data)))[:100], seeds, "json", share=1.5)


def cluster_target(folder: Path) -> Target:
    return _cluster_target("cluster files", folder / "cluster.json", 1.0)


def yaml_cluster_target(folder: Path) -> Target:
    return _cluster_target("cluster files in YAML", folder / "cluster.yaml", 0.1)


def _cluster_target(name: str, path: Path, share: float) -> Target:
    kinds = [{"kind": "raspberry-pi-4", "count": 2}, {"kind": "jetson-nano", "name": "jet", "gflops": 4}]
    written = [
        {"name": "mine", "devices": kinds, "link": {"rate": "100 Mbit/s", "delay": "1 ms"}},
        made_cluster(["a", "b"]).to_dict(),
        Cluster.local(2).to_dict(), load_cluster("home").to_dict(), load_cluster("edge-cloud").to_dict(),
    ]  # fmt: skip

    def run(data: bytes) -> object:
        found = load_cluster(put(path, data))
        return [found.link_between(a, b) for a in found.names[:2] for b in found.names[:2]], found.to_dict()

    return Target(name, run, [_json(one) for one in written], "json", share=share)


def lab_target(folder: Path) -> Target:
    played = play(Cluster.lab("home", slots=2), core_gflops=60, cores=[0, 1])
    known = record.LabRecord("one", "home", played, True, record.Process(1, 2), None)

    def run(data: bytes) -> object:
        os.environ[record.FOLDER_VARIABLE] = str(folder)
        put(folder / "one.json", data)
        return record.load("one")

    return Target("lab files", run, [_json(record._document(known))], "json", share=0.7)


def plans() -> list[Plan]:
    return [
        Plan("chain", 8, (Stage((0, 2), ("d0",)), Stage((2, 4), ("d1",))), micro_batches=2),
        Plan("chain", 8, (Stage((0, 4), ("d0", "d1"), BySamples((5, 3))),)),
        Plan("chain", 4, (Stage((0, 2), ("d0", "d1"), ByTiles((1, 2), (1,))), Stage((2, 4), ("d2",), codec=Codec(8)))),
        Plan("chain", 4, (Stage((0, 4), ("d0", "d1"), ByChannels((1, 2))),), order="stream"),
        Plan("chain", 8, (Stage((0, 2), ("d0",)), Stage((2, 4), ("d1",))), 4, "replay"),
    ]  # fmt: skip


def plan_target(folder: Path) -> Target:
    path = folder / "plan.json"

    def run(data: bytes) -> object:
        return resolve(Plan.from_dict(read_document(put(path, data))), NETWORK, CLUSTER)

    return Target("plan files", run, [_json(plan.to_dict()) for plan in plans()], "json", share=2)


def profile_target(folder: Path) -> Target:
    path = folder / "profile.json"
    own = made_profile(NETWORK, {"d0": [(0.1, 0.2)] * 4}).devices["d0"]

    def run(data: bytes) -> object:
        found = load_profile(put(path, data), NETWORK)
        return [found.layer_seconds(layer, 3) for layer in range(4)]

    return Target("profile files", run, [_json(own)], "json", share=2)


def decided_target(folder: Path) -> Target:
    """The files of a run, one of them changed."""
    good = {
        "profile.json": _json(made_profile(NETWORK, {name: [(0.1, 0.2)] * 4 for name in CLUSTER.names}).devices),
        "cluster.yaml": _json(CLUSTER.to_dict()), "plan.yaml": _json(plans()[0].to_dict()),
        "config.yaml": b'{"steps": 7, "model": "tiny"}',
    }  # fmt: skip
    for name, content in good.items():
        put(folder / name, content)

    def run(data: bytes) -> object:
        name = _likely(data, {"plan.yaml": b"stages", "cluster.yaml": b"gflops", "profile.json": b"layers"})
        put(folder / name, data)
        try:
            return read_decided(folder, NETWORK), read_config(folder)
        finally:
            put(folder / name, good[name])

    return Target("run folders", run, list(good.values()), "json", share=0.1)


def _likely(data: bytes, words: dict[str, bytes]) -> str:
    """Which of a run's files an input was made of."""
    return next((name for name, word in words.items() if word in data), "config.yaml")


def calibration_target(folder: Path) -> Target:
    own = Calibration(
        network="chain", fingerprint=NETWORK.fingerprint, data="digits", batch_size=8, optimizer="SGD",
        allowed_drop=0.01,
        measure="accuracy", reference=0.9, spread=0.01, steps=10, repeats=2, bits={"1": 4, "2": 8}, k=1, later_k=2,
        tried=(Tried(1, 1, 4, (0.9, 0.8), True),), norms=(1.0, 2.0),
    )  # fmt: skip
    path = calibration_path(NETWORK, "digits", 8, folder)

    def run(data: bytes) -> object:
        put(path, data)
        found = find_calibration(NETWORK, "digits", 8, folder=folder)
        return found.least_bits if found is not None else None

    return Target("calibrations", run, [_json(own)], "json", share=1)


def packing_target(folder: Path) -> Target:
    path = folder / "packing.json"
    seeds = [_json(packing_cost.PackingCost(1e-6, 1e-9, 1e-9, 1e-9, "here"))]
    return Target("packing costs", lambda data: packing_cost._load(put(path, data)), seeds, "json", share=0.5)


def network_target(folder: Path) -> Target:
    """What the cache has of a network; whatever cannot be read is made again."""
    path = folder / "network.json"

    def run(data: bytes) -> object:
        put(path, data)
        with mock.patch.multiple(networks, _cached=lambda *_: path, capture_model=_nothing):
            return networks.load_network("mobilenetv2")

    return Target("cached networks", run, [msgspec.json.encode(NETWORK)], "json", share=0.5, allowed=(MadeAgain,))


class MadeAgain(Exception):
    """The cache was not believed."""


def _nothing(*_: Any) -> Any:
    raise MadeAgain


def trace_target(folder: Path) -> Target:
    seeds = [b"0 16.8\n0.84 22.5\n1.84 25.8\n", b"# s up down\n0 1 2\n1 3 4\n\n2.5 0 9\n", b"12.0\t31.5\r\n13 0\n"]

    def run(data: bytes) -> object:
        text = data.decode("utf-8", "replace")
        found = parse_link_trace(text, "here")
        assert found.up.mean > 0
        found.up.at(1e9), found.down.integral(0, 100)
        return parse_trace(text, "here")

    return Target("traces", run, seeds, share=2)


def trace_file_target(folder: Path) -> Target:
    path = folder / "trace.txt"
    return Target(
        "trace files", lambda data: read_link_trace(put(path, data)), [b"0 16.8\n0.84 22.5\n", b"0 1 2\n1 3 4\n"]
    )


def graph_target(folder: Path) -> Target:
    """Records, names, sizes: all that is checked before anything is allocated or run."""
    path = folder / store.GRAPH_FILE
    seeds = [(SEEDS / store.GRAPH_FILE).read_bytes()]
    return Target("graphs", lambda data: read_graph(store._read_json(put(path, data))), seeds, "json", share=0.6)


def graph_folder_target(folder: Path) -> Target:
    """A whole graph: shapes are worked out on tensors without memory, which takes long."""
    put(folder / store.WEIGHTS_FILE, (SEEDS / store.WEIGHTS_FILE).read_bytes())

    def run(data: bytes) -> object:
        put(folder / store.GRAPH_FILE, data)
        return store.load(folder)

    return Target("graph folders", run, [(SEEDS / "graph.json").read_bytes()], "json", share=0.02)


def weights_target(folder: Path) -> Target:
    """Weights beside a graph: the header must be the graph's, to the last byte."""
    graph = read_graph(msgspec.json.decode((SEEDS / "graph.json").read_bytes()))
    path = folder / store.WEIGHTS_FILE

    def run(data: bytes) -> object:
        return store._read_weights(put(path, data), graph)

    return Target(
        "weights of graphs", run, [(SEEDS / store.WEIGHTS_FILE).read_bytes()], finish=header_right, share=1,
    )  # fmt: skip


def header_right(data: bytes) -> bytes:
    """A safetensors file whose header is as long as it says, if there is the end of one."""
    end = data.rfind(b"}}", 8)
    if end < 0:
        return data
    return (end + 2 - 8).to_bytes(8, "little") + data[8:]


def _saved(folder: Path) -> Path:
    return checkpoint.save(
        folder,
        checkpoint.Checkpoint(
            step=120, model={"w": torch.ones(3, 2), "b": torch.zeros(2, dtype=torch.int64)},
            optimizer_tensors={"w/exp_avg": torch.ones(3, 2)}, optimizer_scalars={"w/count": 3}, seed=7,
            optimizer=Optimizer("Adam", lr=1e-3, betas=(0.9, 0.99), schedule=("StepLR", {"step_size": 3})),
            facts={"epoch": 2, "names": ["a", None]},
        ),
    )  # fmt: skip


def checkpoint_target(folder: Path) -> Target:
    """state.json, with a digest that is right: whoever changes it can count."""
    saved = _saved(folder)

    def finish(data: bytes) -> bytes:
        try:
            document = json.loads(data)
            return json.dumps({**document, "sha256": checkpoint_files.document_digest(document)}).encode()
        except (ValueError, TypeError, AttributeError, RecursionError):
            return data

    def run(data: bytes) -> object:
        put(saved / checkpoint_files.STATE_FILE, data)
        return checkpoint.load(saved)

    return Target(
        "checkpoints", run, [(saved / checkpoint_files.STATE_FILE).read_bytes()], "json", finish=finish, share=0.5
    )


def checkpoint_tensors_target(folder: Path) -> Target:
    """A checkpoint's weights, with sizes and digests that are right."""
    saved = _saved(folder)
    state = json.loads((saved / checkpoint_files.STATE_FILE).read_bytes())

    def run(data: bytes) -> object:
        put(saved / checkpoint_files.MODEL_FILE, data)
        state["files"][checkpoint_files.MODEL_FILE] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        state["sha256"] = checkpoint_files.document_digest(state)
        put(saved / checkpoint_files.STATE_FILE, json.dumps(state).encode())
        return checkpoint.load(saved)

    seeds = [
        (saved / checkpoint_files.MODEL_FILE).read_bytes(),
        save_tensors({"a": torch.ones(2, 3, dtype=torch.float16)}),
    ]
    return Target("checkpoint tensors", run, seeds, finish=header_right, share=0.7)


def _live() -> Live:
    return Live(
        state="running", model="tiny", pid=os.getpid(), host=socket.gethostname(), started=1.0, updated=1e12, step=3,
        steps=10,
        loss=0.5,
        devices=(LiveDevice("d0"), LiveDevice("d1", busy=0.5)), links=(LiveLink("d0", "d1", 1e6),),
        stages=(LiveStage(0, 0, 4),),
    )  # fmt: skip


def live_target(folder: Path) -> Target:
    """None is what is said of a file that cannot be read."""
    round_ = LiveRound(3, 0.5, 0.4, (LiveSpan("d0", "compute", 0.0, 0.1, "forward"),))

    def run(data: bytes) -> object:
        put(folder / "live.json", data)
        put(folder / "round.json", data)
        return read_live(folder)

    return Target("live.json", run, [msgspec.json.encode(_live()), msgspec.json.encode(round_)], "json", share=1)


def watch_target(folder: Path) -> Target:
    """Every file that is followed, one of them changed; nothing is raised, whatever is in them."""
    events = b'{"time": "x", "event": "started", "model": "tiny"}\n{"time": "x", "event": "lost", "device": "d0"}\n'
    good = {
        "live.json": msgspec.json.encode(_live()), "events.jsonl": events,
        "metrics.csv": b"step,epoch,loss\n0,0,1.5\n1,0,1.25\n",
        "plan.yaml": _json(plans()[0].to_dict()), "config.yaml": b"steps: 7\n",
    }  # fmt: skip
    for name, content in good.items():
        put(folder / name, content)

    def run(data: bytes) -> object:
        words = {"live.json": b'"state"', "plan.yaml": b"stages", "events.jsonl": b"event", "metrics.csv": b"step,"}
        name = _likely(data, words)
        put(folder / name, data)
        if name != "live.json":
            (folder / "live.json").unlink()
        try:
            watch = RunWatch(folder)
            watch.look()
            return watch.look()
        finally:
            put(folder / name, good[name])
            put(folder / "live.json", good["live.json"])

    return Target("followed runs", run, list(good.values()), "json", allowed=(), share=0.2)


def line_files_target(folder: Path) -> Target:
    """metrics.csv and events.jsonl of a run that goes on."""
    path = folder / "metrics.csv"

    def run(data: bytes) -> object:
        put(path, data)
        with LineFile(path) as lines:
            lines.write("0,0,0,0,0,0")
        put(path, data)
        with Metrics(path, COLUMNS) as metrics:
            metrics.write(step=1)
        return None

    head = ",".join(COLUMNS).encode()
    return Target("metrics", run, [head + b"\n0,0,1.5,0.1,10,\n", head + b"\n0,0,1", b""], share=1)


TARGETS: tuple[Build, ...] = (
    document_target, json_target, cluster_target, yaml_cluster_target, lab_target, plan_target, profile_target,
    decided_target, calibration_target,
    packing_target, network_target, trace_target, trace_file_target, graph_target, graph_folder_target, weights_target,
    checkpoint_target, checkpoint_tensors_target, live_target, watch_target, line_files_target,
)  # fmt: skip
