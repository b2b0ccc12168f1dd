"""The documentation as data: pages, their fenced blocks, links and headings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*) *\n(?P<text>.*?)^(?P=indent)``` *$", re.M | re.S)
_REASON = re.compile(r"<!-- (?P<how>not run|run: slow|run: quick)(?:: (?P<why>[^>]*?))? -->\s*$")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)|<img[^>]*\ssrc=\"([^\"]+)\"|<a[^>]*\shref=\"([^\"]+)\"")
_SEPARATORS = {"&&", "||", "|", ";", "&", "(", ")", ">", ">>", "<", ";;"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and what the comment before it says of running it."""

    page: Path
    line: int
    language: str
    text: str
    how: str
    """not run, slow (the usual: with the slow tests) or quick (with every test)."""
    why: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The README and everything in docs/, in the order of their names."""
    found = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
    return [*found, *(path for path in (ROOT / "SECURITY.md",) if path.exists())]


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        if fence["language"] not in languages:
            continue
        said = _REASON.search(text[: fence.start()])
        how = said["how"].removeprefix("run: ") if said else "slow"
        line = text[: fence.start()].count("\n") + 1
        body = re.sub(rf"(?m)^{fence['indent']}", "", fence["text"])
        found.append(Block(page, line, fence["language"], body, how, (said["why"] or "") if said else ""))
    return found


def without_code(text: str) -> str:
    """A page without its blocks and code spans: what may hold links and headings."""
    text = _FENCE.sub("", text)
    text = re.sub(r"(?m)^    .*$", "", text)
    return re.sub(r"`[^`\n]*`", "", text)


def links(page: Path) -> list[str]:
    return [next(filter(None, found)) for found in _LINK.findall(without_code(page.read_text()))]


def anchors(page: Path) -> set[str]:
    """What a link may point at: headings as they become anchors, and the second of equal ones with a number."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"(?m)^#{1,6} +(.+?) *$", _FENCE.sub("", page.read_text())):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def commands(text: str) -> list[list[str]]:
    """Every simple command of some shell lines, as words; what is behind # and between $( ) is left out."""
    text = re.sub(r"\\\n\s*", " ", text)
    text = re.sub(r"<<\s*'?(\w+)'?\n.*?^\1$", "", text, flags=re.M | re.S)
    text = re.sub(r"\$\([^$]*\)\"?\n", "SUBSTITUTED\n", text)
    text = re.sub(r"\$\([^()]*\)", "SUBSTITUTED", text)
    text = re.sub(r"\$\{?\w+\}?", "7", text)  # a port, a process: a number, as far as parsing is concerned
    found = []
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;()<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in _SEPARATORS:
                if words:
                    found.append(words)
                words = []
            else:
                words.append(word)
    return found


def ours(words: list[str]) -> list[str] | None:
    """What follows `manyhands` in a command, whoever it is run as and however it is found; None: another program."""
    rest = list(words)
    while rest and (
        rest[0] in ("sudo", "time", "exec", "timeout", "nohup") or re.match(r"^(\w+=|[\d.]+s?$|-)", rest[0])
    ):
        rest.pop(0)
    return rest[1:] if rest and Path(rest[0]).name == "manyhands" else None
