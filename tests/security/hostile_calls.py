"""Graphs with calls that PyTorch's native code would not survive, each loaded or run in a process of its own.

As a program: one line of JSON for each, with how its process ended.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import save_file

import manyhands as mh
from fuzz.operator_calls import CALLS, Call, buffer, call, enum, i, w, x
from fuzz.operator_documents import completed, document, run
from manyhands.facts.errors import BadGraph, ManyhandsError
from manyhands.graph import store
from manyhands.graph.document_reader import read_document
from manyhands.graph.graph import Graph
from manyhands.runtime.received_graph import graph_of

LSTM = CALLS["aten.lstm.input"][0]


def _lstm(place: int, given: Any) -> tuple[str, Call]:
    return "aten.lstm.input", Call((*LSTM.arguments[:place], given, *LSTM.arguments[place + 1 :]))


_STATES, _WEIGHTS = LSTM.arguments[1:3]
CASES: dict[str, tuple[str, Call]] = {
    "states of unequal size": _lstm(1, [x(1, 3, axis=1), x(1, 9, axis=1)]),
    "states of unequal size, wrong weights": ("aten.lstm.input", call(
        x(4, 2), [x(4, 3, axis=1), x(1, 9, axis=1)],
        [w(1, 1), w(12, 2), w(12, 3), w(3, 2), w(1, 1), w(), w(1, 1), w(), w(), w(12, 3)],
        True, 2, 0.0, True, False, True)),
    "one state": _lstm(1, _STATES[:1]),
    "no weights": _lstm(2, []),
    "a weight of another shape": _lstm(2, [_WEIGHTS[0], w(3, 2), *_WEIGHTS[2:]]),
    "a weight of another dtype": _lstm(2, [*_WEIGHTS[:3], buffer(12, dtype="float64")]),
    "too few weights": _lstm(2, _WEIGHTS[:3]),
    "more layers than weights": _lstm(4, 7),
    "less than one layer": _lstm(4, -1),
    "a GRU's weight of another shape": ("aten.gru.input", Call((
        *CALLS["aten.gru.input"][0].arguments[:2], [w(9, 2), w(9, 1), w(9), w(9)],
        *CALLS["aten.gru.input"][0].arguments[3:]))),
    "a dtype that does not exist": ("aten.to.dtype", call(x(3), 999)),
    "a negative dtype": ("aten.to.dtype", call(x(3), -1)),
    "a softmax in such a dtype": ("aten.softmax.int", call(x(3), 1, 99)),
    "a softmax in a memory format": ("aten.softmax.int", call(x(3), 1, enum("channels_last"))),
    "a memory format that does not exist": ("aten.clone.default", call(x(3), memory_format=77)),
    "fewer keys than values": (
        "aten.scaled_dot_product_attention.default", call(x(2, 4, 8), x(2, 3, 8), x(2, 4000, 8))),
    "a stride of zero": ("aten.conv2d.default", call(x(2, 6, 6), w(4, 2, 3, 3), None, [0, 0], [0, 0], [1, 1], 1)),
    "no groups": ("aten.channel_shuffle.default", call(x(4, 3, 3), 0)),
    "a scale that no size has": ("aten.upsample_nearest2d.default", call(x(2, 4, 4), [8, 8], 1e-30, 1e-30)),
    "a depth's scale that no size has": (
        "aten.upsample_trilinear3d.default", call(x(2, 3, 4, 4), [6, 8, 8], False, 1e-30, 2.0, 2.0)),
    "a window beyond 32 bits": (
        "aten.conv2d.default", call(x(2, 6, 6), w(4, 2, 3, 3), None, [1, 1], [2**40] * 2, [2**40] * 2, 1)),
    "an argument too many": ("aten.relu.default", call(x(3), 1)),
    "an argument too few": ("aten.linear.default", call(x(3))),
    "a padding row that the table lacks": ("aten.embedding.default", call(w(7, 3), i(4), 900)),
}  # fmt: skip
"""What is wrong -> the operator and the call."""


def by_file(raw: dict[str, Any]) -> Graph:
    """As a person loads it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, store.GRAPH_FILE).write_text(json.dumps(raw))
        weights = {one["name"]: torch.ones(one["shape"], dtype=getattr(torch, one["dtype"])) for one in raw["weights"]}
        save_file(weights, Path(folder, store.WEIGHTS_FILE))
        return mh.load_graph(folder)


def by_wire(raw: dict[str, Any]) -> Graph:
    """As a worker is sent it, to be measured or to be run."""
    return graph_of(raw, None)


def unchecked(raw: dict[str, Any]) -> Graph:
    """As it would be run if only its records were checked."""
    graph = read_document(raw)
    graph.state.update({one.name: torch.ones(one.shape, dtype=getattr(torch, one.dtype)) for one in graph.weights})
    return graph


def ending(load: Callable[[dict[str, Any]], Graph], raw: dict[str, Any]) -> str:
    """How a process ends that loads a document and runs what it says."""
    near, far = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        told = "taken"
        try:
            problem = run(load(raw), random.Random(1), wild=False)
            if isinstance(problem, ManyhandsError):
                raise problem
        except BadGraph as error:
            told = f"refused: {error}"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(far, told[:2000].encode())
        os._exit(0)
    os.close(far)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(near, "rb") as told_by:
        return told_by.read().decode() if code == 0 else f"ended by signal {-code}"


def written(what: str) -> dict[str, Any]:
    """A case as a document that declares what a valid call makes: nothing is wrong but the call."""
    target, made = CASES[what]
    raw = document(target, made)
    raw["nodes"][-1]["outputs"] = completed(document(target, CALLS[target][0]))["nodes"][-1]["outputs"]
    return raw


def main() -> None:
    torch.set_num_threads(1)
    good = completed(document("aten.lstm.input", LSTM))
    for way in (by_file, by_wire):
        print(json.dumps(["valid", way.__name__, ending(way, good)]), flush=True)
        for what in CASES:
            print(json.dumps([what, way.__name__, ending(way, written(what))]), flush=True)
    for what in ("a weight of another shape", "fewer keys than values"):
        print(json.dumps([what, "unchecked", ending(unchecked, written(what))]), flush=True)


if __name__ == "__main__":
    main()
