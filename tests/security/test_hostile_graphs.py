"""Graphs that ask for what nobody should give: operators off the list, and sizes that no memory has."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from manyhands.facts.errors import BadGraph
from manyhands.graph import ops, store

ABSURD = 10**12
MOST_GROWTH_BYTES = 64 * 2**20


def tensor(name: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": "float32", "batch_axis": 0, "differentiable": False}


def graph_of(target: str, arguments: list[Any], shape: list[int], **options: Any) -> dict[str, Any]:
    """One operator over an input of 1 x 2 x 4 x 4."""
    node = {
        "name": "one", "target": target, "arguments": arguments, "options": options, "outputs": [tensor("y", shape)],
        "several": False, "in_place": False, "updates": "", "module": "", "where": "", "without_gradient": False,
    }  # fmt: skip
    return {
        "version": 1, "name": "small", "granularity": "blocks", "inputs": [tensor("x", [1, 2, 4, 4])],
        "input_tree": [["x"], {}], "output_tree": "y", "nodes": [node], "weights": [], "aliases": {}, "loss": None,
        "loss_combination": "",
    }  # fmt: skip


X = {"is": "value", "name": "x"}


def load(folder: Path, document: dict[str, Any]) -> object:
    (folder / store.GRAPH_FILE).write_text(json.dumps(document))
    save_file({}, folder / store.WEIGHTS_FILE)
    return store.load(folder)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_sensible_one_is_taken(tmp_path: Path) -> None:
    assert load(tmp_path, graph_of("aten.relu.default", [X], [1, 2, 4, 4])) is not None
    assert load(tmp_path, graph_of("aten.constant_pad_nd.default", [X, [1, 1]], [1, 2, 4, 6])) is not None


@pytest.mark.parametrize(
    "target",
    [
        "aten.set_.source_Storage", "aten.from_file.default", "aten.as_strided.default", "aten.resize_.default",
        "prims.copy_to.default", "os.system", "aten.__class__.__init__", "aten.relu.default\0", "", "аten.relu.default",
        "aten._cudnn_init_dropout_state.default", "aten.record_stream.default",
    ],
)  # fmt: skip
def test_operators_off_the_list(tmp_path: Path, target: str) -> None:
    with pytest.raises(BadGraph, match=r"not on the list|text"):
        load(tmp_path, graph_of(target, [X], [1, 2, 4, 4]))


@pytest.mark.quick(every=14)
@pytest.mark.parametrize(
    ("target", "arguments", "shape"),
    [
        ("aten.constant_pad_nd.default", [X, [0, ABSURD]], [1, 2, 4, 4 + ABSURD]),
        ("aten.constant_pad_nd.default", [X, [0, ABSURD]], [1, 2, 4, 4]),
        ("aten.upsample_nearest2d.vec", [X, [10**6, 10**6], None], [1, 2, 10**6, 10**6]),
        ("aten.upsample_nearest2d.vec", [X, [10**6, 10**6], None], [1, 2, 4, 4]),
        ("aten.repeat.default", [X, [1, 1, 10**6, 10**6]], [1, 2, 4 * 10**6, 4 * 10**6]),
        ("aten.expand.default", [X, [ABSURD, 2, 4, 4]], [1, 2, 4, 4]),
        ("aten.zeros.default", [[ABSURD]], [ABSURD]),
        ("aten.zeros.default", [[2**33, 2**33]], [1]),
        ("aten.arange.default", [ABSURD], [ABSURD]),
        ("aten.eye.default", [10**6], [10**6, 10**6]),
        ("aten.linspace.default", [0, 1, ABSURD], [ABSURD]),
        ("aten.full.default", [[ABSURD], 1.0], [ABSURD]),
        ("aten.roll.default", [X, [2**62], [0]], [1, 2, 4, 4]),
        ("aten.one_hot.default", [X, ABSURD], [1, 2, 4, 4, ABSURD]),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_absurd_sizes_cost_no_memory(tmp_path: Path, target: str, arguments: list[Any], shape: list[int]) -> None:
    assert target in ops.ALLOWED, "else it says nothing of sizes"
    load(tmp_path, graph_of("aten.relu.default", [X], [1, 2, 4, 4]))  # everything is loaded
    before = peak_bytes()
    with pytest.raises(BadGraph):
        load(tmp_path, graph_of(target, arguments, shape))
    assert peak_bytes() - before < MOST_GROWTH_BYTES


def test_many_parts(tmp_path: Path) -> None:
    document = graph_of("aten.chunk.default", [X, ABSURD, 0], [1, 2, 4, 4])
    document["nodes"][0]["several"] = True
    with pytest.raises(BadGraph, match="at most 4096"):
        load(tmp_path, document)


def test_weights_are_sized_before_they_are_read(tmp_path: Path) -> None:
    document = graph_of("aten.relu.default", [X], [1, 2, 4, 4])
    document["weights"] = [{"name": "w", "shape": [2**33], "dtype": "float32", "trainable": True, "buffer": False}]
    (tmp_path / store.GRAPH_FILE).write_text(json.dumps(document))
    save_file({"w": torch.zeros(4)}, tmp_path / store.WEIGHTS_FILE)
    before = peak_bytes()
    with pytest.raises(BadGraph, match="the graph says"):
        store.load(tmp_path)
    assert peak_bytes() - before < MOST_GROWTH_BYTES
