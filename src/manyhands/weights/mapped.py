"""Weights that stay in their safetensors files: modules built without memory for them, and tensors mapped from files.

    with mh.without_weights():                  # parameters are on the meta device; computed buffers are real
        model = Qwen2ForCausalLM(config)
    mh.map_weights(model, "folder")             # parameters are in the file's pages until something reads them

A mapped tensor is an ordinary one on the CPU. Its pages are read from the file when they are touched and can be given
back at any time (`give_back_pages`); writing to it changes a private copy of the page, never the file.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from manyhands.facts.errors import BadFile, BadValue
from manyhands.files.plain import open_descriptor

INDEX_FILE = "model.safetensors.index.json"
LARGEST_HEADER_BYTES = 100 * 2**20
LARGEST_INDEX_BYTES = 64 * 2**20
_MOST_NAMES = 5
_PAGE_OUT = 21
"""Linux' MADV_PAGEOUT: pages that can be read again leave memory; what was written stays."""
PAGES_HELD_BYTES = 512 * 2**20
"""Memory of files, PyTorch's libraries among them, that is not worth giving back."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CREATORS = frozenset({torch.empty, torch.rand, torch.randn})


class _WithoutMemory(TorchFunctionMode):
    """A mode in which tensors that begin without a value, or with random numbers, are made on the meta device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function in _CREATORS and options.get("device") is None and options.get("out") is None:
            options["device"] = "meta"
            options.pop("generator", None)
        return function(*args, **options)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules whose parameters take no memory: they are on the meta device. Buffers that are computed are real,
    and so is whatever else the modules compute."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign,assignment]
    try:
        with _WithoutMemory():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _MappedFile(mmap.mmap):
    """A file's bytes in memory, read when touched."""


_mapped_files: weakref.WeakSet[_MappedFile] = weakref.WeakSet()


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a safetensors file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    """The place of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def stored_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Return what a safetensors file holds, by name; of a folder, all its files (those of its index, if it has one)."""
    path = Path(path)
    if not path.is_dir():
        return _listed(path)
    index = path / INDEX_FILE
    files = _indexed(index) if index.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise BadFile(f"{path}: holds no safetensors file.", hint="Name the folder with model.safetensors in it.")
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _listed(file).items():
            if name in stored:
                raise BadFile(f"{file}: holds '{name:.120}', as {stored[name].path} does.", hint="Keep one of them.")
            stored[name] = tensor
    return stored


