"""Input and output trees: nested lists and dicts whose leaves are the names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


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
        return {key: tree_map(change, item) for key, item in tree.items()}
    return tree
