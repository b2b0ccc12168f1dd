"""A plan's picture: every device has its row, every part its place, whatever the plan and the output."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import hand_made
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Stage
from manyhands.observe.plan_lines import FILLS, PLAIN_FILLS, can_draw, plan_lines
from manyhands.observe.plan_picture import DeviceLoad, draw_plan
from manyhands.observe.plan_rows import MOST_ROWS, layer_edges, plan_rows

CHAIN = hand_made.chain(6)
MIXED = Plan("chain", 8, (
    Stage((0, 2), ("a", "b", "c"), ByTiles((2, 1, 1))),
    Stage((2, 4), ("d", "e"), BySamples((5, 3))),
    Stage((4, 6), ("f",)),
))  # fmt: skip


def many(count: int, shares: tuple[int, ...] | None = None) -> Plan:
    names = tuple(f"device-{n}" for n in range(count))
    counts = shares or (1,) * count
    return Plan("chain", sum(counts), (Stage((0, 3), names, BySamples(counts)), Stage((3, 6), ("last",))))


def test_each_device_has_one_line_and_its_parts_lie_under_its_layers() -> None:
    lines = plan_lines(MIXED, CHAIN, [*"abcdef", "idle"], width=98)
    drawn = {line.split()[0]: line[7:] for line in lines[2:-1]}
    assert list(drawn) == [*"abcdef", "idle"]
    assert all(len(line) == len(drawn["a"]) for line in drawn.values())
    third = len(drawn["a"]) / 3
    for number, (devices, by) in enumerate((("abc", "tiles"), ("de", "samples"), ("f", "all"))):
        for device in devices:
            fill = FILLS[by]  # type: ignore[index]
            first, last = drawn[device].index(fill), drawn[device].rindex(fill) + 1
            assert first == pytest.approx(number * third, abs=1)
            assert last == pytest.approx((number + 1) * third, abs=1)
    assert "tile 1,0 of 3x1, 25%" in drawn["b"]
    assert "3 of 8 samples" in drawn["e"]
    assert set(drawn["idle"]) == {"·"}
    assert [lines[0].index(f"stage {n}") for n in range(3)] == [7 + round(n * third) for n in range(3)]


def test_letters_serve_where_blocks_cannot_be_printed() -> None:
    lines = plan_lines(MIXED, CHAIN, [*"abcdef"], width=70, plain=True)
    assert all(line.isascii() for line in lines)
    assert all(fill in "".join(lines) for by, fill in PLAIN_FILLS.items() if by != "channels")
    assert len({*PLAIN_FILLS.values(), "."}) == 5
    assert can_draw("utf-8")
    assert not any(can_draw(name) for name in ("ascii", "latin-1", None, "no-such-encoding"))


def test_a_narrow_terminal_and_more_layers_than_letters() -> None:
    long = hand_made.chain(200)
    plan = Plan("chain", 4, (Stage((0, 150), ("a",)), Stage((150, 200), ("b",))))
    for width in (1, 30, 300):
        lines = plan_lines(plan, long, ["a", "b"], width=width)
        assert len({len(line) for line in lines[2:-1]}) == 1


def test_many_devices_that_do_the_same_share_a_row() -> None:
    rows = plan_rows(many(30), [*many(30).devices, "x", "y", "z", "w"])
    assert [len(row.devices) for row in rows] == [30, 1, 4]
    assert rows[0].blocks[0].label == "1 of 30 samples each"
    assert (rows[0].name, rows[2].name) == ("device-0 and 29 more", "4 not used")
    assert len(plan_rows(many(MOST_ROWS - 1), many(MOST_ROWS - 1).devices)) == MOST_ROWS


def test_layers_are_as_wide_as_their_work_but_none_is_lost() -> None:
    edges = layer_edges(CHAIN)
    assert edges == pytest.approx([n / 6 for n in range(7)])


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    "plan",
    [
        MIXED,
        many(4, (5, 1, 1, 1)),
        many(60, tuple(range(1, 61))),
        Plan("chain", 4, (Stage((0, 6), ("a", "b"), ByChannels((3, 1))),), order="stream"),
    ],
    ids=["mixed", "uneven", "sixty unequal", "channels"],
)
def test_any_plan_is_drawn(plan: Plan, tmp_path: Path) -> None:
    loads = {name: DeviceLoad(0.5, 5e8, 1e9) for name in plan.devices}
    notes = ["What limits it: a is full: 950 MB of 1 GB."]
    path = draw_plan(plan, CHAIN, [*plan.devices, "idle"], loads, tmp_path / "plan.png", title="a $1$", notes=notes)
    with Image.open(path) as picture:
        assert picture.width == 1600
        assert 300 < picture.height < 2600
