"""Checks what a run needs from this machine. Torch is not loaded here: it is tried in a separate process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.doctor.check import BROKEN, OK, WARNING, Check, limits_text, requirement, unmet
from manyhands.doctor.confinement import confinement_checks
from manyhands.facts.extras import EXTRAS
from manyhands.facts.extras import is_here as is_extra_here

WORKER_BYTES = 400_000_000
"""Memory of a worker before it has a tensor: 250 MB after joining, 340 MB in its first step, measured with torch 2.13
on x86-64."""
ROOMY = 2.0
"""This many times as much leaves room for weights and activations."""
LEAST_DISK_BYTES, ROOMY_DISK_BYTES = 100_000_000, 1_000_000_000
SMALLEST_SHARED_BYTES = 64 * 2**20
HOT_DEGREES = 80.0
TORCH_SECONDS = 180.0
"""Loading torch from a cold SD card takes long."""
DISTRIBUTION = "manyhands"
_TRY_TORCH = """
import json, torch, numpy
torch.conv2d(torch.ones(1, 1, 4, 4, requires_grad=True), torch.ones(1, 1, 3, 3)).sum().backward()
torch.from_numpy(numpy.ones(2)).numpy()
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "gpus": gpus, "cuda": torch.version.cuda}))
"""
_THROTTLED = {0: "its voltage is too low", 1: "its clock is capped", 2: "it is throttled", 3: "it is near its limit"}
_SETTING_ITSELF = ("intel_pstate", "intel_cpufreq", "amd-pstate", "amd-pstate-epp")
"""Drivers whose governor 'powersave' still raises the clock on demand."""


def machine_checks(workers: int) -> Iterator[Check]:
    """Yield all checks of this machine, for a number of workers on it."""
    yield python_check(platform.python_version(), *_python_limits())
    packages = list(package_checks())
    yield from packages
    tried = try_torch()
    yield torch_check(tried, _torch_limits())
    if not isinstance(tried, str):
        yield gpu_check(tried, is_driver_here=shutil.which("nvidia-smi") is not None)
    if any(check.state == BROKEN for check in packages):
        return  # what follows needs them
    from manyhands.runtime.memory_kills import free_bytes

    yield cores_check(usable_cores(), workers)
    yield memory_check(free_bytes(), workers)
    from manyhands.files.documents import cache_folder

    yield folder_check("cache folder", cache_folder(), "MANYHANDS_HOME=/another/folder")
    yield folder_check("run folder", Path("runs"), "cd /another/folder (runs are kept in runs/ there)")
    yield shared_memory_check(*_shared_memory())
    yield from confinement_checks()
    if (limits := _open_files()) is not None:
        yield open_files_check(*limits, workers)
    yield from speed_checks(Path("/sys"))
    yield lab_check()
    yield from extra_checks()


# Python and packages


def _metadata() -> importlib.metadata.PackageMetadata | None:
    try:
        return importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return None


def _python_limits() -> tuple[list[tuple[str, str]], list[str]]:
    """Return the limits that the package sets for Python, and the versions it was tried with."""
    metadata = _metadata()
    if metadata is None:
        return [], []
    _, limits = requirement(f"python {metadata['Requires-Python'] or ''}") or ("", [])
    before = "Programming Language :: Python :: "
    named = [text.removeprefix(before) for text in metadata.get_all("Classifier") or [] if text.startswith(before)]
    return limits, [text for text in named if "." in text]


def python_check(version: str, limits: list[tuple[str, str]], tried: Sequence[str]) -> Check:
    needed = f"{limits_text(limits)}; tried with {', '.join(tried)}" if tried else limits_text(limits)
    if unmet(version, limits):
        newest = tried[-1] if tried else "3.13"
        fix = f"python{newest} -m venv .venv && .venv/bin/pip install manyhands"
        return Check("Python", BROKEN, version, needed, fix)
    if sys.maxsize < 2**32:
        return Check(
            "Python", BROKEN, f"{version}, 32 bits", "64 bits: torch has no others", "Install a 64-bit system."
        )
    if tried and ".".join(version.split(".")[:2]) not in tried:
        return Check("Python", WARNING, version, needed, f"python{tried[-1]} -m venv .venv (if something fails)")
    return Check("Python", OK, version, needed)


def _requirements() -> list[tuple[str, list[tuple[str, str]]]]:
    try:
        listed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    return [parsed for text in listed if (parsed := requirement(text)) is not None]


def package_checks() -> Iterator[Check]:
    """Yield one check for all packages but torch, and one for each package with a problem."""
    if _metadata() is None:
        problem = "manyhands is not installed, only its source is here"
        yield Check("packages", WARNING, problem, "an installed package", "pip install -e .")
        return
    good: list[str] = []
    for name, limits in _requirements():
        if name == "torch":
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if (check := package_check(name, version, limits)) is not None:
            yield check
        else:
            good.append(f"{name} {version}")
    yield Check("packages", OK, ", ".join(good), "as pip installs them")


def package_check(name: str, version: str, limits: list[tuple[str, str]]) -> Check | None:
    """Return the problem of a package, or None if there is none."""
    fix = f"pip install '{name}{','.join(sign + limit for sign, limit in limits)}'"
    if not version:
        return Check("packages", BROKEN, f"{name} is not installed", limits_text(limits), fix)
    how = unmet(version, limits)
    if not how:
        return None
    return Check("packages", BROKEN if how == "older" else WARNING, f"{name} {version}", limits_text(limits), fix)


# Torch


def try_torch(code: str = _TRY_TORCH, limit_seconds: float = TORCH_SECONDS) -> dict[str, Any] | str:
    """Return what torch reports in a separate process, or how that process failed.

    On a processor that it was not built for, torch kills its process without a message.
    """
    if importlib.util.find_spec("torch") is None:
        return "it is not installed"
    try:
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return f"it was not loaded within {limit_seconds:g} s"
    except OSError as error:
        return f"no process could be started: {error.strerror}"
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        why = ": it was built for another processor" if process.returncode == -signal.SIGILL else ""
        return f"its process was killed by {name}{why}"
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        return f"it cannot be used: {(process.stderr.strip().splitlines() or ['no reason given'])[-1][:200]}"
    reported: dict[str, Any] = json.loads(lines[-1])
    return reported


def _torch_limits() -> list[tuple[str, str]]:
    return next((limits for name, limits in _requirements() if name == "torch"), [])


def torch_check(tried: dict[str, Any] | str, limits: list[tuple[str, str]]) -> Check:
    requirement_text = "torch" + ",".join(sign + limit for sign, limit in limits)
    needed, fix = limits_text(limits), f"pip install '{requirement_text}'"
    if isinstance(tried, str):
        if "SIGILL" in tried:
            fix = "Install an older torch, or one built for this board: pip install 'torch==2.6.*'"
        elif "numpy" in tried.lower():
            fix = "pip install --upgrade numpy"
        return Check("torch", BROKEN, tried, needed, fix)
    how = unmet(tried["version"], limits)
    if how:
        return Check("torch", BROKEN if how == "older" else WARNING, tried["version"], needed, fix)
    return Check("torch", OK, tried["version"], needed)


def gpu_check(tried: dict[str, Any], *, is_driver_here: bool) -> Check:
    gpus = tried["gpus"]
    if gpus:
        return Check("GPU", OK, ", ".join(gpus), "none; a worker uses one with --compute cuda")
    if is_driver_here:
        why = "torch is a build for the CPU" if not tried["cuda"] else f"torch's CUDA {tried['cuda']} does not find it"
        fix = "Install torch's CUDA build, or go on with the CPU."
        return Check("GPU", WARNING, f"a driver is here, and {why}", "none: the CPU computes", fix)
    return Check("GPU", OK, "none", "none: the CPU computes")


# Cores, memory, disk


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    import psutil

    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def cores_check(cores: int, workers: int) -> Check:
    needed = f"one for each worker on this machine: {workers}" if workers else "one"
    if cores < workers:
        fix = f"Start fewer: --devices {cores} (or wait longer: they take turns)"
        return Check("cores", WARNING, str(cores), needed, fix)
    return Check("cores", OK, str(cores), needed)


def memory_check(free: int, workers: int) -> Check:
    from manyhands.facts.units import format_bytes

    count = max(1, workers)
    least = count * WORKER_BYTES
    available = f"{format_bytes(free)} free"
    needed = f"{format_bytes(least)} for {count} worker(s), and as much again for what they train"
    if free < least:
        most = max(0, free // WORKER_BYTES)
        fix = f"Start at most {most}: --devices {most}" if most else "End other programs, or add swap."
        return Check("memory", BROKEN, available, needed, fix)
    if free < ROOMY * least:
        return Check("memory", WARNING, available, needed, "Small networks fit; else end other programs.")
    return Check("memory", OK, available, needed)


def folder_check(subject: str, folder: Path, elsewhere: str) -> Check:
    """Return whether a folder can be written to. It writes and removes a file, because a disk may be mounted
    read-only."""
    from manyhands.facts.units import format_bytes

    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    needed = f"writable, {format_bytes(LEAST_DISK_BYTES)} free or more"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        fix = f"sudo chown $USER {place}, or: {elsewhere}"
        return Check(subject, BROKEN, f"{folder}: cannot be written to: {error.strerror}", needed, fix)
    free = shutil.disk_usage(place).free
    return room_check(subject, str(folder), free, elsewhere)


def room_check(subject: str, folder: str, free: int, elsewhere: str) -> Check:
    from manyhands.facts.units import format_bytes

    available, needed = (
        f"{folder}: {format_bytes(free)} free",
        f"writable, {format_bytes(LEAST_DISK_BYTES)} free or more",
    )
    if free < LEAST_DISK_BYTES:
        return Check(subject, BROKEN, available, needed, f"Delete old runs and checkpoints, or: {elsewhere}")
    if free < ROOMY_DISK_BYTES:
        return Check(
            subject, WARNING, available, needed, "Checkpoints of a large network may not fit: delete old runs."
        )
    return Check(subject, OK, available, needed)


def _shared_memory() -> tuple[bool, str, int | None]:
    """Return whether shared memory can be made, the size that was asked for, and the size of /dev/shm."""
    size = None
    with contextlib.suppress(OSError):
        size = shutil.disk_usage("/dev/shm").total
    return hasattr(os, "memfd_create"), os.environ.get("MANYHANDS_SHARED_MEMORY", ""), size


def shared_memory_check(can_share: bool, setting: str, size: int | None) -> Check:
    """Return a check of shared memory: workers of one machine exchange tensors through it, and torch's data loaders use
    /dev/shm."""
    from manyhands.facts.units import format_bytes

    subject, shown = "shared memory", "no /dev/shm" if size is None else f"/dev/shm has {format_bytes(size)}"
    needed = f"memfd_create, and {format_bytes(SMALLEST_SHARED_BYTES)} of /dev/shm for data loaders"
    if not can_share:
        return Check(subject, WARNING, "none on this system", needed, "Workers of one machine use TCP: slower.")
    if setting == "0":
        return Check(subject, WARNING, "switched off", needed, "unset MANYHANDS_SHARED_MEMORY")
    if size is not None and size < SMALLEST_SHARED_BYTES:
        fix = "sudo mount -o remount,size=512M /dev/shm (in a container: docker run --shm-size 512m)"
        return Check(subject, WARNING, shown, needed, fix)
    return Check(subject, OK, f"yes; {shown}", needed)


def _open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # not on this system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    return (2**20 if soft == endless else soft), (2**20 if hard == endless else hard)


def open_files_check(soft: int, hard: int, workers: int) -> Check:
    """Return a check of the limit on open files: the coordinator has two connections to each worker, and a worker has
    one to each other worker."""
    least = 64 + 8 * max(1, workers)
    allowed, needed = f"at most {soft}", f"{least} for {max(1, workers)} worker(s)"
    if soft >= least:
        return Check("open files", OK, allowed, needed)
    fix = f"ulimit -n {min(hard, 4096)}"
    if hard < least:
        fix = f"As root: ulimit -Hn 4096 (at most {hard} are allowed now), then ulimit -n 4096"
    return Check("open files", BROKEN, allowed, needed, fix)


# Clock rate and heat


def speed_checks(system: Path) -> Iterator[Check]:
    """Yield checks of the processor's clock, where Linux reports it: its governor, and whether heat or voltage has
    capped it."""
    policies = sorted(system.glob("devices/system/cpu/cpu[0-9]*/cpufreq"))
    governors = {_read(policy / "scaling_governor") for policy in policies}
    drivers = {_read(policy / "scaling_driver") for policy in policies}
    if "powersave" in governors and not drivers & set(_SETTING_ITSELF):
        fix = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
        yield Check("clock rate", WARNING, "governor powersave: the slowest rate there is", "any other governor", fix)
    elif governors:
        yield Check("clock rate", OK, f"governor {', '.join(sorted(governors))}", "not powersave")
    reasons = []
    text = _read(system / "devices/platform/soc/soc:firmware/get_throttled")
    if text:
        flags = int(text, 16) if set(text.lower()) <= set("0123456789abcdefx") else 0
        reasons += [why for bit, why in _THROTTLED.items() if flags >> bit & 1]
        reasons += [f"since it started: {why}" for bit, why in _THROTTLED.items() if flags >> 16 + bit & 1]
    counts = [_read(counter) for counter in system.glob("devices/system/cpu/cpu*/thermal_throttle/core_throttle_count")]
    if any(count not in ("", "0") for count in counts):
        reasons.append("heat has slowed it down since it started")
    degrees = [int(value) / 1000 for sensor in system.glob("class/thermal/thermal_zone*/temp")
               if (value := _read(sensor)).isdigit()]  # fmt: skip
    hottest = max(degrees, default=0.0)
    if hottest >= HOT_DEGREES:
        reasons.append(f"it has {hottest:.0f} degrees")
    if reasons:
        fix = "Give it a heat sink, a fan, air; a Raspberry Pi also its own power supply."
        yield Check("heat", WARNING, "; ".join(reasons), f"below {HOT_DEGREES:.0f} degrees, never throttled", fix)
    elif counts or degrees or text:
        shown = f"{hottest:.0f} degrees, " if degrees else ""
        yield Check("heat", OK, f"{shown}not throttled", f"below {HOT_DEGREES:.0f} degrees")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# Optional parts


def lab_check() -> Check:
    from manyhands.lab.removal import missing

    return lab_verdict(missing())


def lab_verdict(why: str) -> Check:
    """Return the check of a lab. `why` says what is missing here; empty: nothing."""
    needed = "root, iproute2 and control groups, for `manyhands lab` and --lab only"
    if not why:
        return Check("lab", OK, "possible: root, iproute2 and control groups are here", needed)
    fix = "sudo apt install iproute2" if "iproute2" in why else ""
    if "root" in why and not fix:
        fix = "sudo manyhands doctor"
    return Check("lab", WARNING, why, needed, fix or "Use a machine or container with these rights.")


def extra_checks() -> Iterator[Check]:
    installed = [extra.name for extra in EXTRAS if is_extra_here(extra.name)]
    for extra in EXTRAS:
        if extra.name not in installed:
            yield Check("extra", OK, f"{extra.name} is not installed", f"only for {extra.purpose}", extra.command)
    if installed:
        yield Check("extra", OK, f"installed: {', '.join(installed)}")
