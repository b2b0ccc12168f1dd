"""How much is installed because of manyhands: the files of every distribution it brings along.

python tests/installed_sizes.py        # of the environment it is run in
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
from collections.abc import Iterable

from packaging.requirements import Requirement

NOT_COUNTED = ("torch", "numpy")
"""These, and what they bring themselves: most people have them."""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: Iterable[str]) -> list[str]:
    """Names of those that are installed without asking for an extra, here."""
    found = [Requirement(text) for text in requirements]
    return [plain(one.name) for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def closure(names: Iterable[str]) -> set[str]:
    """These and all that they need, as far as it is installed."""
    seen: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += needed(metadata.requires(name) or [])
    return seen


def installed_bytes(name: str) -> int:
    """Of a distribution's files, compiled ones among them."""
    paths = [file.locate() for file in metadata.files(name) or []]
    return sum(path.stat().st_size for path in paths if path.exists())  # type: ignore[attr-defined]


def sizes(requirements: Iterable[str]) -> dict[str, int]:
    """Distribution -> bytes, for all that these requirements bring beside torch and numpy, the largest first."""
    found = closure(needed(requirements)) - closure(NOT_COUNTED)
    listed = {name: installed_bytes(name) for name in found}
    return dict(sorted(listed.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    counted = sizes(["manyhands"])
    for distribution, size in counted.items():
        print(f"{size / 1e6:8.2f} MB  {distribution}")
    print(f"{sum(counted.values()) / 1e6:8.2f} MB  in all, without torch and numpy")
