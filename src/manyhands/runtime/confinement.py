"""Confines a worker's process: it may compute, communicate, and read the files it was given, and nothing else.

A worker computes what others request and parses what they send. If one of the libraries that do this were ever made to
run an attacker's code, that code should find little: no program to start, no home folder to read, nothing to overwrite.
Each of these is applied where the kernel has it, before the first thread starts:

    no new privileges   no program it could start would have more rights than the worker itself
    seccomp             system calls that a worker never makes fail (`seccomp`)
    Landlock            files other than those below cannot be opened, nor other processes inspected (`landlock`)
    own temp folder     readable by nobody else, removed at the end (`own_folder`)

A worker's graphs are data, so none of this gets in its way. `--no-confine`, or MANYHANDS_CONFINE=off, leaves it out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from manyhands.facts.collectives import NCCL_VARIABLES
from manyhands.facts.errors import BadValue
from manyhands.runtime import landlock, seccomp
from manyhands.runtime.landlock import READ, REMOVE_DIR, USE_DEVICE, WRITE, Rule
from manyhands.runtime.own_folder import OwnFolder, own_folder

CONFINE_VARIABLE = "MANYHANDS_CONFINE"
NO_NEW_PRIVILEGES, SECCOMP, LANDLOCK, OWN_FOLDER = "no new privileges", "seccomp", "Landlock", "own temp folder"
_PR_SET_NO_NEW_PRIVS = 38

_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/opt/nvidia", "/opt/cuda", "/opt/rocm", "/etc",
    "/proc", "/sys", "/var/lib/dbus",
)  # fmt: skip
_NAME_SERVERS = "/etc/resolv.conf"
"""Often a link to a file that is replaced whenever the network changes."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_GPU_DEVICES = ("nvidia*", "nvhost*", "nvmap*", "nvgpu", "dri", "kfd", "host1x-fence")
_GPU_MEMORY_DEVICE = "/dev/nvidia-uvm"
_CACHES = {"CUDA_CACHE_PATH": "cuda", "PYTORCH_KERNEL_CACHE_PATH": "kernels", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Caches of compiled code, moved to where the worker may write."""


class Confinement(msgspec.Struct, frozen=True):
    """The parts of the confinement that are in effect, and those that are not."""

    parts: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """The missing parts, each with the reason: 'Landlock (kernel 5.4 without Landlock)'."""

    @property
    def text(self) -> str:
        if not self.parts:
            return "; ".join(("not confined", *self.missing))
        lacking = f"; without {', '.join(self.missing)}" if self.missing else ""
        return f"{', '.join(self.parts)}{lacking}"

    @property
    def sentence(self) -> str:
        """A sentence for the person who started the worker."""
        return f"Confined: {self.text}." if self.parts else f"This worker is {self.text}."


def is_asked_for(is_wanted: bool = True) -> bool:
    """Return whether workers are to be confined, by the command line and the environment.

    BadValue where the environment variable is neither on nor off.
    """
    word = os.environ.get(CONFINE_VARIABLE, "").strip().lower()
    if word not in ("", "on", "off"):
        raise BadValue(
            f"{CONFINE_VARIABLE} is {word!r:.80}; it must be on or off.",
            hint=f"Unset it: workers are confined where the kernel can ({CONFINE_VARIABLE}=off: they are not).",
        )
    return is_wanted and word != "off"


@contextlib.contextmanager
def confined(
    *, is_wanted: bool = True, reads: Sequence[str] = (), writes: Sequence[str | Path] = (), compute: str = "cpu"
) -> Iterator[Confinement]:
    """Confine this process and what it forks, for good; only the folder for temporary files ends with the block.

    `reads` and `writes`: files and folders it needs besides its own. Enter it before there are threads. Parts that the
    kernel does not support are left out and reported in `missing`. A process with a GPU also gets the environment in
    which NCCL is used, confined or not.
    """
    if compute != "cpu":
        os.environ.update(NCCL_VARIABLES)
    if not is_asked_for(is_wanted):
        yield Confinement(missing=("switched off",))
        return
    if compute != "cpu":
        _make_gpu_devices()
    with contextlib.ExitStack() as stack:
        parts: list[str] = []
        missing: list[str] = []
        folder = None
        try:
            folder = stack.enter_context(own_folder())
            os.environ.update({name: str(folder.path / place) for name, place in _CACHES.items()})
            parts.append(OWN_FOLDER)
        except OSError as error:
            missing.append(f"{OWN_FOLDER} ({error.strerror or error})")
        _restrict(rules(folder, reads, writes, is_gpu=compute != "cpu"), parts, missing)
        yield Confinement(tuple(parts), tuple(missing))


def _restrict(allowed: Sequence[Rule], parts: list[str], missing: list[str]) -> None:
    try:
        _no_new_privileges()
    except OSError as error:  # the other parts need it
        why = error.strerror or str(error)
        missing += [f"{part} ({why})" for part in (NO_NEW_PRIVILEGES, SECCOMP, LANDLOCK)]
        return
    parts.append(NO_NEW_PRIVILEGES)
    try:
        parts.append(f"{LANDLOCK} {landlock.apply(allowed)}")
    except OSError as error:
        missing.append(f"{LANDLOCK} ({landlock.why_not_available() or error.strerror or error})")
    try:
        seccomp.apply()
        parts.append(SECCOMP)
    except OSError as error:
        missing.append(f"{SECCOMP} ({seccomp.why_not_available() or error.strerror or error})")


def available() -> Confinement:
    """Return the confinement that this machine's kernel offers to workers, without applying any of it."""
    reasons = {LANDLOCK: landlock.why_not_available(), SECCOMP: seccomp.why_not_available()}
    if sys.platform != "linux":
        reasons[NO_NEW_PRIVILEGES] = "not on this system"
    available_parts = [part for part in (OWN_FOLDER, NO_NEW_PRIVILEGES, LANDLOCK, SECCOMP) if not reasons.get(part)]
    named = [f"{part} {landlock.version()}" if part == LANDLOCK else part for part in available_parts]
    return Confinement(tuple(named), tuple(f"{part} ({why})" for part, why in reasons.items() if why))


def rules(
    folder: OwnFolder | None, reads: Sequence[str] = (), writes: Sequence[str | Path] = (), *, is_gpu: bool = False
) -> list[Rule]:
    """Return rules for all files and folders a worker may open: Python's, the system's, devices, its data; no home."""
    servers = os.path.dirname(os.path.realpath(_NAME_SERVERS))
    allowed = [Rule(path, READ) for path in (*_SYSTEM, servers, *_python_folders())]
    allowed += [Rule(os.path.realpath(path), READ) for path in reads]
    allowed += [Rule(f"/dev/{name}", USE_DEVICE) for name in _DEVICES]
    allowed += [Rule("/dev/shm", WRITE), Rule("/proc/self", USE_DEVICE)]
    if is_gpu:
        allowed += [Rule(path, USE_DEVICE) for name in _GPU_DEVICES for path in sorted(glob.glob(f"/dev/{name}"))]
    allowed += [Rule(str(path), WRITE) for path in writes]
    if folder is not None:
        allowed += [Rule(str(folder.path), WRITE), Rule(str(folder.parent), REMOVE_DIR)]
    return allowed


def _python_folders() -> list[str]:
    """Return the folders of modules and of the libraries beside them."""
    package_folder = str(Path(__file__).resolve().parents[1])
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    listed = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path, *libraries, package_folder)
    return list(dict.fromkeys(os.path.realpath(path) for path in listed if os.path.isabs(path)))


def _no_new_privileges() -> None:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "not on this system")
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _make_gpu_devices() -> None:
    """Make the CUDA driver create its device files, in a child that is not confined: it starts a program to do so."""
    if not os.path.exists("/dev/nvidiactl") or os.path.exists(_GPU_MEMORY_DEVICE):
        return
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            ctypes.CDLL("libcuda.so.1").cuInit(0)
        os._exit(0)
    os.waitpid(child, 0)
