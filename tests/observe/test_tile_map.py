"""The tile map is drawn for any grid, and the panels that are left out are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from manyhands.facts.boxes import Box, Layout
from manyhands.observe.plots import draw_memory
from manyhands.observe.tile_map import HANDED, MOST_PANELS, GroupMap, _apart, _caption, _label, chosen, draw_tiles


def group(
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    *,
    halo: int = 2,
    size: tuple[int, int] = (48, 64),
    way: str = "forward",
    number: int = 1,
    exchanged: int = 1000,
    sender: str | None = None,
) -> GroupMap:
    """A map cut into a grid, each tile with a halo around it, as if one neighbour had all of it."""
    names = [f"device-{place}" for place in range(len(rows) * len(columns))]
    layout = Layout.grid(size, (0, 1), (rows, columns), names)
    owned = {name: layout.hull(name) for name in names}
    halos = {}
    for name, box in owned.items():
        grown = Box(tuple((max(0, low - halo), min(end, high + halo)) for (low, high), end in zip(box.intervals, size)))
        source = names[0] if sender is None else sender
        halos[name] = [(source, piece) for piece in grown.subtract(box)] if not box.is_empty else []
    return GroupMap(way, number, "layers a $x$ .. b", (8, *size), owned, halos, exchanged, ("a note",))


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(
    "groups",
    [
        [group((1,), (1, 1))],
        [group((1,), (1,) * 24)],
        [group((1,) * 6, (1,) * 4), group((1,) * 6, (1,) * 4, halo=20, sender=HANDED)],
        [group((5, 1, 3), (1, 7)), group((5, 1, 3), (1, 7), halo=100, way="backward")],
        [group((1,) * 5, (1,), size=(3, 3))],
        [group((1, 1), (1, 1), halo=0, exchanged=0, number=n) for n in range(1, 30)],
        [group((1,) * 10, (1,) * 10)],
    ],
    ids=["two", "one row", "24", "uneven", "tiles without rows", "many groups", "100 tiles"],
)
def test_any_grid_is_drawn(groups: list[GroupMap], tmp_path: Path) -> None:
    path = draw_tiles(groups, tmp_path / "plots" / "tiles.png", title="t $1$")
    with Image.open(path) as picture:
        assert 700 <= picture.width <= 1601
        assert picture.height <= 3000


def test_tiles_drawn_apart_leave_room_for_halos() -> None:
    """No tile with its halo touches another."""
    one = group((1, 2, 1), (3, 1), halo=5)
    drawing = _apart(one)
    placed = []
    for device, (down, across) in drawing.offsets.items():
        hull = one.owned[device]
        for _, box in one.halos[device]:
            hull = hull.hull(box)
        (top, bottom), (left, right) = hull.intervals
        placed.append((top + down, bottom + down, left + across, right + across))
        assert 0 <= placed[-1][0] <= placed[-1][1] <= drawing.height + 1e-9
        assert 0 <= placed[-1][2] <= placed[-1][3] <= drawing.width + 1e-9
    for number, a in enumerate(placed):
        for b in placed[:number]:
            assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]


def test_of_many_groups_those_that_exchange_most_are_drawn() -> None:
    forward = [group((1,), (1, 1), number=n, exchanged=n * n % 23) for n in range(1, 24)]
    backward = [group((1,), (1, 1), number=n, exchanged=n, way="backward") for n in range(1, 4)]
    shown = chosen([*forward, *backward])
    assert len(shown) == MOST_PANELS
    assert [one.number for one in shown if one.way == "backward"] == [1, 2, 3]
    kept = [one for one in shown if one.way == "forward"]
    assert [one.number for one in kept] == sorted(one.number for one in kept)
    assert min(one.exchanged_bytes for one in kept) >= sorted(one.exchanged_bytes for one in forward)[-9]
    assert chosen(forward[:5]) == forward[:5]


def test_the_caption_says_what_is_seen() -> None:
    lines = _caption(group((1, 1), (1,), halo=3, exchanged=51_200), 4, 3.0)
    assert lines == [
        "forward 1 of 4: 51.2 kB exchanged",
        "layers a $x$ .. b",
        "map 8x48x64, halo up to 3 rows",
        "a note",
    ]
    alone = _caption(group((1,), (1, 1), halo=1, exchanged=0, way="backward"), 1, 3.0)
    assert alone[0] == "backward 1 of 1: nothing exchanged"
    assert alone[2] == "gradients of 8x48x64, halo up to 1 column"


def test_a_name_stands_upright_in_a_narrow_tile_and_is_left_out_of_a_tiny_one() -> None:
    assert (one := _label("pi-1", Box.of((0, 100), (0, 100)), 1.0)) is not None
    assert (one.text, one.angle, one.has_name) == ("pi-1\n100x100", 0, True)
    assert (narrow := _label("pi-1", Box.of((0, 100), (0, 9)), 1.0)) is not None
    assert narrow.angle == 90
    assert narrow.has_name
    assert _label("pi-1", Box.of((0, 2), (0, 2)), 1.0) is None


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("budgets", [None, {"a": 4e9, "b": 30.0}, {"c": 1.0}])
def test_memory_is_drawn(budgets: dict[str, float] | None, tmp_path: Path) -> None:
    parts = {"a": {"features": 10, "deltas": 5, "weights": 3, "buffers": -2}, "b $x$": {"other": 7}, "c": {}}
    path = draw_memory(parts, budgets, tmp_path / "memory.png", title="t")
    assert path.read_bytes().startswith(b"\x89PNG")
    draw_memory({}, budgets, path, title="")
