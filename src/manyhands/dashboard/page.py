"""The page's files, read once; any other path is unknown, so that no path leads out of this folder."""

from __future__ import annotations

import functools
from importlib import resources
from typing import NamedTuple

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FOLDERS = ("", "uplot/")
START = "/index.html"


class File(NamedTuple):
    content: bytes
    kind: str


@functools.cache
def page_files() -> dict[str, File]:
    """Return the files by their path in the address."""
    root = resources.files("manyhands.dashboard") / "assets"
    files = {}
    for folder in FOLDERS:
        for entry in (root / folder if folder else root).iterdir():
            kind = KINDS.get(entry.name[entry.name.rfind(".") :])
            if kind is not None and entry.is_file():
                files[f"/{folder}{entry.name}"] = File(entry.read_bytes(), kind)
    return {**files, "/": files[START]}
