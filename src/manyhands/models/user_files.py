"""Models in a file of Python that a person named: `./file.py:Class`. The file is run, as Python runs a program, so no
name that was read from a file may come here (registry.from_file)."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from manyhands.facts.errors import BadFile, ManyhandsError

SUFFIX = ".py"


def is_file_name(library: str) -> bool:
    """Return whether what is before a name's colon is a file of Python, not an installed module."""
    return library.endswith(SUFFIX)


def loaded_module(file: str) -> ModuleType | None:
    """Return the module of a file that was loaded before."""
    return sys.modules.get(_module_name(_resolved(file)))


def load_file(file: str) -> ModuleType:
    """Return the module in a file, run once per process. Modules beside the file can be imported by it, unless an
    installed one has the same name."""
    path = _resolved(file)
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise BadFile(f"{file}: there is no such file.", hint="Write the path of a file and a class in it: net.py:Net")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a file that ends in .py has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a module beside the file hides no installed one
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ManyhandsError(f"Running '{file}' failed: {type(error).__name__}: {error}") from error
    return module


def _resolved(file: str) -> Path:
    return Path(file).expanduser().resolve()


def _module_name(path: Path) -> str:
    """Return a name that no installed module has."""
    return f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
