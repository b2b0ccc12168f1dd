"""A graph in a folder: graph.json and weights.safetensors. No code, no pickle; input is assumed to be hostile."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from manyhands.facts.errors import BadFile, BadGraph
from manyhands.facts.network import DTYPE_BYTES
from manyhands.files.documents import make_folder, write_text_atomic
from manyhands.graph.document import from_document, state_of, to_document
from manyhands.graph.document_reader import read_document, weights_in
from manyhands.graph.graph import Graph

__all__ = ["from_document", "load", "save", "state_of", "to_document"]

GRAPH_FILE = "graph.json"
WEIGHTS_FILE = "weights.safetensors"
LARGEST_JSON_BYTES = 64 * 2**20
LARGEST_HEADER_BYTES = 16 * 2**20
_SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


def save(graph: Graph, folder: str | Path) -> None:
    """Write the graph into a folder. Each file is replaced as a whole, and the weights first, so that a new graph
    always finds its weights."""
    folder = Path(folder)
    weights_in(graph)  # refuses names that would collide
    _write_weights(_plain(state_of(graph)), folder / WEIGHTS_FILE)
    write_text_atomic(folder / GRAPH_FILE, msgspec.json.encode(to_document(graph)).decode() + "\n")


def load(folder: str | Path) -> Graph:
    """Read a graph that save(), or another program, wrote; BadGraph says what is wrong with it."""
    folder = Path(folder)
    document = _read_json(folder / GRAPH_FILE)
    return from_document(document, _read_weights(folder / WEIGHTS_FILE, read_document(document)))


def _read_weights(path: Path, graph: Graph) -> dict[str, torch.Tensor]:
    _check_header(path, graph)
    try:
        state: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise BadGraph(f"{path}: {error!s:.300}") from error
    return state


def _plain(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, tensor in state.items():
        if tensor.is_meta:
            raise BadGraph(f"Weight '{name}' has no values (it is on the meta device).")
    return separate(state)


def separate(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors in main memory that share none of it, as safetensors requires; tied weights become
    two."""
    plain: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in state.items():
        copy = tensor.detach().cpu().contiguous()
        storage = copy.untyped_storage()
        if storage.data_ptr() in addresses or storage.nbytes() != copy.nbytes:
            copy = copy.clone()
        addresses.add(storage.data_ptr())
        plain[name] = copy
    return plain


def _write_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        make_folder(path.parent)
        save_file(state, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{path}: cannot be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _read_json(path: Path) -> Any:
    content = _read(path, lambda file: file.read(LARGEST_JSON_BYTES + 1))
    if len(content) > LARGEST_JSON_BYTES:
        _refuse(path, f"more than {LARGEST_JSON_BYTES} bytes, the most that is read")
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        _refuse(path, f"not JSON: {error}"[:300])


def _read(path: Path, read: Any) -> bytes:
    try:
        with open(path, "rb") as file:
            content: bytes = read(file)
            return content
    except OSError as error:
        raise BadGraph(f"{path}: cannot be read: {error.strerror or error}.") from error


def _refuse(path: Path, problem: str) -> NoReturn:
    raise BadGraph(f"{path}: {problem}.")


def _check_header(path: Path, graph: Graph) -> None:
    """Check the names, dtypes, shapes and places of all tensors, before a byte of them is read."""
    sizes = [0, 0]

    def read(file: BinaryIO) -> bytes:
        sizes[0] = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            _refuse(path, f"{len(start)} bytes; not even a header's length")
        (sizes[1],) = struct.unpack("<Q", start)
        if sizes[1] > min(LARGEST_HEADER_BYTES, sizes[0] - 8):
            limit = f"at most {LARGEST_HEADER_BYTES} are read"
            _refuse(path, f"a header of {sizes[1]} bytes in a file of {sizes[0]}; {limit}")
        return file.read(sizes[1])

    header = _read(path, read)
    try:
        entries = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        _refuse(path, f"its header is not what it should be: {error}"[:300])
    entries.pop("__metadata__", None)
    expected = weights_in(graph)
    if set(entries) != set(expected):
        missing, strange = sorted(set(expected) - set(entries)), sorted(set(entries) - set(expected))
        _refuse(path, f"weights missing: {missing!r:.160}, not of this graph: {strange!r:.160}")
    for name, entry in entries.items():
        spec = expected[name]
        dtype, shape = _SAFETENSORS_DTYPES.get(str(entry.get("dtype"))), entry.get("shape")
        if dtype != spec.dtype or shape != list(spec.shape):
            _refuse(path, f"weight {name!r:.80} is {entry.get('dtype')!r:.20} {shape!r:.80}; the graph says "
                    f"{spec.dtype} {list(spec.shape)}")  # fmt: skip
    total = sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in expected.values())
    if sizes[0] != 8 + sizes[1] + total:
        _refuse(path, f"{sizes[0]} bytes; its header and weights make {8 + sizes[1] + total}")
