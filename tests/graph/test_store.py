"""Graphs on disk: what is saved comes back, and whatever else is found there is refused with BadGraph."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import assert_same, by_module, by_pieces, zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from groups import by_name
from manyhands.facts.errors import BadGraph
from manyhands.graph import document_reader, store
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph


class Small(nn.Module):
    """A bit of everything a document can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.lstm = nn.LSTM(8, 3, batch_first=True)
        self.head = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        left, right = x.chunk(2, 1)
        rows = torch.cat((left, right), 3).flatten(1, 2).clamp(-torch.inf, 5.0)
        out = self.lstm(F.dropout(rows, 0.25))[0][:, 1:].mean(1)
        out = out.to(memory_format=torch.contiguous_format) * scale.to(torch.float32).view(x.shape[0], 1)
        return self.head(out), self.tied(out)


def small_loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return F.cross_entropy(outputs[0], target, weight=weights) + outputs[1].square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return capture(Small(), (torch.randn(2, 1, 4, 4), torch.ones(2)), loss=small_loss, target=torch.tensor([0, 3]))


@pytest.fixture(scope="module")
def plain() -> Graph:
    """Small enough to be read hundreds of times."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3))
    return capture(module, torch.randn(2, 1, 4, 4), loss=F.cross_entropy, target=torch.tensor([0, 2]))


def same(one: Graph, other: Graph) -> None:
    for field in one.__struct_fields__:
        if field == "state":
            assert set(one.state) == set(other.state)
            assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)
        elif field == "loss":
            assert (one.loss is None) == (other.loss is None)
            if one.loss is not None and other.loss is not None:
                same(one.loss, other.loss)
        else:
            assert getattr(one, field) == getattr(other, field), field


@pytest.mark.slow
def test_what_is_saved_comes_back(graph: Graph, tmp_path: Path) -> None:
    assert graph.aliases
    assert graph.loss is not None
    assert graph.loss.weights, "the loss should have a constant of its own"
    store.save(graph, tmp_path / "new" / "folder")
    back = store.load(tmp_path / "new" / "folder")
    same(back, graph)
    assert back.network == graph.network
    batch, target = (torch.randn(3, 1, 4, 4), torch.ones(3)), torch.tensor([1, 2, 0])
    found, wanted = (by_pieces(one, [3], batch, target) for one in (back, graph))
    assert_same(found, wanted, 0.0)


@pytest.mark.slow
def test_saving_again_replaces_and_leaves_nothing_else(plain: Graph, graph: Graph, tmp_path: Path) -> None:
    store.save(graph, tmp_path)
    store.save(plain, tmp_path)
    same(store.load(tmp_path), plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.json", "weights.safetensors"]


def test_documents_are_plain_json(graph: Graph) -> None:
    document = json.loads(json.dumps(store.to_document(graph), allow_nan=False))
    same(store.from_document(document, store.state_of(graph)), graph)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", by_name("zoo", ["unet", "bilstm", "din"]))
def test_zoo_models_come_back(name: str, tmp_path: Path) -> None:
    example = zoo(name)
    store.save(example.graph, tmp_path)
    back = store.load(tmp_path)
    same(back, example.graph)
    batch, target = example.batch(2), example.target(2)
    wanted = by_module(example.module.train(), example.graph, batch, target, example.loss)
    assert_same(by_pieces(back, [], batch, target), wanted, 1e-12)


def test_weights_that_share_memory_or_are_not_contiguous(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(4, 6)
            self.register_buffer("left", whole[:, :3])
            self.register_buffer("right", whole[:, 3:].t())
            self.register_buffer("flags", torch.tensor([True, False, True]))
            self.register_buffer("nothing", torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.left.t() @ self.left) * self.flags + (x @ self.right).sum() + self.nothing.sum()

    graph = capture(Odd(), torch.randn(2, 3))
    store.save(graph, tmp_path)
    same(store.load(tmp_path), graph)


# Refusals. Each changes one thing in a valid document.


def node_of(document: dict[str, Any], target: str) -> dict[str, Any]:
    return next(node for node in document["nodes"] if target in node["target"])


def setting(where: Callable[[dict[str, Any]], Any], key: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        where(document)[key] = value

    return change


def conv(document: dict[str, Any]) -> dict[str, Any]:
    return node_of(document, "conv2d")


def nest(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def cycle() -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def swap_first_two(document: dict[str, Any]) -> None:
    nodes = document["nodes"]
    place = nodes.index(conv(document))
    nodes.append(nodes.pop(place))


def shape_of(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = conv(document)["outputs"][0]
    return found


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "operator off the list": (setting(conv, "target", "aten.from_file.default"), "conv2d.*from_file"),
    "not an operator at all": (setting(conv, "target", "os.system"), "os.system"),
    "in-place operator": (setting(lambda d: node_of(d, "relu"), "target", "aten.relu_.default"), "relu_"),
    "unknown record": (setting(lambda d: conv(d)["arguments"], 0, {"is": "code", "name": "x"}), "conv2d.*'code'"),
    "record with more": (setting(lambda d: conv(d)["arguments"], 0, {"is": "value", "name": "x", "y": 1}), "3 fields"),
    "used before made": (swap_first_two, "which no node before it makes"),
    "unknown value": (setting(lambda d: conv(d)["arguments"], 0, {"is": "value", "name": "who"}), "conv2d.*'who'"),
    "unknown weight": (setting(lambda d: conv(d)["arguments"], 1, {"is": "weight", "name": "who"}), "conv2d.*'who'"),
    "node named twice": (lambda d: d["nodes"].append(copy.deepcopy(d["nodes"][-1])), "named twice"),
    "output named as the input": (lambda d: shape_of(d).update(name=d["inputs"][0]["name"]), "already made"),
    "weight named twice": (lambda d: d["weights"].append(d["weights"][0]), "named twice"),
    "name of a weight's slot": (lambda d: shape_of(d).update(name="weight 0.weight"), "is no name"),
    "wrong shape": (lambda d: shape_of(d).update(shape=[1, 2, 2, 3]), r"conv2d.*\[2, 2, 2, 2\].*\[2, 2, 2, 3\]"),
    "wrong dtype": (lambda d: shape_of(d).update(dtype="float64"), "conv2d.*float32.*float64"),
    "bad dtype": (lambda d: shape_of(d).update(dtype="code"), "conv2d.*'code'"),
    "batch axis out of range": (lambda d: shape_of(d).update(batch_axis=4), "conv2d.*batch_axis 4.*4 axes"),
    "negative batch axis": (lambda d: shape_of(d).update(batch_axis=-1), "batch_axis -1"),
    "batch axis hidden": (lambda d: shape_of(d).update(batch_axis=None, shape=[2, 2, 2, 2]), "conv2d.*3 samples"),
    "negative extent": (lambda d: shape_of(d).update(shape=[1, -2, 2, 2]), "conv2d.*-2"),
    "absurd extent": (lambda d: shape_of(d).update(shape=[1, 2**40, 2, 2]), "conv2d.*elements"),
    "absurd product": (lambda d: shape_of(d).update(shape=[1, 2**20, 2**20, 2**20]), "conv2d.*elements"),
    "absurd rank": (lambda d: shape_of(d).update(shape=[1] * 40), "40 axes"),
    "absurd integer": ((lambda d: conv(d)["arguments"].append([2**50, 1])), "conv2d.*larger"),
    "number too long to print": ((lambda d: conv(d)["arguments"].append(10**5000)), "refused"),
    "extent too long to print": (lambda d: shape_of(d).update(shape=[10**5000]), "refused"),
    "too many items": ((lambda d: conv(d)["arguments"].append([1] * 10_000)), "conv2d.*items"),
    "deep nesting": ((lambda d: conv(d)["arguments"].append(nest(40))), "conv2d.*inside each other"),
    "nesting deeper than python": ((lambda d: conv(d)["arguments"].append(nest(100_000))), "refused"),
    "cycle": ((lambda d: conv(d)["arguments"].append(cycle())), "refused"),
    "unknown option": (setting(lambda d: conv(d)["options"], "who", 1), "conv2d"),
    "placement": (setting(lambda d: conv(d)["options"], "device", "cuda"), "conv2d.*'device'"),
    "code as an argument": (setting(lambda d: conv(d)["arguments"], 0, print), "refused"),
    "not finite": ((lambda d: conv(d)["arguments"].append(float("inf"))), "conv2d.*record"),
    "strange enum": ((lambda d: conv(d)["arguments"].append({"is": "enum", "name": "ops"})), "'ops'"),
    "strange number": ((lambda d: conv(d)["arguments"].append({"is": "float", "text": "1"})), "'1'"),
    "long text": (setting(conv, "where", "x" * 100_000), "where.*characters"),
    "escape sequences": (setting(conv, "module", "\x1b[2J"), "printable"),
    "several outputs of one": (setting(conv, "several", True), "several=True"),
    "two outputs of one": (lambda d: conv(d)["outputs"].append({**shape_of(d), "name": "b"}), "says 2 outputs"),
    "in place without a tensor": (lambda d: conv(d).update(in_place=True, arguments=[1, 1]), "no tensor"),
    "update of a parameter": (setting(lambda d: node_of(d, "add_"), "updates", "0.weight"), "add_.*0.weight"),
    "write without update": (setting(lambda d: node_of(d, "add_"), "updates", ""), "updates"),
    "parameter as statistics": (
        setting(lambda d: node_of(d, "batch_norm")["arguments"], 3, {"is": "weight", "name": "1.weight"}), "buffers"),
    "bad output tree": (setting(lambda d: d, "output_tree", ["who"]), "output_tree.*'who'"),
    "output tree of numbers": (setting(lambda d: d, "output_tree", [3]), "leaf is a int"),
    "empty output tree": (setting(lambda d: d, "output_tree", []), "no tensor"),
    "deep output tree": (setting(lambda d: d, "output_tree", nest(50)), "levels"),
    "cyclic output tree": (setting(lambda d: d, "output_tree", cycle()), "refused"),
    "bad input tree": (setting(lambda d: d, "input_tree", [["who"], {}]), "input_tree.*who"),
    "input tree of one part": (setting(lambda d: d, "input_tree", [["input"]]), "positional"),
    "alias of nothing": (setting(lambda d: d["aliases"], "x", "who"), "alias.*'who'"),
    "granularity": (setting(lambda d: d, "granularity", "atoms"), "'atoms'"),
    "version": (setting(lambda d: d, "version", 2), "version.*2"),
    "unknown field": (setting(lambda d: d, "code", "import os"), "code"),
    "missing field": (lambda d: d.pop("nodes") and None, "nodes"),
    "trainable integers": (lambda d: d["weights"][0].update(dtype="int64"), "0.weight"),
    "loss of a loss": (lambda d: d["loss"].update(loss=copy.deepcopy(d["loss"])), "no loss of its own"),
    "loss of something else": (lambda d: d["loss"]["inputs"][0].update(shape=[1, 5]), ""),
    "weights of a petabyte": (
        lambda d: d["weights"].extend({**d["weights"][0], "name": f"w{i}", "shape": [2**33]} for i in range(100)),
        "weights.*bytes"),
}  # fmt: skip


@pytest.mark.quick(every=20)
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, plain: Graph) -> None:
    change, says = REFUSED[what]
    document = store.to_document(plain)
    change(document)
    with pytest.raises(BadGraph, match=f"(?s){says}"):
        store.from_document(document, store.state_of(plain))


def chain(plain: Graph, target: str, arguments: list[Any], shape: list[int], **more: Any) -> dict[str, Any]:
    """A document with one node more, on the input of shape [samples, 1, 4, 4]."""
    document = store.to_document(plain)
    outputs = [{"name": "bad", "shape": shape, "dtype": "float32", "batch_axis": None}]
    node = {"name": "bad", "target": target, "arguments": arguments, "options": {}, "outputs": outputs,
            "several": False, "in_place": False, "updates": "", "module": "", "where": "", **more}  # fmt: skip
    document["nodes"].append(node)
    return document


X = {"is": "value", "name": "input"}
ABSURD: dict[str, tuple[str, list[Any], list[int]]] = {
    "arange": ("aten.arange.default", [2**39], [4]),
    "repeat": ("aten.repeat.default", [X, [2**39, 2**39, 2**39, 2**39]], [4]),
    "full": ("aten.full.default", [[2**40, 2**40], 1.0], [4]),
    "eye": ("aten.eye.default", [2**40], [4]),
    "linspace": ("aten.linspace.default", [0.0, 1.0, 2**40], [4]),
    "repeat_interleave": ("aten.repeat_interleave.self_int", [X, 2**40], [4]),
    "pad": ("aten.constant_pad_nd.default", [X, [2**40, 2**40]], [4]),
    "pool of nothing": ("aten.max_pool2d.default", [X, [0, 0], [0, 0]], [4]),
    "groups of nothing": ("aten.group_norm.default", [X, 0], [4]),
    "shuffle by nothing": ("aten.pixel_shuffle.default", [X, 0], [4]),
    "unshuffle by nothing": ("aten.pixel_unshuffle.default", [X, 0], [4]),
    "channel shuffle by nothing": ("aten.channel_shuffle.default", [X, 0], [4]),
    "convolution by nothing": (
        "aten.conv2d.default", [X, {"is": "weight", "name": "0.weight"}, None, [0, 0], [0, 0], [0, 0], 0], [4]),
    "pooling to the sky": ("aten.adaptive_avg_pool2d.default", [X, [2**40, 2**40]], [4]),
    "sizes by data": ("aten.index.Tensor", [X, [{"is": "value", "name": "input"}]], [4]),
    "classes by data": ("aten.one_hot.default", [X], [4]),
    "unfold by a view": ("aten.view.default", [X, [-1, -1]], [4]),
}  # fmt: skip


@pytest.mark.quick(every=17)
@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ABSURD)
def test_absurd_arguments_are_refused_at_once(what: str, plain: Graph) -> None:
    with pytest.raises(BadGraph, match="bad"):
        store.from_document(chain(plain, *ABSURD[what]), store.state_of(plain))


@pytest.mark.parametrize("p", [3.0, -0.5, "half", True, None, {"is": "float", "text": "nan"}])
def test_probabilities_are_probabilities(p: Any, plain: Graph) -> None:
    document = chain(plain, "aten.dropout.default", [X, 0.5, True], [1, 1, 4, 4])
    document["nodes"][-1]["outputs"][0]["batch_axis"] = 0
    store.from_document(document, store.state_of(plain))
    document["nodes"][-1]["arguments"][1] = p
    with pytest.raises(BadGraph, match=r"bad.*(probability|argument 'p' of aten.dropout)"):
        store.from_document(document, store.state_of(plain))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ["unbind.int", "split.Tensor", "chunk.default"])
def test_an_operator_may_not_make_a_million_tensors(target: str, plain: Graph) -> None:
    document = chain(plain, "aten.zeros.default", [[10**9]], [10**9])
    extra = {"unbind.int": [], "split.Tensor": [1], "chunk.default": [10**9]}[target]
    node = {**document["nodes"][-1], "name": "worse", "target": "aten." + target, "several": True,
            "arguments": [{"is": "value", "name": "bad"}, *extra],
            "outputs": [{**document["nodes"][-1]["outputs"][0], "name": "worse"}]}  # fmt: skip
    document["nodes"].append(node)
    with pytest.raises(BadGraph, match=r"worse.*1000000000 tensors"):
        store.from_document(document, store.state_of(plain))


@pytest.mark.timeout(20)
def test_a_recurrent_layer_may_not_run_for_ever(graph: Graph) -> None:
    document = store.to_document(graph)
    lstm = node_of(document, "lstm")
    long = 10**9
    zeros = {**lstm, "name": "long", "target": "aten.zeros.default", "several": False,
             "arguments": [[{"is": "samples", "factor": 1}, long, 8]],
             "outputs": [{"name": "long", "shape": [1, long, 8], "dtype": "float32", "batch_axis": 0}]}  # fmt: skip
    document["nodes"].insert(document["nodes"].index(lstm), zeros)
    lstm["arguments"][0] = {"is": "value", "name": "long"}
    lstm["outputs"][0]["shape"] = [1, long, 3]
    with pytest.raises(BadGraph, match=r"lstm.*1000000000 steps"):
        store.from_document(document, store.state_of(graph))


# Weights


@pytest.mark.parametrize("change", ["missing", "more", "shape", "dtype"])
def test_weights_must_be_those_of_the_graph(change: str, plain: Graph, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in store.state_of(plain).items()}
    if change == "missing":
        del state["0.weight"]
    elif change == "more":
        state["own"] = torch.zeros(2)
    elif change == "shape":
        state["0.weight"] = torch.zeros(2, 1, 3, 4)
    else:
        state["0.weight"] = state["0.weight"].double()
    with pytest.raises(BadGraph, match=r"own" if change == "more" else r"0\.weight"):
        store.from_document(store.to_document(plain), state)
    store.save(plain, tmp_path)
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(BadGraph, match=r"own" if change == "more" else r"0\.weight"):
        store.load(tmp_path)


def test_files_that_are_not_what_they_should_be(plain: Graph, tmp_path: Path) -> None:
    with pytest.raises(BadGraph, match="cannot be read"):
        store.load(tmp_path)
    store.save(plain, tmp_path)
    weights, text = tmp_path / "weights.safetensors", tmp_path / "graph.json"
    good, good_text = weights.read_bytes(), text.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    bad = [b"", b"\x01", good[:8], good[:40], good[: 8 + length], good[:-1], good + b"\0", b"\xff" * 100,
           struct.pack("<Q", 2**60) + good[8:], struct.pack("<Q", 3) + b"[1]",
           good[:8] + b"[" * length + good[8 + length:],
           good.replace(b'"F32"', b'"F16"', 1), good.replace(b"data_offsets", b"data_offsetz", 1),
           good.replace(b'"data_offsets":[0', b'"data_offsets":[9', 1)]  # fmt: skip
    for content in bad:
        weights.write_bytes(content)
        with pytest.raises(BadGraph, match=r"weights\.safetensors"):
            store.load(tmp_path)
    weights.write_bytes(good)
    for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": NaN}', good_text[:-9]):
        text.write_bytes(content)
        with pytest.raises(BadGraph):
            store.load(tmp_path)
    text.write_bytes(good_text)
    same(store.load(tmp_path), plain)


def test_a_json_file_too_large_is_not_read(plain: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(plain, tmp_path)
    monkeypatch.setattr(store, "LARGEST_JSON_BYTES", 100)
    with pytest.raises(BadGraph, match="more than 100 bytes"):
        store.load(tmp_path)


def test_nothing_is_loaded_before_sizes_are_checked(
    plain: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("tensors were read")

    store.save(plain, tmp_path)
    monkeypatch.setattr(store, "load_file", never)
    monkeypatch.setattr(document_reader, "LARGEST_WEIGHT_BYTES", 10)
    with pytest.raises(BadGraph, match="at most 10"):
        store.load(tmp_path)


def test_weights_of_a_saved_graph_load_into_a_module(plain: Graph, tmp_path: Path) -> None:
    """The file is a plain state dict: names are the module's own."""
    store.save(plain, tmp_path)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    module.load_state_dict(load_file(tmp_path / "weights.safetensors"))


