"""Input and output trees: nested lists and dicts whose leaves are the names of tensors. A dataclass is a dict of its
fields that remembers the class (Fields)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Fields(dict[str, Any]):
    """The fields of a dataclass, by name and as attributes. Fields that were None are left out, and read None."""

    _kind: Any = None

    def __init__(self, fields: Mapping[str, Any], kind: Any) -> None:
        super().__init__(fields)
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if self._kind is not None and any(field.name == name for field in dataclasses.fields(self._kind)):
            return None
        raise AttributeError(f"there is no field {name!r}; there are {', '.join(self)}")

    def filled(self, fields: Mapping[str, Any]) -> Fields:
        """Return fields of the same class with other values."""
        return Fields(fields, self._kind)

    def instance(self) -> Any:
        """Return an object of the dataclass. `__post_init__` is not run again: it may have changed the fields."""
        values = {name: rebuilt(value) for name, value in self.items()}
        if self._kind is None:
            return self.filled(values)
        if issubclass(self._kind, dict):  # such as transformers' ModelOutput, which holds its fields as items too
            return self._kind(**values)
        made = self._kind.__new__(self._kind)
        for field in dataclasses.fields(self._kind):
            object.__setattr__(made, field.name, values.get(field.name))
        return made


def rebuilt(tree: Any) -> Any:
    """Return a tree in which every dataclass is an object of its class again."""
    if isinstance(tree, Fields):
        return tree.instance()
    if isinstance(tree, dict):
        return {key: rebuilt(item) for key, item in tree.items()}
    return [rebuilt(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


def branched(tree: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a dict, or the fields of a dataclass, with every item changed."""
    items = {key: change(item) for key, item in tree.items()}
    return tree.filled(items) if isinstance(tree, Fields) else items


def tree_leaves(tree: Any) -> Iterator[str]:
    """Yield the leaf names of an input or output tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tree_leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tree_leaves(item)


def tree_map(change: Callable[[str], Any], tree: Any) -> Any:
    """Return the same tree with every leaf name changed."""
    if isinstance(tree, str):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return [tree_map(change, item) for item in tree]
    if isinstance(tree, dict):
        return branched(tree, lambda item: tree_map(change, item))
    return tree
