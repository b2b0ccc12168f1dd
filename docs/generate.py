"""Generates every page and drawing of docs/ that can be made from the code: python docs/generate.py [--check].

Whole pages: reference/cli.md, api.md, errors.md, options.md. The keywords that mypy sees: src/manyhands/*/options.py.
Parts of pages, between <!-- made: NAME --> and
<!-- end -->: tables of fields, the README's results. Drawings: drawings/*.svg. With --check nothing is written, and the
exit code is 1 if a file differs from what would be written (tests/test_docs.py checks the same).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from making import api, cli, configs, diffs, drawn, errors, fields, options, results  # noqa: E402

ROOT = HERE.parent
PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli.page,
    "docs/reference/api.md": api.page,
    "docs/reference/errors.md": errors.page,
    "docs/reference/options.md": configs.page,
    "src/manyhands/training/options.py": options.of_training,
    "src/manyhands/training/prepare_options.py": options.of_preparing,
    "src/manyhands/split/options.py": options.of_splitting,
    "src/manyhands/inference/options.py": options.of_inference,
}
_PART = re.compile(r"(<!-- made: (?P<name>[^>]+?) -->\n).*?(<!-- end -->)", re.S)


def part(name: str) -> str:
    """Return the text between two marks by its name: `fields manyhands.facts.plan.Plan`, `results`."""
    kind, _, argument = name.partition(" ")
    if kind == "fields":
        return fields.table(argument)
    if kind == "cluster":
        return fields.cluster_table()
    if kind == "results":
        return results.table(ROOT / "docs" / "results.md")
    if kind == "diff":
        return diffs.of_folder(argument)
    raise SystemExit(
        f"<!-- made: {name} -->: no such part. Known: fields MODULE.STRUCT, cluster, results, diff FOLDER."
    )


def made() -> dict[Path, str]:
    """Return every generated file and its text."""
    files = {ROOT / path: make() for path, make in PAGES.items()}
    files |= {HERE / "drawings" / f"{name}.svg": draw() for name, draw in drawn.DRAWINGS.items()}
    for path in [ROOT / "README.md", *sorted(HERE.rglob("*.md"))]:
        text = path.read_text()
        if path not in files and _PART.search(text):
            files[path] = _PART.sub(lambda match: match[1] + part(match["name"]) + match[3], text)
    return files


def stale() -> list[Path]:
    """Return the files that differ from what would be generated."""
    return [path for path, text in made().items() if not path.exists() or path.read_text() != text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something is out of date")
    if parser.parse_args().check:
        old = [str(path.relative_to(ROOT)) for path in stale()]
        if old:
            sys.exit(f"Out of date: {', '.join(old)}. Write them: python docs/generate.py")
        return
    for path, text in made().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
