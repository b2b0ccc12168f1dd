"""Optimisers as data: written, printed, compared, stored, and read from the command line."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer, parse

COSINE = ("CosineAnnealingLR", {"T_max": 100})
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
options = st.dictionaries(
    names.filter(lambda name: name != "schedule"), scalars | st.lists(scalars, max_size=3), max_size=4
)
drawn = st.builds(
    lambda name, schedule, given: Optimizer(
        name, schedule=schedule, milestones=range_of(schedule), **{k: v for k, v in given.items() if k != "milestones"}
    ),
    names,
    st.lists(st.tuples(names, options), max_size=3),
    options,
)


def range_of(schedule: list[Any]) -> list[int]:
    return [7 * number for number in range(1, len(schedule))]


def test_what_was_written_can_be_read() -> None:
    optimizer = Optimizer("Adam", lr=1e-3, betas=[0.9, 0.99], schedule=COSINE)
    assert optimizer.name == "Adam"
    assert optimizer.options == {"lr": 1e-3, "betas": (0.9, 0.99)}
    assert optimizer.schedule == (COSINE,)
    assert Optimizer("SGD").schedule == ()
    assert Optimizer("SGD", schedule=None) == Optimizer("SGD")
    two = Optimizer("SGD", schedule=[COSINE, ("StepLR", {"step_size": 3})])
    assert two.schedule[1] == ("StepLR", {"step_size": 3})
    assert two.milestones == (100,)
    assert two == Optimizer("SGD", schedule=list(two.schedule), milestones=[100])
    assert two != Optimizer("SGD", schedule=list(two.schedule), milestones=[99])


def test_prints_as_it_was_written() -> None:
    assert repr(Optimizer("SGD", lr=0.1, momentum=0.9)) == "Optimizer('SGD', lr=0.1, momentum=0.9)"
    text = "Optimizer('Adam', lr=0.001, schedule=('CosineAnnealingLR', {'T_max': 100}))"
    assert repr(Optimizer("Adam", lr=1e-3, schedule=COSINE)) == text
    assert Optimizer("SGD").to_text() == "SGD"
    typed = "Adam:lr=0.001,betas=[0.9,0.99],amsgrad=true,schedule=CosineAnnealingLR,T_max=100"
    assert Optimizer("Adam", lr=1e-3, betas=(0.9, 0.99), amsgrad=True, schedule=COSINE).to_text() == typed
    two = Optimizer("SGD", schedule=[COSINE, COSINE])
    assert repr(two).endswith(
        "schedule=[('CosineAnnealingLR', {'T_max': 100}), ('CosineAnnealingLR', {'T_max': 100})], milestones=[100])"
    )


typed_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip
typed_options = st.dictionaries(
    names.filter(lambda name: name not in ("schedule", "milestones")),
    typed_scalars | st.lists(typed_scalars, min_size=1, max_size=3).map(tuple) | st.just("sum"),
    max_size=4,
)


@pytest.mark.slow
@given(names, typed_options, st.lists(st.tuples(names, typed_options), max_size=2))
def test_is_typed_as_it_is_read(name: str, given: dict[str, Any], schedule: list[tuple[str, dict[str, Any]]]) -> None:
    optimizer = Optimizer(name, schedule=schedule, milestones=[3] if len(schedule) == 2 else None, **given)
    assert parse(optimizer.to_text()) == optimizer


@pytest.mark.slow
@given(drawn)
def test_survives_json_and_copying(optimizer: Optimizer) -> None:
    again = Optimizer.from_dict(json.loads(json.dumps(optimizer.to_dict(), allow_nan=False)))
    assert again == optimizer
    assert hash(again) == hash(optimizer)
    assert repr(again) == repr(optimizer)
    assert copy.deepcopy(optimizer) == copy.copy(optimizer) == optimizer


def test_compared_by_what_they_say() -> None:
    assert Optimizer("SGD", lr=0.1, momentum=0.9) == Optimizer("SGD", momentum=0.9, lr=0.1)
    assert hash(Optimizer("SGD", lr=0.1, momentum=0.9)) == hash(Optimizer("SGD", momentum=0.9, lr=0.1))
    assert Optimizer("SGD", lr=0.1) != Optimizer("SGD", lr=0.2)
    assert Optimizer("SGD", lr=0.1) != Optimizer("Adam", lr=0.1)
    assert Optimizer("SGD", lr=0.1) != Optimizer("SGD", lr=0.1, schedule=COSINE)
    assert Optimizer("SGD") != "SGD"


def test_cannot_be_changed() -> None:
    optimizer = Optimizer("SGD", lr=0.1, schedule=COSINE)
    for field in ("name", "_name", "options", "other"):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(optimizer, field, 1)
    with pytest.raises(AttributeError, match="cannot be changed"):
        del optimizer._options
    optimizer.options["lr"] = 9
    optimizer.schedule[0][1]["T_max"] = 9
    assert optimizer == Optimizer("SGD", lr=0.1, schedule=COSINE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": lambda: 1}, "SGD: lr is <function .*, of type function"),
        ({"lr": {"a": 1}}, r"SGD: lr is \{'a': 1\}, of type dict"),
        ({"betas": [[0.9]]}, r"SGD: betas is \[0.9\], of type list"),
        ({"lr": 1j}, "SGD: lr is 1j, of type complex"),
        ({"lr": math.nan}, "SGD: lr is nan; it must be finite"),
        ({"lr": math.inf}, "SGD: lr is inf; it must be finite"),
        ({"not a name": 1}, "'not a name' is not an option's name"),
        ({"schedule": "ExponentialLR"}, "The schedule is 'ExponentialLR'; it must be a pair"),
        ({"schedule": ("ExponentialLR",)}, "must be a pair"),
        ({"schedule": ("ExponentialLR", 0.9)}, "must be a pair"),
        ({"schedule": ["StepLR", {"step_size": 1}, 3]}, "must be a pair"),
        ({"schedule": [("StepLR", {"step_size": 1}), "ExponentialLR"]}, "A schedule is 'ExponentialLR'"),
        ({"schedule": [(3, {})]}, "The schedule is 3; it must be a class of torch.optim.lr_scheduler"),
        (
            {"schedule": [("StepLR", {"step_size": 3}), COSINE]},
            "nothing says where StepLR ends: it has no end of its own",
        ),
        ({"schedule": [("LinearLR", {}), COSINE]}, "nothing says where LinearLR ends: its total_iters is None"),
        ({"schedule": [COSINE, COSINE], "milestones": []}, r"There are 2 schedule\(s\) and 0 milestone\(s\)"),
        ({"schedule": COSINE, "milestones": [3]}, r"There are 1 schedule\(s\) and 1 milestone\(s\)"),
        ({"milestones": [3]}, r"There are 0 schedule\(s\) and 1 milestone\(s\)"),
        ({"schedule": [COSINE] * 3, "milestones": [5, 5]}, "each above the one before"),
        ({"schedule": [COSINE] * 2, "milestones": [0]}, "above 0"),
        ({"schedule": [COSINE] * 2, "milestones": 5}, "milestones is 5; it must be a list of steps"),
        ({"schedule": [COSINE] * 2, "milestones": [2.5]}, "must be a list of steps"),
        ({"schedule": ("LambdaLR", {"lr_lambda": abs})}, "LambdaLR: lr_lambda is <built-in function abs>"),
    ],
)
def test_refuses_what_cannot_travel(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        Optimizer("SGD", **given)


def test_says_what_may_be_given() -> None:
    with pytest.raises(BadValue) as caught:
        Optimizer("SGD", lr=object())
    assert "numbers, true or false, texts, None, and lists" in caught.value.hint
    for name in ("", "a b", 3, None):
        with pytest.raises(BadValue, match="by name"):
            Optimizer(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "optimizer is .*expected `object`"),
        ({}, "the field 'name' is missing"),
        ({"name": "SGD", "option": {}}, "no field 'option'"),
        ({"name": "SGD", "options": {"schedule": []}}, "'schedule' is among the options"),
        ({"name": "SGD", "options": {"lr": {}}}, "SGD: lr is"),
        ({"name": "SGD", "schedule": [["StepLR"]]}, "optimizer: schedule"),
        ({"name": "__import__('os')"}, "by name"),
    ],
)
def test_bad_documents(document: Any, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        Optimizer.from_dict(document)


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("adam", Optimizer("adam")),
        (" SGD:lr=0.1,momentum=0.9 ", Optimizer("SGD", lr=0.1, momentum=0.9)),
        ("Adam:lr=1e-3, betas=[0.9, 0.99] ,eps=1e-6", Optimizer("Adam", lr=1e-3, betas=(0.9, 0.99), eps=1e-6)),
        ("Adam:betas=(0.9,0.99)", Optimizer("Adam", betas=(0.9, 0.99))),
        (
            "SGD:nesterov=true,foreach=None,maximize=False",
            Optimizer("SGD", nesterov=True, foreach=None, maximize=False),
        ),
        ("SGD:lr=0.1,schedule=CosineAnnealingLR,T_max=100", Optimizer("SGD", lr=0.1, schedule=COSINE)),
        (
            "SGD:milestones=[8],schedule=MultiStepLR,milestones=[3,5],gamma=0.5,schedule=LinearLR",
            Optimizer(
                "SGD",
                schedule=[("MultiStepLR", {"milestones": (3, 5), "gamma": 0.5}), ("LinearLR", {})],
                milestones=[8],
            ),
        ),
        ("SGD:schedule=CyclicLR,mode=exp_range", Optimizer("SGD", schedule=("CyclicLR", {"mode": "exp_range"}))),
    ],
)
def test_command_line(text: str, optimizer: Optimizer) -> None:
    parsed = parse(text)
    assert parsed == optimizer
    assert [type(value) for value in parsed.options.values()] == [type(value) for value in optimizer.options.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an optimiser's name"),
        (":lr=1", "'' is not an optimiser's name"),
        ("S GD:lr=1", "'S GD' is not an optimiser's name"),
        ("SGD:", "'' is not option=value"),
        ("SGD:lr", "'lr' is not option=value"),
        ("SGD:lr=", "'lr=' is not option=value"),
        ("SGD:lr=1,,momentum=2", "'' is not option=value"),
        ("SGD:lr=1,0.9", "'0.9' is not option=value"),
        ("SGD:lr=1,lr=2", "lr of SGD is given twice"),
        ("SGD:schedule=StepLR,gamma=1,gamma=2", "gamma of StepLR is given twice"),
        ("Adam:betas=[0.9", r"the bracket in 'betas=\[0.9' is not closed"),
        ("Adam:betas=[0.9)", "is not closed"),
        ("Adam:betas=[0.9,]", "a value is missing"),
        ("SGD:lr=nan", "lr is nan; it must be finite"),
        ("SGD:schedule=3", "The schedule is '3'"),
    ],
)
def test_command_line_errors_name_the_bad_part(text: str, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        parse(text)


@given(st.text(alphabet="SGDlr=,:[]()0.1e- schedule", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        optimizer = parse(text)
    except BadValue:
        return
    assert Optimizer.from_dict(optimizer.to_dict()) == optimizer
