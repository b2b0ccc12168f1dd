"""Restricts this process and its descendants with Landlock to files named by rules, permanently.

It also keeps them from inspecting processes outside (`/proc/PID/mem`, `/proc/PID/fd`) and, where the kernel can, from
sending those signals. Rules hold for the calling thread and what it starts: apply them before there are threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on all architectures
_ASK_VERSION, _PATH_BENEATH, _SCOPE_SIGNAL = 1, 1, 2
_FIRST_WITH_SIGNALS = 6

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = (1 << bit for bit in range(13, 16))
_ALL, _OF_FILES = (1 << 16) - 1, EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_NEWER = ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV))
"""(version, the right that it introduced)."""

READ = READ_FILE | READ_DIR
WRITE = (
    READ | WRITE_FILE | TRUNCATE | REMOVE_DIR | REMOVE_FILE | REFER | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO
    | MAKE_SYM
)  # fmt: skip
USE_DEVICE = READ | WRITE_FILE | TRUNCATE | IOCTL_DEV


@dataclass(frozen=True)
class Rule:
    """The rights to a file, or to a folder and everything beneath it."""

    path: str
    rights: int


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Return the version of the kernel's Landlock; OSError where it has none, or was started without."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "not on this system")
    return _call(_CREATE, None, 0, _ASK_VERSION)


def why_not_available() -> str:
    """Return why this system has no Landlock, in a few words; empty where it has."""
    if sys.platform != "linux":
        return "not on this system"
    try:
        version()
    except OSError as error:
        how = "started without it" if error.errno == errno.EOPNOTSUPP else "without Landlock"
        return f"kernel {platform.release()} {how}"
    return ""


def handled_rights(number: int) -> int:
    """Return the rights that a version of Landlock can deny; those that no rule grants are denied."""
    return _ALL & ~sum(right for since, right in _NEWER if number < since)


def granted(rule: Rule, number: int, *, is_folder: bool) -> int:
    """Return the rights of a rule that this version knows; for a file, only those that a file can have."""
    rights = rule.rights & handled_rights(number)
    return rights if is_folder else rights & _OF_FILES


def apply(rules: Iterable[Rule]) -> int:
    """Restrict this process to these rules, and return Landlock's version. Paths that do not exist are skipped.

    "No new privileges" must be set before. OSError where the kernel refuses, or where other threads run already.
    """
    number = version()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise OSError(errno.EBUSY, f"{threads} threads run already, which it would not reach")
    ruleset = _Ruleset(handled_rights(number), 0, _SCOPE_SIGNAL if number >= _FIRST_WITH_SIGNALS else 0)
    ruleset_descriptor = _call(_CREATE, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0)
    try:
        for rule in rules:
            _add(ruleset_descriptor, rule, number)
        _call(_RESTRICT, ruleset_descriptor, 0, 0)
    finally:
        os.close(ruleset_descriptor)
    return number


def _add(ruleset: int, rule: Rule, number: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        opened = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights = granted(rule, number, is_folder=stat.S_ISDIR(os.fstat(opened).st_mode))
            _call(_ADD, ruleset, _PATH_BENEATH, ctypes.byref(_Beneath(rights, opened)), 0)
        finally:
            os.close(opened)


def _call(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result: int = library.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return result
