"""src/manyhands/*/options.py: the keywords of a configuration as a TypedDict, for mypy and editors."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from manyhands.job.config import keywords_of

HEAD = '''"""The keywords of `mh.{function}`, made from `{config}` by python docs/generate.py: change them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
{imports}


class {name}(TypedDict, total=False):
    """Every keyword that `{config}` describes."""

'''


def of_training() -> str:
    """Return training/options.py."""
    from manyhands.training.config import TrainConfig

    return source(TrainConfig, "train")


def of_preparing() -> str:
    """Return training/prepare_options.py."""
    from manyhands.training.prepare_config import PrepareConfig

    return source(PrepareConfig, "prepare")


def of_splitting() -> str:
    """Return split/options.py."""
    from manyhands.split.config import SplitConfig

    return source(SplitConfig, "split_train")


def of_inference() -> str:
    """Return inference/options.py."""
    from manyhands.inference.config import InferConfig

    return source(InferConfig, "infer")


def source(config: type[Any], function: str) -> str:
    """Return the module that declares the keywords of a function."""
    fields = keywords_of(config)
    used = {name.id for field in fields.values() for name in _names(field.annotation)}
    modules: dict[str, set[str]] = {}
    for module, name in _imports(config):
        if name in used:
            modules.setdefault(module, set()).add(name)
    groups: dict[int, list[str]] = {}
    for module in sorted(modules):
        line = f"    from {module} import {', '.join(sorted(modules[module]))}"
        groups.setdefault(_group(module), []).append(line)
    head = HEAD.format(
        function=function, config=config.__name__, name=config.__name__.replace("Config", "Options"),
        imports="\n\n".join("\n".join(groups[group]) for group in sorted(groups)),
    )  # fmt: skip
    return head + "".join(f"    {name}: {field.annotation}\n" for name, field in fields.items())


def _names(annotation: str) -> Iterator[ast.Name]:
    return (node for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name))


def _imports(config: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything that the modules of a configuration import."""
    for section in config.__mro__:
        module = sys.modules[section.__module__]
        if not module.__name__.startswith("manyhands"):
            continue
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, alias.name) for alias in node.names)


def _group(module: str) -> int:
    """Return the group of imports, as ruff sorts them: the standard library, others, manyhands."""
    root = module.split(".")[0]
    return 2 if root == "manyhands" else 0 if root in sys.stdlib_module_names else 1
