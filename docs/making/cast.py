"""A recording of a real run in a terminal of its own, drawn as an animated SVG: python docs/making/cast.py.

    drawings/cast.cast    the output and its times (asciinema's format, version 2)
    drawings/cast.svg     the same as a picture that plays: every frame below the last, moved up by CSS, no script

`--draw` draws the existing recording again. It plays at twice the speed, and pauses are shortened; if nothing moves (no
CSS animation, or the reader prefers none) the last frame is shown.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import math
import os
import pty
import re
import select
import struct
import sys
import tempfile
import termios
import time
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from making.screen import Cell, Screen, Style

FOLDER = Path(__file__).resolve().parent.parent / "drawings"
COMMAND = ["manyhands", "train", "--devices", "2", "--epochs", "6", "--out", "first"]
COLUMNS, ROWS = 128, 30
LONGEST_FRAME, LAST_FRAME, FRAME_SECONDS = 1.0, 6.0, 0.25
SPEED = 2.0
LIMIT_SECONDS = 300
LETTER, LINE = 7.0, 16.0
PALETTE = ("#8b949e", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", "#f0f6fc")
Event = tuple[float, str]


def record(command: list[str]) -> list[Event]:
    """Run the command in an empty folder, in a terminal of this size, and return its output with the times."""
    events: list[Event] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with tempfile.TemporaryDirectory() as folder:
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
            os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            os.execvp(command[0], command)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        began = time.monotonic()
        while time.monotonic() - began < LIMIT_SECONDS:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                got = os.read(terminal, 65536)
            except OSError:  # the program has ended
                break
            if not got:
                break
            events.append((time.monotonic() - began, decoder.decode(got)))
        _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(
            f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}:\n{''.join(t for _, t in events)}"
        )
    return events


def frames(events: list[Event]) -> list[tuple[float, list[list[Cell]]]]:
    """Return (seconds it is shown, the screen) whenever the screen changed by more than a spinner; each for a second at
    most."""
    screen = Screen(COLUMNS, ROWS)
    screen.feed(f"$ {' '.join(COMMAND)}\r\n")
    shown: list[tuple[float, list[list[Cell]]]] = [(0.0, screen.lines())]
    for moment, text in events:
        screen.feed(text)
        if _still(screen.lines()) == _still(shown[-1][1]):
            continue
        if moment - shown[-1][0] < FRAME_SECONDS * SPEED and len(shown) > 1:
            shown[-1] = (shown[-1][0], screen.lines())
        else:
            shown.append((moment, screen.lines()))
    ends = [start for start, _ in shown[1:]] + [math.inf]
    lengths = [min((end - start) / SPEED, LONGEST_FRAME) for (start, _), end in zip(shown, ends)]
    return [*zip(lengths[:-1], (lines for _, lines in shown)), (LAST_FRAME, shown[-1][1])]


def _still(lines: list[list[Cell]]) -> list[str]:
    """Return a screen as text, without its spinners."""
    return [re.sub("[\u2800-\u28ff]", "", "".join(letter for letter, _ in line)) for line in lines]


def svg(shown: list[tuple[float, list[list[Cell]]]]) -> str:
    """Return the SVG: every different line once, frames that refer to them, and one animation from frame to frame."""
    width, height = COLUMNS * LETTER + 24, ROWS * LINE + 44
    numbers: dict[str, int] = {}
    strips = []
    for place, (_, lines) in enumerate(shown):
        uses = []
        for row, line in enumerate(lines):
            if line:
                number = numbers.setdefault(_line(line), len(numbers))
                uses.append(f'<use href="#l{number}" y="{row * LINE:g}"/>')
        strips.append(f'<g transform="translate(0 {place * ROWS * LINE:g})">{"".join(uses)}</g>')
    defined = "".join(f'<g id="l{number}">{line}</g>' for line, number in numbers.items())
    total = sum(seconds for seconds, _ in shown)
    steps, clock = [], 0.0
    for place, (seconds, _) in enumerate(shown):
        steps.append(f"{100 * clock / total:.2f}%{{transform:translateY(-{place * ROWS * LINE:g}px)}}")
        clock += seconds
    colours = "".join(f".c{place}{{fill:{colour}}}" for place, colour in enumerate(PALETTE))
    style = (
        "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d5dae0;"
        f"white-space:pre}}.b{{font-weight:700}}.d{{opacity:.6}}{colours}"
        f"@keyframes play{{{''.join(steps)}}}"
        f".film{{transform:translateY(-{(len(shown) - 1) * ROWS * LINE:g}px);"
        f"animation:play {total:.2f}s step-end infinite}}"
        "@media(prefers-reduced-motion:reduce){.film{animation:none}}"
    )
    film = f'<g class="film">{"".join(strips)}</g>'
    dots = "".join(f'<circle cx="{18 + place * 18}" cy="16" r="5" fill="#444c56"/>' for place in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
        f"<title>{escape(' '.join(COMMAND))}, recorded</title><style>{style}</style>"
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#161b22"/>{dots}<defs>{defined}</defs>'
        f'<svg x="12" y="32" width="{width - 24:g}" height="{ROWS * LINE:g}">{film}</svg>'
        "</svg>\n"
    )


def _line(cells: list[Cell]) -> str:
    """Return runs of one style as text elements, each as wide as its letters, whatever the font is."""
    parts, start = [], 0
    while start < len(cells):
        end, style = start, cells[start][1]
        while end < len(cells) and cells[end][1] == style:
            end += 1
        words = "".join(letter for letter, _ in cells[start:end])
        if words.strip():
            lead = len(words) - len(words.lstrip())
            words = words.strip()
            place = f'x="{(start + lead) * LETTER:g}" y="12" textLength="{len(words) * LETTER:g}"'
            parts.append(f"<text {place}{_class(style)}>{escape(words, quote=False)}</text>")
        start = end
    return "".join(parts)


def _class(style: Style) -> str:
    names = [name for name in (style.colour, "b" if style.bold else None, "d" if style.dim else None) if name]
    return f' class="{" ".join(names)}"' if names else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the existing recording again")
    path = FOLDER / "cast.cast"
    if not parser.parse_args().draw:
        head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": " ".join(COMMAND)}
        lines = [json.dumps(head), *(json.dumps([round(moment, 3), "o", text]) for moment, text in record(COMMAND))]
        path.write_text("\n".join(lines) + "\n")
    events = [(moment, text) for moment, _, text in map(json.loads, path.read_text().splitlines()[1:])]
    (FOLDER / "cast.svg").write_text(svg(frames(events)))
    for made in (path, FOLDER / "cast.svg"):
        print(f"wrote {made.name}: {made.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
