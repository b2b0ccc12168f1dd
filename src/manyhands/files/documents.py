"""The only module that reads documents from disk and writes them to it: YAML or JSON, by the file's suffix."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.errors import BadFile, BadValue, DiskFull, ManyhandsError, UnknownName, did_you_mean
from manyhands.facts.presets import PRESETS
from manyhands.facts.units import format_bytes
from manyhands.files.plain import open_descriptor, open_plain

LARGEST_DOCUMENT_BYTES = 64 * 10**6
LARGEST_YAML_BYTES = 16 * 10**6
"""YAML takes a hundred times as long to be read as JSON."""
MOST_YAML_NODES = 10**5
"""The most values in a YAML document, with all that its aliases stand for. Reading so many takes a few seconds."""
MOST_JSON_LISTS = 2_000_000
"""The most lists and objects: an empty one is two letters in the file, and fifty times as much in memory."""
MOST_DIGITS = 40
"""The most digits of a whole number."""
YAML_SUFFIXES = (".yaml", ".yml")
JSON_SUFFIXES = (".json",)
SUFFIXES = YAML_SUFFIXES + JSON_SUFFIXES
_LINE_SEPARATORS = "\x85\u2028\u2029"  # PyYAML reads these back as spaces unless they are escaped
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_LOCAL = re.compile(r"local:\s*(\S*)")


def read_document(path: str | Path) -> object:
    """Return the content of a YAML or JSON file: plain dictionaries, lists, texts and numbers, never objects."""
    path = Path(path)
    is_json = _is_json(path)
    text = read_text(path, LARGEST_DOCUMENT_BYTES if is_json else LARGEST_YAML_BYTES)
    try:
        if is_json:
            return _read_json(text)
        return yaml.load(text, Loader=_Loader)
    except json.JSONDecodeError as error:
        raise BadFile(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadFile(f"{path}{place}: {error.problem or error.context or '?':.200}.") from error
    except RecursionError as error:
        raise BadFile(f"{path}: lists or fields are nested too deeply.") from error
    except (yaml.YAMLError, ValueError) as error:  # control characters; numbers and dates that do not exist
        raise BadFile(f"{path}: {(str(error).splitlines() or ['?'])[0]:.200}.") from error
    except (AttributeError, LookupError, TypeError) as error:  # `!!bool x`, `!!timestamp x` are too much for PyYAML
        raise BadFile(f"{path}: a value is not what its tag says.") from error


def write_document(path: str | Path, data: object) -> None:
    """Write `data` as YAML or JSON. A process that reads it meanwhile sees the old document or the new one, never half
    of one."""
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
    """Write text, as UTF-8, by `write_bytes_atomic`."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise BadValue(f"{path}: the text holds half a character pair and cannot be written as UTF-8.") from error
    write_bytes_atomic(path, content)


def write_bytes_atomic(path: str | Path, content: bytes) -> None:
    """Write a temporary file beside `path`, force it to disk, and rename it into place."""
    path = Path(path)
    target = Path(os.path.realpath(path.parent)) / path.name  # a symbolic link is replaced, not written through
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        make_folder(target.parent)
        with open(temporary, "xb", opener=opener) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        _remove(temporary)  # free space is counted without it
        raise write_failed(path, error, len(content)) from error
    finally:
        _remove(temporary)


# File permissions


def make_folder(folder: str | Path, *, is_private: bool = False) -> None:
    """Make a folder and those above it, where they are missing. A private one is its owner's alone, whatever the umask;
    so is the cache. A folder's content is no more open than the folder."""
    folder, home = Path(folder), cache_folder()
    missing, place = [], folder
    while not place.is_dir():
        missing.append(place)
        place = place.parent
    for new_folder in reversed(missing):
        is_closed = new_folder == home or (is_private and new_folder == folder)
        new_folder.mkdir(mode=0o700 if is_closed else 0o777 & _rights_below(new_folder.parent), exist_ok=True)
    if is_private:
        _close(folder)
    if home == folder or home in folder.parents:
        _close(home)


def _close(folder: Path) -> None:
    """Remove the world's rights to a folder; those of its group are its owner's choice."""
    with contextlib.suppress(OSError):  # another user's: the owner decides
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o007:
            folder.chmod(mode & ~0o007)


def opener(path: str, flags: int) -> int:
    """Open a file for `open`: a new file is no more open to others than its folder, and no link is followed."""
    return open_descriptor(path, flags, file_mode(path), follows_links=False)


def file_mode(path: str | Path) -> int:
    """Return a new file's rights, before the umask removes more of them."""
    return 0o666 & _rights_below(Path(path).parent)


