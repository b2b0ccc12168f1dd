"""The one room where documents are read from and written to disk: YAML or JSON, by the file's suffix."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadFile, BadValue, DiskFull, ManyhandsError, UnknownName, did_you_mean
from manyhands.facts.presets import PRESETS, preset
from manyhands.facts.units import format_bytes

LARGEST_DOCUMENT_BYTES = 64 * 10**6
YAML_SUFFIXES = (".yaml", ".yml")
JSON_SUFFIXES = (".json",)
SUFFIXES = YAML_SUFFIXES + JSON_SUFFIXES
_LINE_SEPARATORS = "\x85\u2028\u2029"  # PyYAML reads these back as spaces unless they are escaped
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCAL = re.compile(r"local:\s*(\S*)")


def read_document(path: str | Path) -> object:
    """What a YAML or JSON file holds: plain dictionaries, lists, texts and numbers, never objects."""
    path = Path(path)
    is_json = _is_json(path)
    text = read_text(path)
    try:
        if is_json:
            return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
        return yaml.load(text, Loader=_Loader)
    except json.JSONDecodeError as error:
        raise BadFile(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadFile(f"{path}{place}: {error.problem or error.context}.") from error
    except (yaml.YAMLError, ValueError) as error:  # control characters; numbers and dates that do not exist
        raise BadFile(f"{path}: {str(error).splitlines()[0]:.200}.") from error
    except RecursionError as error:
        raise BadFile(f"{path}: lists or fields are nested too deeply.") from error


def write_document(path: str | Path, data: object) -> None:
    """Write `data` as YAML or JSON. Whoever reads meanwhile sees the old document or the new one, never half."""
    path = Path(path)
    try:
        if _is_json(path):
            text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        else:
            text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
            if any(separator in text for separator in _LINE_SEPARATORS):
                text = yaml.safe_dump(data, sort_keys=False, width=120)
    except (TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise BadValue(f"{path}: this cannot be written as a document: {error}") from error
    write_text_atomic(path, text)


def write_text_atomic(path: str | Path, text: str) -> None:
    """`write_bytes_atomic` for text, as UTF-8."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise BadValue(f"{path}: the text holds half a character pair and cannot be written as UTF-8.") from error
    write_bytes_atomic(path, content)


def write_bytes_atomic(path: str | Path, content: bytes) -> None:
    """Write a temporary file beside `path`, force it to disk, and rename it into place."""
    target = Path(os.path.realpath(path))  # through a symbolic link, not over it
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        _remove(temporary)  # what is free is counted without it
        raise write_failed(path, error, len(content)) from error
    finally:
        _remove(temporary)


def write_failed(path: str | Path, error: OSError, needed_bytes: int = 0, *, what: str = "") -> BadFile:
    """The error for `what` that cannot be written; where the disk is full: what it needs, and what is free."""
    failed = f"{path}: {what}{' ' if what else ''}cannot be written"
    said = error.strerror or str(error)
    if error.errno not in _FULL:
        return BadFile(f"{failed}: {said}.")
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    needs = f"{format_bytes(needed_bytes)} are needed, " if needed_bytes else ""
    free = "what is free is not known"
    with contextlib.suppress(OSError):
        free = f"{format_bytes(shutil.disk_usage(place).free)} are free"
    hint = "Make room on that disk, or give a folder on another. What was written before is whole."
    return DiskFull(f"{failed}: {said}; {needs}{free}.", hint=hint)


def cache_folder() -> Path:
    """Where profiles and data are kept: $MANYHANDS_HOME, else $XDG_CACHE_HOME/manyhands, else ~/.cache/manyhands."""
    if home := os.environ.get("MANYHANDS_HOME"):
        return Path(home).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"  # XDG: a relative path is to be ignored
    return base / "manyhands"


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A preset's name, `local:N` for N workers on this machine, or a .yaml or .json file."""
    name = str(name_or_path)
    if name in PRESETS:
        return preset(name)
    if match := _LOCAL.fullmatch(name):
        count = match.group(1)
        if not re.fullmatch(r"[0-9]{1,9}", count):
            raise BadValue(f"'{name:.80}': '{count:.40}' is not a number of workers.", hint="Write it like local:4")
        return Cluster.local(int(count))
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        hint = f"{did_you_mean(name, PRESETS)}\nA file ({', '.join(SUFFIXES)}) or local:4 may be given too.".lstrip()
        raise UnknownName(f"There is no cluster called '{name:.120}'.", hint=hint)
    raw = read_document(path)
    if isinstance(raw, dict):
        raw.setdefault("name", path.stem)
    try:
        return Cluster.from_dict(raw)
    except ManyhandsError as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from error


def _is_json(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        what = f"'{suffix}' is not a document's suffix" if suffix else "a document's name needs a suffix"
        raise BadFile(f"{path}: {what}.", hint=f"Use one of {', '.join(SUFFIXES)}")
    return suffix in JSON_SUFFIXES


def read_text(path: Path) -> str:
    """All of a file of text, which may be hostile: too large, no text, no file at all."""
    try:
        if path.is_dir():
            raise BadFile(f"{path}: is a folder, not a file.")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_DOCUMENT_BYTES:
                raise BadFile(f"{path}: {format_bytes(size)}; at most {format_bytes(LARGEST_DOCUMENT_BYTES)} are read.")
            content = file.read(LARGEST_DOCUMENT_BYTES + 1)  # it may grow, or be no plain file
    except FileNotFoundError as error:
        raise BadFile(f"{path}: there is no such file.", hint=_neighbours(path)) from error
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}.") from error
    if len(content) > LARGEST_DOCUMENT_BYTES:
        raise BadFile(f"{path}: more than {format_bytes(LARGEST_DOCUMENT_BYTES)}, the most that is read.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise BadFile(f"{path}, line {line}: byte {error.start} is not UTF-8 text.") from error


def _neighbours(path: Path) -> str:
    """A hint naming documents in the same folder that are spelt alike."""
    try:
        known = [entry.name for entry in path.parent.iterdir() if entry.suffix.lower() in SUFFIXES]
    except OSError:
        return f"There is no folder {path.parent} either."
    hint = did_you_mean(path.name, known)
    return hint if hint.startswith("Did") else ""


def _refuse_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"'{twice:.60}' is written twice")
    return found


class _Loader(yaml.SafeLoader):
    """Plain data only, and no key twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"'{key.value:.60}' is written twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make names survive a power cut, where the system allows a folder to be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
