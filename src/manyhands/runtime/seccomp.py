"""A seccomp filter: system calls that a worker never makes fail with "operation not permitted".

The filter is a small program of the kernel's BPF machine, assembled here to avoid a dependency on a library for it:

    other architecture? ──▶ refused          the numbers below would mean something else
    x32 number?         ──▶ refused          x86-64 only: a second set of numbers for the same calls
    on the list?        ──▶ refused          starting programs, other processes' memory, mounts, modules, clocks
    clone3?             ──▶ "no such call"   its flags lie in memory a filter cannot read; the C library uses clone then
    clone               ──▶ refused with flags that make namespaces
    socket              ──▶ refused but for IPv4, IPv6, Unix and netlink
    ioctl               ──▶ refused where it would type into the terminal
    anything else       ──▶ allowed

Calls that are always allowed cost nothing: the kernel (5.11 or newer) remembers them by number.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from dataclasses import dataclass

_SAME_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
    "quotactl_fd": 443,
}  # fmt: skip
"""Calls added since Linux 5.1, which have one number on all architectures."""
_X86_64 = {
    "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "request_key": 249, "keyctl": 250,
    "reboot": 169, "swapon": 167, "swapoff": 168, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159,
    "clock_adjtime": 305, "personality": 135, "quotactl": 179, "acct": 163, "open_by_handle_at": 304, "syslog": 103,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "modify_ldt": 154,
}  # fmt: skip
_AARCH64 = {
    "execve": 221, "execveat": 281, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
    "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106,
    "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217, "request_key": 218, "keyctl": 219,
    "reboot": 142, "swapon": 224, "swapoff": 225, "settimeofday": 170, "clock_settime": 112, "adjtimex": 171,
    "clock_adjtime": 266, "personality": 92, "quotactl": 60, "acct": 89, "open_by_handle_at": 265, "syslog": 116,
    "sethostname": 161, "setdomainname": 162,
}  # fmt: skip
_CLONE3 = 435
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: netlink, which lists interfaces
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_TYPING = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

# The machine's instructions, and what a filter returns
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24  # low halves: little-endian
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_X32_BIT = 0x40000000
_SET_MODE_FILTER, _ALL_THREADS = 1, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


@dataclass(frozen=True)
class Architecture:
    """The numbers of system calls on a kind of processor."""

    audit: int
    """The kernel's identifier of the architecture in a filter's data."""
    seccomp: int
    clone: int
    socket: int
    ioctl: int
    denied: dict[str, int]
    has_x32: bool = False


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, 317, 56, 41, 16, _X86_64 | _SAME_EVERYWHERE, has_x32=True),
    "aarch64": Architecture(0xC00000B7, 277, 220, 198, 29, _AARCH64 | _SAME_EVERYWHERE),
}


def assemble(architecture: Architecture) -> bytes:
    """Return the filter's instructions, 8 bytes each: code, steps to skip where true and where false, operand."""
    refuse = _fail_with(errno.EPERM)
    return b"".join(
        (
            _load(_ARCHITECTURE_AT), _unless(_EQUAL, architecture.audit), refuse,
            _load(_NUMBER_AT),
            *((_where(_AT_LEAST, _X32_BIT), refuse) if architecture.has_x32 else ()),
            *(part for number in sorted(architecture.denied.values()) for part in (_where(_EQUAL, number), refuse)),
            _where(_EQUAL, _CLONE3), _fail_with(errno.ENOSYS),
            _where(_EQUAL, architecture.clone, skip=4),
            _load(_FIRST_ARGUMENT_AT), _where(_ANY_BIT, _NEW_NAMESPACES), refuse, _give(_ALLOW),
            _where(_EQUAL, architecture.socket, skip=2 + len(_FAMILIES)),
            _load(_FIRST_ARGUMENT_AT), *(_equal_skips(family, skip) for family, skip in _counted_down(_FAMILIES)),
            _fail_with(errno.EAFNOSUPPORT),
            _where(_EQUAL, architecture.ioctl, skip=1 + 2 * len(_TYPING)),
            _load(_SECOND_ARGUMENT_AT), *(part for request in _TYPING for part in (_where(_EQUAL, request), refuse)),
            _give(_ALLOW),
        )
    )  # fmt: skip


def why_not_available() -> str:
    """Return why this system has no such filter, in a few words; empty where it has one."""
    if sys.platform != "linux":
        return "not on this system"
    if platform.machine() not in ARCHITECTURES:
        return f"no filter for {platform.machine()}"
    if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        return f"kernel {platform.release()} without seccomp filters"
    return ""


def apply() -> None:
    """Filter the system calls of every thread of this process and of its descendants, permanently.

    "No new privileges" must be set before. Raises OSError where the kernel refuses.
    """
    if why := why_not_available():
        raise OSError(errno.ENOSYS, why)
    architecture = ARCHITECTURES[platform.machine()]
    code = assemble(architecture)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.argtypes = (ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_void_p)
    result = library.syscall(architecture.seccomp, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program))
    if result:  # above 0: a thread to which the filter could not be applied
        number = ctypes.get_errno() if result < 0 else errno.EBUSY
        raise OSError(number, os.strerror(number))


# One instruction each


def _instruction(code: int, where_true: int, where_false: int, operand: int) -> bytes:
    return struct.pack("<HBBI", code, where_true, where_false, operand)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, 0, 0, offset)


def _where(test: int, operand: int, skip: int = 1) -> bytes:
    """Return a test after which the next `skip` instructions run where it holds, and are skipped where it does not."""
    return _instruction(test, 0, skip, operand)


def _unless(test: int, operand: int) -> bytes:
    """Return a test after which the next instruction runs only where it does not hold."""
    return _instruction(test, 1, 0, operand)


def _equal_skips(operand: int, skip: int) -> bytes:
    return _instruction(_EQUAL, skip, 0, operand)


def _give(value: int) -> bytes:
    return _instruction(_RETURN, 0, 0, value)


def _fail_with(number: int) -> bytes:
    return _give(_FAIL | number)


def _counted_down(values: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return each value with the steps from behind its test to behind the instruction that follows the last test."""
    return [(int(value), len(values) - index) for index, value in enumerate(values)]
