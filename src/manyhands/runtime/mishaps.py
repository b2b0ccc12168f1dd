"""Errors for what goes wrong on a worker, worded so that a person can do something about it."""

from __future__ import annotations

import errno
import re
import traceback

import psutil
import torch

from manyhands.facts.errors import GpuOutOfMemory, ManyhandsError, OutOfMemory
from manyhands.facts.units import format_bytes, parse_bytes
from manyhands.files.documents import write_failed
from manyhands.runtime.memory_kills import group_of, limit_bytes

_HINT_CHARACTERS = 2000
_ASKED = re.compile(r"(?:tried|unable) to allocate (\d+(?:\.\d+)?)\.? (bytes|[KMGT]iB)", re.IGNORECASE)
"""The size in the messages of PyTorch on a CPU and on a GPU, and of numpy."""
_GPU = re.compile(r"GPU (\d+) has a total")
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: not enough memory|(?:can't|cannot) allocate memory|std::bad_alloc", re.IGNORECASE
)
"""The messages of PyTorch's allocator on ARM, then on x86 (the system uses these words too), and of C++."""


def as_error(error: BaseException, name: str) -> ManyhandsError:
    """Return the error to report for what was raised on the worker of this name; a `ManyhandsError` stays the same."""
    if isinstance(error, ManyhandsError):
        return error
    if is_out_of_memory(error):
        return _out_of_memory(error, name)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return write_failed(error.filename or "the disk", error)
    trace = "".join(traceback.format_exception(error))
    return ManyhandsError(f"{type(error).__name__}: {error}", hint=trace[-_HINT_CHARACTERS:])


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed.

    On a CPU PyTorch says so only in the message, which differs between architectures; on a GPU by a class of its own.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def asked_bytes(error: BaseException) -> int:
    """Return how many bytes the failed allocation was to have; 0: the error does not say."""
    match = _ASKED.search(str(error))
    return parse_bytes(f"{match.group(1)} {match.group(2).replace('bytes', 'B')}") if match else 0


def _out_of_memory(error: BaseException, name: str) -> OutOfMemory:
    size = asked_bytes(error)
    more = f"{format_bytes(size)} ({size} bytes) more were asked for" if size else "more was asked for than there is"
    hint = f"Give {name} less to hold: a smaller batch, more micro-batches, or more devices to share the work."
    kind = GpuOutOfMemory if isinstance(error, torch.OutOfMemoryError) else OutOfMemory
    return kind(f"out of memory: {more}; {_in_use(error)}.", hint=hint)


def _in_use(error: BaseException) -> str:
    """Return how much memory is in use, and of how much."""
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        match = _GPU.search(str(error))
        gpu = int(match.group(1)) if match else torch.cuda.current_device()
        held, has = torch.cuda.memory_allocated(gpu), torch.cuda.get_device_properties(gpu).total_memory
        return f"its tensors hold {format_bytes(held)} of the GPU's {format_bytes(has)}"
    process = psutil.Process()
    held, total_bytes = process.memory_info().rss, psutil.virtual_memory().total
    limit = limit_bytes(group_of(process.pid))
    of = f", of which its control group may have {format_bytes(limit)}" if 0 < limit < total_bytes else ""
    return f"the process holds {format_bytes(held)}, the machine has {format_bytes(total_bytes)}{of}"