def _indexed(index: Path) -> list[Path]:
    if index.stat().st_size > LARGEST_INDEX_BYTES:
        raise BadFile(f"{index}: more than {LARGEST_INDEX_BYTES} bytes, the most that is read.")
    try:
        names = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"].values()
        return [index.parent / Path(name).name for name in sorted(set(names))]
    except (msgspec.DecodeError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise BadFile(f"{index}: is no index of safetensors files: {error!s:.200}") from error


def _listed(path: Path) -> dict[str, StoredTensor]:
    try:
        with os.fdopen(open_descriptor(path, os.O_RDONLY), "rb") as file:
            size, start = os.fstat(file.fileno()).st_size, file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(LARGEST_HEADER_BYTES, size - 8):
                raise BadFile(f"{path}: is no safetensors file: its header would be {length} bytes of {size}.")
            header = file.read(length)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}.") from error
    try:
        entries = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
        entries.pop("__metadata__", None)
        return {name: _stored(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadFile(f"{path}: is no safetensors file: {error!s:.200}") from error


def _stored(path: Path, name: str, entry: Mapping[str, Any], start: int, size: int) -> StoredTensor:
    (first, last), shape = entry["data_offsets"], tuple(map(int, entry["shape"]))
    dtype = _DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise BadFile(f"{path}: '{name:.120}' is of type {entry['dtype']!s:.20}, which is not read here.")
    tensor = StoredTensor(path, dtype, shape, start + first)
    if min(shape, default=0) < 0 or not 0 <= first <= last <= size - start or last - first != tensor.nbytes:
        raise BadFile(f"{path}: the place of '{name:.120}' in it does not fit its shape or the file.")
    return tensor


class TensorFiles:
    """The mapped files from which tensors are made."""

    def __init__(self) -> None:
        self._files: dict[Path, _MappedFile] = {}

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Return a tensor whose memory is its place in the file."""
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if stored.path not in self._files:
            descriptor = open_descriptor(stored.path, os.O_RDONLY)
            try:
                self._files[stored.path] = _MappedFile(descriptor, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
            _mapped_files.add(self._files[stored.path])
        count = prod(stored.shape)
        memory = self._files[stored.path]
        if stored.first % stored.dtype.itemsize:  # torch wants aligned numbers; writers pad the header so that they are
            return torch.frombuffer(bytearray(memory[stored.first : stored.first + stored.nbytes]), dtype=stored.dtype
                                    ).view(stored.shape)  # fmt: skip
        return torch.frombuffer(memory, dtype=stored.dtype, count=count, offset=stored.first).view(stored.shape)


def map_weights(module: nn.Module, path: str | Path) -> nn.Module:
    """Give a module the weights of a safetensors file, or of a folder of them, without reading them, and return it.

    Parameters and buffers that are in the file become mapped; computed buffers that are not in it stay as they are.
    What has no values then, or another shape or type in the file, is refused by name.
    """
    stored, files = stored_tensors(path), TensorFiles()
    places = _places(module)
    holders: dict[int, list[str]] = {}
    for name, (child, kind, key) in places.items():
        holders.setdefault(id(getattr(child, kind)[key]), []).append(name)
    missing: list[str] = []
    for names in holders.values():  # tied weights are one tensor; a file may name any of them
        child, kind, key = places[names[0]]
        tensor: torch.Tensor = getattr(child, kind)[key]
        held = next((name for name in names if name in stored), None)
        if held is None:
            is_needed = tensor.is_meta or kind == "_parameters"
            missing += names[:1] if is_needed else []
            continue
        _check_alike(held, stored[held], tensor)
        made: torch.Tensor = files.tensor(stored[held])
        if kind == "_parameters":
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        for each in names:
            child, kind, key = places[each]
            getattr(child, kind)[key] = made
    if missing:
        raise _missing(module, missing, path)
    return module


def _places(module: nn.Module) -> dict[str, tuple[nn.Module, str, str]]:
    """Return full name -> (module, dictionary, key) of every parameter and buffer, tied ones included."""
    return {
        f"{path}.{key}" if path else key: (child, kind, key)
        for path, child in module.named_modules(remove_duplicate=False)
        for kind in ("_parameters", "_buffers")
        for key, tensor in getattr(child, kind).items()
        if tensor is not None
    }


def _check_alike(name: str, stored: StoredTensor, tensor: torch.Tensor) -> None:
    if (stored.shape, stored.dtype) != (tuple(tensor.shape), tensor.dtype):
        raise BadValue(
            f"{stored.path}: '{name:.120}' is {_text(stored.dtype)} {list(stored.shape)}; the module's is "
            f"{_text(tensor.dtype)} {list(tensor.shape)}.",
            hint="Build the module with the configuration and the type (torch.set_default_dtype) of its file.",
        )


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _missing(module: nn.Module, names: Iterable[str], path: str | Path) -> BadValue:
    buffers = {name for name, (_, kind, _) in _places(module).items() if kind == "_buffers"}
    listed = list(names)
    only_buffers = all(name in buffers for name in listed)
    computed = "Build the module within `with mh.without_weights():`, where what it computes is real."
    return BadValue(
        f"{path}: has no values for {named(listed)}.",
        hint=computed if only_buffers else "Name the file that the module's state dict was written to.",
    )


def named(names: Iterable[str]) -> str:
    """Return a few of the names, for a person, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(f"'{name:.120}'" for name in listed[:_MOST_NAMES]) + more


def refuse_without_values(state: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights on the meta device, by name: they have no values."""
    names = [name for name, tensor in state.items() if tensor.is_meta]
    if names:
        raise BadValue(
            f"{named(names)}: no values (on the meta device).",
            hint='mh.map_weights(model, "FOLDER") gives a module the weights of its safetensors files.',
        )


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Put tensors on the CPU in place of those on the meta device, whose memory is never touched and so never taken;
    yield stand-in's address -> the tensor it stands for."""
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}
    meant: dict[int, torch.Tensor] = {}
    for child, kind, key in _places(module).values():
        tensors = getattr(child, kind)
        tensor = tensors[key]
        if not tensor.is_meta:
            continue
        stand_in = made.get(id(tensor))
        if stand_in is None:
            stand_in = torch.empty_like(tensor, device="cpu", requires_grad=False)
            if stand_in.numel():
                meant[stand_in.data_ptr()] = tensor.detach()
            if isinstance(tensor, nn.Parameter):
                stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
            made[id(tensor)] = stand_in
        before.append((tensors, key, tensor))
        tensors[key] = stand_in
    try:
        yield meant
    finally:
        for tensors, key, tensor in before:
            tensors[key] = tensor


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is a place in a mapped file."""
    if tensor.is_meta or not tensor.is_cpu or not tensor.numel():
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(start <= address < start + len(file) for file in _mapped_files for start in (_address(file),))


def _address(file: _MappedFile) -> int:
    return torch.frombuffer(file, dtype=torch.uint8, count=1).data_ptr()


def give_back_pages(beyond_bytes: int = PAGES_HELD_BYTES) -> None:
    """Give the memory of all mapped files back to the system, once this process has more than so many bytes of files;
    what is read again is read from the files again."""
    if _mapped_files and _file_bytes() > beyond_bytes:
        for file in list(_mapped_files):
            with suppress(OSError, ValueError):  # a kernel without it keeps the pages until memory runs short
                file.madvise(_PAGE_OUT)


def _file_bytes() -> int:
    """Return the bytes of files, libraries among them, that are in this process's memory."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0
