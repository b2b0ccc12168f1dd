"""A small pen for SVG: one style for all drawings, readable on light and dark pages (each lies on its own card)."""

from __future__ import annotations

from html import escape

STYLE = """
.card{fill:#fbfaf7;stroke:#d9d5cb}
text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#24292f}
.small{font-size:11px}.title{font-size:15px;font-weight:600}.faint{fill:#6a6f76}.on{fill:#fff}.mid{text-anchor:middle}
.end{text-anchor:end}.line{stroke:#6a6f76;fill:none;stroke-width:1.4}.dash{stroke-dasharray:4 3}.edge{stroke:#fbfaf7}
.a{fill:#2f6db3}.b{fill:#c2571a}.c{fill:#3f8a55}.d{fill:#8a55a8}.e{fill:#b08a1e}.none{fill:#e7e3d9}.thin{fill-opacity:.35}
.sa{stroke:#2f6db3}.sb{stroke:#c2571a}.sc{stroke:#3f8a55}.sd{stroke:#8a55a8}.hollow{fill:none;stroke-width:2}
.head{fill:#6a6f76}
@media(prefers-color-scheme:dark){.card{fill:#1d2025;stroke:#3a3f47}text{fill:#e4e6ea}.faint{fill:#a3a9b2}.on{fill:#fff}
.line{stroke:#a3a9b2}.head{fill:#a3a9b2}.edge{stroke:#1d2025}.none{fill:#333840}
.a{fill:#4b8ad6}.b{fill:#d9722f}.c{fill:#55a86e}.d{fill:#a673c4}.e{fill:#c9a437}
.sa{stroke:#4b8ad6}.sb{stroke:#d9722f}.sc{stroke:#55a86e}.sd{stroke:#a673c4}}
"""
COLOURS = "abcde"
"""The colours of devices, in order: classes of the style."""


class Pen:
    """A collector of shapes, which writes them as one SVG of a given size."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "a edge", radius: float = 3) -> None:
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._add(f'<rect {place} rx="{_n(radius)}" class="{kind}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        mark = f' class="{kind}"' if kind else ""
        self._add(f'<text x="{_n(x)}" y="{_n(y)}"{mark}>{escape(words)}</text>')

    def note(self, x: float, y: float, words: str) -> None:
        """Add small print."""
        self.text(x, y, words, "small faint")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        self._add(f'<path d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}" class="{kind}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        self._add(f'<path d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}" class="{kind}" marker-end="url(#head)"/>')

    def circle(self, x: float, y: float, radius: float, kind: str = "a") -> None:
        self._add(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{kind}"/>')

    def label(self, x: float, y: float, width: float, height: float, words: str, kind: str = "a edge") -> None:
        """Add a box with words in its middle."""
        self.box(x, y, width, height, kind)
        on = "mid small" if "none" in kind or "hollow" in kind or "thin" in kind else "mid small on"
        self.text(x + width / 2, y + height / 2 + 4, words, on)

    def svg(self) -> str:
        size = f"{_n(self.width)} {_n(self.height)}"
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            '<path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
        )
        card = f'<rect x=".5" y=".5" width="{_n(self.width - 1)}" height="{_n(self.height - 1)}" rx="8" class="card"/>'
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{_n(self.width)}" role="img">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>{head}{card}\n{body}\n</svg>\n"
        )

    def _add(self, part: str) -> None:
        self._parts.append(part)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