def _rights_below(folder: Path) -> int:
    """Return the rights that may be given inside a folder: all of them, unless the world has none to the folder
    itself."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return 0o777
    return 0o777 if mode & 0o007 else 0o700 | (mode & 0o070)


def write_failed(path: str | Path, error: OSError, needed_bytes: int = 0, *, what: str = "") -> BadFile:
    """Return the error for `what` that cannot be written; where the disk is full: what it needs, and what is free."""
    failed = f"{path}: {what}{' ' if what else ''}cannot be written"
    reason = error.strerror or str(error)
    if error.errno not in _FULL:
        return BadFile(f"{failed}: {reason}.")
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    needs = f"{format_bytes(needed_bytes)} are needed, " if needed_bytes else ""
    free = "what is free is not known"
    with contextlib.suppress(OSError):
        free = f"{format_bytes(shutil.disk_usage(place).free)} are free"
    hint = "Make room on that disk, or give a folder on another. What was written before is whole."
    return DiskFull(f"{failed}: {reason}; {needs}{free}.", hint=hint)


def home_folder(variable: str, usual: str) -> Path:
    """Return the folder of what manyhands keeps between runs: $MANYHANDS_HOME, which holds all of it where it is set.

    Otherwise there are two, as XDG has it, each named by a variable or by its usual place below the user's home.
    """
    if home := os.environ.get("MANYHANDS_HOME"):
        return Path(home).expanduser()
    xdg = os.environ.get(variable, "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / usual  # XDG: a relative path is to be ignored
    return base / "manyhands"


def cache_folder() -> Path:
    """Return where profiles, captured networks and calibrations are kept, which can be made anew."""
    return home_folder("XDG_CACHE_HOME", ".cache")


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return the cluster of a preset's name, `local:N` for N workers on this machine, or a .yaml or .json file."""
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
        problem = f"'{suffix}' is not a document's suffix" if suffix else "a document's name needs a suffix"
        raise BadFile(f"{path}: {problem}.", hint=f"Use one of {', '.join(SUFFIXES)}")
    return suffix in JSON_SUFFIXES


def read_text(path: Path, largest_bytes: int = LARGEST_DOCUMENT_BYTES) -> str:
    """Return all of a file of text, which may be hostile: too large, no text, no file at all."""
    try:
        if path.is_dir():
            raise BadFile(f"{path}: is a folder, not a file.")
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > largest_bytes:
                raise BadFile(f"{path}: {format_bytes(size)}; at most {format_bytes(largest_bytes)} are read.")
            content = file.read(largest_bytes + 1)  # it may grow, or be no plain file
    except FileNotFoundError as error:
        raise BadFile(f"{path}: there is no such file.", hint=_neighbours(path)) from error
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror or error}.") from error
    if len(content) > largest_bytes:
        raise BadFile(f"{path}: more than {format_bytes(largest_bytes)}, the most that is read.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise BadFile(f"{path}, line {line}: byte {error.start} is not UTF-8 text.") from error


def _neighbours(path: Path) -> str:
    """Return a hint naming documents in the same folder that are spelt alike."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix.lower() in SUFFIXES]
    except OSError:
        return f"There is no folder {path.parent} either."
    hint = did_you_mean(path.name, names)
    return hint if hint.startswith("Did") else ""


def _read_json(text: str) -> object:
    count = text.count("[") + text.count("{")
    if count > MOST_JSON_LISTS:
        raise ValueError(f"it holds {count} lists and objects; at most {MOST_JSON_LISTS} are read")
    document: object = json.loads(
        text, parse_constant=_refuse_constant, parse_int=_integer, object_pairs_hook=_refuse_twice
    )
    if _HALF_PAIR.search(text):
        json.dumps(document, ensure_ascii=False).encode()  # half a character pair is no text, and cannot be printed
    return document


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{text[:20]}… is a number of {len(text)} digits; at most {MOST_DIGITS} are read")
    return int(text)


def _refuse_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys: set[str] = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"'{twice:.60}' is written twice")
    return mapping


class _Loader(yaml.SafeLoader):
    """A loader of plain data only, which refuses a repeated key: the second would silently win.

    Values are counted while they are read, and aliases as what they stand for: ten lines can stand for a billion.
    """

    composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.composed += 1
        if self.composed > MOST_YAML_NODES:
            raise yaml.YAMLError(f"it holds more than {MOST_YAML_NODES} values, the most that are read")
        return super().compose_node(parent, index)

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            count = _node_count(node, {})
            if count > MOST_YAML_NODES:
                raise yaml.YAMLError(f"its aliases stand for {count} values; at most {MOST_YAML_NODES} are read")
        return node

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if isinstance(text, str) and not text.isascii():
            text.encode()  # half a character pair is no text, and cannot be printed
        return text

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > MOST_DIGITS:
            raise ValueError(
                f"{node.value[:20]}… is a number of {len(node.value)} digits; at most {MOST_DIGITS} are read"
            )
        return super().construct_yaml_int(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"'{key.value:.60}' is written twice", key.start_mark
                    )
                keys.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _node_count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values in a node, each as often as it is referred to; a node inside itself is refused."""
    count = counts.get(id(node))
    if count is None:
        counts[id(node)] = -1
        count = 1
        if isinstance(node, yaml.MappingNode):
            count += sum(_node_count(key, counts) + _node_count(value, counts) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            count += sum(_node_count(item, counts) for item in node.value)
        counts[id(node)] = count
    if count < 0:
        raise yaml.YAMLError("a list or mapping holds itself")
    return count


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