# Mutations


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything inside a document."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.extend(places(item, (*path, key)))
    return found


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-3, 9), st.floats(), st.text(max_size=5),
    st.sampled_from(["input", "conv2d", "0.weight", "float32", "int64", "aten.relu.default", "aten.sum.default"]),
    st.sampled_from([[], {}, [1], {"is": "value", "name": "input"}, {"is": "samples", "factor": 2}, {"is": "x"}, [[]]]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=350, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_mutated_documents_are_read_or_refused(data: st.DataObject, plain: Graph) -> None:
    """No other exception escapes; what is read can be described."""
    document = store.to_document(plain)
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(places(document)))
        holder = document
        for key in where[:-1]:
            holder = holder[key]
        kind = data.draw(st.sampled_from(["drop", "replace", "nudge", "double"]))
        old = holder[where[-1]]
        if kind == "drop":
            del holder[where[-1]]
        elif kind == "nudge" and isinstance(old, int):
            holder[where[-1]] = old + data.draw(st.sampled_from([-1, 1, 2**31, -(2**40)]))
        elif kind == "nudge" and isinstance(old, str):
            holder[where[-1]] = old + data.draw(st.sampled_from(["x", "_", "\n", ""]))
        elif kind == "double" and isinstance(holder, list):
            holder.append(copy.deepcopy(old))
        else:
            holder[where[-1]] = data.draw(JUNK)
    try:
        back = store.from_document(document, store.state_of(plain))
    except BadGraph:
        return
    assert back.network.layers


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_mutated_weight_files_are_read_or_refused(data: st.DataObject, plain: Graph, tmp_path: Path) -> None:
    store.save(plain, tmp_path)
    path = tmp_path / "weights.safetensors"
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        store.load(tmp_path)
    except BadGraph:
        return
