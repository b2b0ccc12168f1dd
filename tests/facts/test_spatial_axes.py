"""Which axes of a tensor are its depth, rows and columns, followed through operators by their read rules."""

from __future__ import annotations

from manyhands.facts.reads import Blocks, Dealt, Read, Rule, Whole, Window
from manyhands.facts.spatial_axes import AxisStep, keeps_axes, spatial_axes

PICTURE, LAST, VOLUME = (1, 3, 8, 6), (1, 8, 6, 3), (1, 3, 4, 8, 6)


def step(target: str, source: str, made: str, *rules: Rule) -> AxisStep:
    return AxisStep(f"aten.{target}.default", (made,), (Read(source, rules),))


def axes_of(steps: list[AxisStep], **shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return spatial_axes(steps, shapes, frozenset(shapes))


PERMUTE = (Window(0), Window(3), Window(1), Window(2))
BACK = (Window(0), Window(2), Window(3), Window(1))
SAME = tuple(Window(axis) for axis in range(4))
CONV = (Window(0), Whole(), Window(2, 3, 1, 1), Window(3, 3, 1, 1))


def test_a_permute_takes_rows_and_columns_along() -> None:
    steps = [step("permute", "x", "a", *PERMUTE), step("layer_norm", "a", "b", *SAME[:3], Whole()),
             step("permute", "b", "c", *BACK)]  # fmt: skip
    found = axes_of(steps, x=PICTURE, a=LAST, b=LAST, c=PICTURE)
    assert found == {"x": (2, 3), "a": (1, 2), "b": (1, 2), "c": (2, 3)}


def test_a_transposed_picture_keeps_the_order_of_rows_and_columns() -> None:
    steps = [step("transpose", "x", "a", Window(0), Window(1), Window(3), Window(2)), step("conv2d", "a", "b", *CONV)]
    assert axes_of(steps, x=PICTURE, a=(1, 3, 6, 8), b=(1, 3, 6, 8)) == {"x": (2, 3), "a": (3, 2), "b": (3, 2)}


def test_what_enters_has_the_axes_that_a_later_convolution_expects() -> None:
    steps = [step("permute", "x", "a", *BACK), step("relu", "a", "b", *SAME), step("conv2d", "b", "c", *CONV)]
    assert axes_of(steps, x=LAST, a=PICTURE, b=PICTURE, c=PICTURE)["x"] == (1, 2)
    rules = (Window(0), Whole(), *(Window(axis, 3, 1, 1) for axis in (2, 3, 4)))
    found = axes_of([step("relu", "x", "a", *(Window(a) for a in range(5))), step("conv3d", "a", "b", *rules)],
                    x=VOLUME, a=VOLUME, b=VOLUME)  # fmt: skip
    assert found == dict.fromkeys("xab", (2, 3, 4))


def test_channels_in_groups_come_before_rows_and_columns() -> None:
    steps = [step("view", "x", "a", Window(0), Blocks(1, 3, 1), Window(3), Window(4))]
    assert axes_of(steps, x=(1, 6, 8, 6), a=(1, 2, 3, 8, 6))["a"] == (3, 4)
    assert axes_of([], x=(1, 2, 3, 8, 6))["x"] == (3, 4)


def test_of_several_inputs_the_largest_is_followed() -> None:
    reads = (Read("gate", (Window(0), Window(1), Whole(), Whole())), Read("x", SAME))
    found = axes_of([AxisStep("aten.mul.Tensor", ("a",), reads)], gate=(1, 3, 1, 1), x=PICTURE, a=PICTURE)
    assert found["a"] == (2, 3)


def test_tensors_without_a_batch_or_with_other_ranks_have_none() -> None:
    found = spatial_axes([], {"x": PICTURE, "table": PICTURE, "tokens": (1, 5, 7)}, frozenset({"x", "tokens"}))
    assert found == {"x": (2, 3)}


def test_rules_of_another_rank_than_the_tensor_are_not_followed() -> None:
    found = axes_of([step("relu", "x", "a", *SAME)], x=PICTURE, a=(1, 4))
    assert found == {"x": (2, 3)}


def test_axes_are_kept_by_parts_that_make_parts() -> None:
    def kept(*rules: Rule, shape: tuple[int, ...] = PICTURE, made: tuple[int, ...] = (2, 3)) -> bool:
        return keeps_axes(Read("x", rules), shape, (2, 3), made)

    assert kept(*SAME)
    assert kept(*CONV)
    assert kept(*BACK[:1], Window(3), Window(1), Window(2), made=(1, 2))
    assert not kept(*SAME, made=(3, 2))
    assert not kept(Window(0), Window(1), Window(2), Whole())
    assert kept(Window(0), Window(1), Window(2), Whole(), shape=(1, 3, 8, 1))
    assert not kept(Window(0), Window(1), Window(2), Dealt(3, 2))
    assert not kept(Window(0), Window(2), Window(2), Window(3))
    assert not kept(*SAME, made=(2, 3, 4))
