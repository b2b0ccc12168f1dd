"""Tensors between workers that compute on the same GPU: they stay there, and a message says where they are.

    sender      a copy in the GPU's memory ──▶ a descriptor of DESCRIPTOR_BYTES, which travels as a message does
    receiver    opens that memory (CUDA IPC) and reads it, when the GPU has filled it; the sender's copy is freed
                when the receiver has let go of it

So topics, waits, limits and the order of messages are those of all others. A descriptor is data: its fields are checked
before anything is opened, and it can only lead to memory of this machine's GPU that another process has shared.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Sequence

import msgspec
import torch

from manyhands.facts.errors import BadSchedule, WorkerLost
from manyhands.schedule.actions import Reduce

GPU_SHARING_VARIABLE = "MANYHANDS_GPU_SHARING"
"""The environment variable with which a worker shares no memory of its GPU: 0."""
DESCRIPTOR_BYTES = 512
"""The bytes of a message for each tensor that stays where it is."""
_LENGTH_BYTES = 2
_COUNTER_NAME = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
"""The names that PyTorch gives to the memory in which it counts who has opened a tensor."""
_MOST_COUNTER_OFFSET = 10_000
_EVENT_BYTES = 64
_MOST_HANDLE_BYTES = 80
_LONGEST_REASON = 200


class _Descriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place of a tensor in a GPU's memory, in PyTorch's terms (`torch.multiprocessing`)."""

    handle: bytes
    byte_count: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool


class GpuPeers:
    """The workers that compute on this device's GPU too, in processes of their own."""

    def __init__(self, device: str, names: Iterable[str], torch_device: torch.device) -> None:
        self._device, self.torch_device = device, torch_device
        self._names = frozenset(names) - {device} if torch_device.type == "cuda" else frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def takes(self, reduce: Reduce) -> bool:
        """Return whether all devices of a reduction of tensors compute on this GPU."""
        if not self._names or reduce.what not in ("gradients", "statistics"):
            return False
        return all(name in self._names or name == self._device for name in reduce.devices)

    def forget(self) -> None:
        """Free copies that their receivers have let go of."""
        if self._names:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def described(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor for another worker, and return the descriptor of the copy, as it travels."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.torch_device)
        copy.copy_(tensor.detach())
        if copy.numel():
            _, handle, byte_count, offset, counter, counter_offset, event, waits = copy.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            made = _Descriptor(handle, byte_count, offset, counter, counter_offset, event, waits)
        else:
            made = _Descriptor(b"", 0, 0, b"", 0, b"", False)
        body = msgspec.msgpack.encode(made)
        if len(body) > DESCRIPTOR_BYTES - _LENGTH_BYTES:
            raise BadSchedule(f"The descriptor of a tensor on a GPU has {len(body)} bytes: too many to be sent.")
        row = bytearray(DESCRIPTOR_BYTES)
        row[:_LENGTH_BYTES] = len(body).to_bytes(_LENGTH_BYTES, "little")
        row[_LENGTH_BYTES : _LENGTH_BYTES + len(body)] = body
        return torch.frombuffer(row, dtype=torch.uint8)

    def opened(self, row: torch.Tensor | memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that a descriptor leads to, once the GPU has filled it; nothing may be written to it after
        the last reference to it is gone."""
        descriptor = _read(bytes(row.numpy()) if isinstance(row, torch.Tensor) else bytes(row))
        expected = math.prod(shape) * dtype.itemsize
        if descriptor.byte_count != expected:
            raise BadSchedule(f"A tensor of {expected} bytes was to come; what came has {descriptor.byte_count}.")
        if not expected:
            return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                self.torch_device.index or 0, descriptor.handle, descriptor.byte_count, descriptor.offset,
                descriptor.counter, descriptor.counter_offset, descriptor.event, descriptor.waits_for_event,
            )  # fmt: skip
        except RuntimeError as error:  # the worker that had it has died: the coordinator finds out
            raise WorkerLost(
                f"A tensor of another worker on the GPU cannot be opened: {str(error)[:_LONGEST_REASON]}.",
                hint="Where the driver forbids it, start workers with MANYHANDS_GPU_SHARING=0.",
            ) from error
        return torch.empty(0, dtype=dtype, device=self.torch_device).set_(storage).view(tuple(shape))


def _read(row: bytes) -> _Descriptor:
    """Return a descriptor, with everything in it within its limits."""
    length = int.from_bytes(row[:_LENGTH_BYTES], "little")
    try:
        descriptor = msgspec.msgpack.decode(row[_LENGTH_BYTES : _LENGTH_BYTES + length], type=_Descriptor)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadSchedule(f"What came is no descriptor of a tensor on a GPU: {error}.") from error
    is_sensible = (
        descriptor.byte_count >= 0 <= descriptor.offset
        and 0 <= descriptor.counter_offset < _MOST_COUNTER_OFFSET
        and len(descriptor.handle) <= _MOST_HANDLE_BYTES
        and len(descriptor.event) in (0, _EVENT_BYTES)
        and (not descriptor.byte_count or _COUNTER_NAME.fullmatch(descriptor.counter) is not None)
    )
    if not is_sensible:
        raise BadSchedule("What came describes no tensor on a GPU.")
    return descriptor


def gpu_key(compute: str) -> str:
    """Return a key that workers have in common which compute on one GPU and can open each other's memory there; empty
    for a worker without a GPU of this kind."""
    is_off = os.environ.get(GPU_SHARING_VARIABLE, "1") == "0"
    if is_off or not compute.startswith("cuda") or torch.version.hip is not None:
        return ""
    gpu = str(getattr(torch.cuda.get_device_properties(torch.device(compute)), "uuid", ""))
    if not gpu:
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
        shared = os.stat("/dev/shm")
        words = (gpu, machine, str(shared.st_dev), str(shared.st_ino), os.readlink("/proc/self/ns/pid"))
    except OSError:
        return ""
    return hashlib.sha256(" ".join((*words, str(os.getuid()))).encode()).hexdigest()[:16]
