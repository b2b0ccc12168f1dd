"""Profiles on disk: one readable JSON file per model, input, granularity and machine, reused unless `refresh` is set.

profiles/mobilenetv2_3x224x224_blocks_x86_64-2t-1f0c9a3e_5d3b0c77a1e2f4b8.json
profiles/mobilenetv2_3x224x224_blocks_x86_64-2t-1f0c9a3e_5d3b0c77a1e2f4b8_inference.json    forward only
profiles/mobilenetv2_3x224x224_blocks_x86_64-1t-1f0c9a3e_5d3b0c77a1e2f4b8_4workers_cpu_0c77a1e2.json    of a run's
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from manyhands.facts.decode import converted
from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.facts.network import Network
from manyhands.facts.profile import DeviceProfile
from manyhands.files.documents import cache_folder, read_document, write_document
from manyhands.graph.graph import Graph
from manyhands.profiler.measure import LADDER, REPEATS, Progress, measure_network
from manyhands.profiler.this_machine import Machine, identify

VERSION = 1
_REFRESH = "Delete it, or measure again: manyhands profile --refresh"


def profiles_folder() -> Path:
    return cache_folder() / "profiles"


def profile_path(network: Network, machine: Machine, folder: Path | None = None, *, training: bool = True) -> Path:
    """Return the path of a network's profile on a machine; that of inference lies beside that of training."""
    parts = (network.name, network.input_text, network.granularity)
    readable = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part)[:60].strip("-") for part in parts)
    kind = "" if training else "_inference"
    return (folder or profiles_folder()) / f"{readable}_{machine.slug}_{network.fingerprint}{kind}.json"


def save_profile(profile: DeviceProfile, path: str | Path) -> None:
    """Write a profile, whole or not at all."""
    write_document(path, msgspec.to_builtins(profile))


def load_profile(path: str | Path, network: Network | None = None, machine: Machine | None = None) -> DeviceProfile:
    """Read a profile and check it; against a network and a machine too, where given."""
    raw = read_document(path)
    version = raw.get("version") if isinstance(raw, dict) else None
    if version is not None and version != VERSION:
        raise BadFile(f"{path}: has version {version}; this program reads version {VERSION}.", hint=_REFRESH)
    try:
        profile = converted(raw, DeviceProfile)
        if network is not None:
            profile.check_matches(network)
    except msgspec.ValidationError as error:
        raise BadFile(f"{path}: is not a profile: {error!s:.300}.", hint=_REFRESH) from error
    except ManyhandsError as error:
        raise BadFile(f"{path}: {error.message}", hint=_REFRESH) from error
    if machine is not None and profile.source == "measured" and profile.machine != machine.text:
        raise BadFile(f"{path}: was measured on '{profile.machine}'; this is '{machine.text}'.", hint=_REFRESH)
    return profile


def forget_sessions(fingerprint: str, folder: Path | None = None) -> int:
    """Delete the measurements of a network on clusters and workers, so that the next run measures anew, and return how
    many profiles there were. Those of this machine alone stay, with the kernels that were chosen for it."""
    count = 0
    for path in (folder or profiles_folder()).glob(f"*_{fingerprint}_*.json"):
        if path.name.endswith(f"_{fingerprint}_inference.json"):
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise BadFile(f"{path}: cannot be deleted: {error.strerror or error}.") from error
        count += not path.name.endswith(".rate.json")
    return count


def profile_network(
    graph: Graph,
    *,
    ladder: Sequence[int] = LADDER,
    threads: int | None = None,
    seconds: float = 45.0,
    repeats: int = REPEATS,
    device: str = "local",
    refresh: bool = False,
    folder: Path | None = None,
    training: bool = True,
    on_progress: Progress | None = None,
) -> DeviceProfile:
    """Return the stored profile of `graph` on this machine, or a new one, which is stored.

    A stored one is used as it is, whatever ladder it has; `refresh` measures anew. A damaged one is an error.
    `training`: False for inference, which is stored separately.
    """
    path = profile_path(graph.network, identify(threads), folder, training=training)
    if path.exists() and not refresh:
        stored = load_profile(path, graph.network, identify(threads))
        return msgspec.structs.replace(stored, device=device)
    profile = measure_network(
        graph, ladder=ladder, threads=threads, seconds=seconds, repeats=repeats, device=device, training=training,
        on_progress=on_progress,
    )  # fmt: skip
    try:
        save_profile(profile, path)
    except BadFile as error:  # the measurement is worth more than the cache
        if on_progress is not None:
            on_progress(f"not kept: {error.message}")
    return profile
