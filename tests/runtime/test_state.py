"""Where the last complete state lies, and who gives what to whom: against looking at every step and every holder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from manyhands.executor.messages import COORDINATOR
from manyhands.runtime import state
from manyhands.runtime.control_parts import TensorEntry
from manyhands.runtime.order import RunState
from manyhands.runtime.state import LOSS, OPTIMIZER, WEIGHT, Located, byte_count, located, weight_of

WEIGHTS = ("0.weight", "0.bias", "1/odd.weight", "2.weight")
WORKERS = ("a", "b", "c", "d")
STEPS = st.integers(0, 6)
SIZES = {name: place + 1 for place, name in enumerate(WEIGHTS)}


def entry(name: str) -> TensorEntry:
    return TensorEntry(name, "float64", (SIZES[weight_of(name)],))


def tensors_of(weight: str, step: int) -> list[str]:
    """A weight travels with its part of the optimiser's state, once there is one."""
    return [WEIGHT + weight, *([OPTIMIZER + weight + "/momentum_buffer"] if step else [])]


@dataclass
class Drawn:
    """Who has which weights after which step, and what is saved."""

    has: dict[str, dict[int, set[str]]]
    saved: RunState | None
    most_steps: int

    @property
    def holdings(self) -> dict[str, dict[int, tuple[TensorEntry, ...]]]:
        return {
            worker: {
                step: tuple(entry(name) for one in sorted(own) for name in tensors_of(one, step))
                for step, own in by_step.items()
            }
            for worker, by_step in self.has.items()
        }

    @property
    def scalars(self) -> dict[str, dict[int, dict[str, Any]]]:
        return {
            worker: {step: {f"{one}/step": step for one in own} for step, own in by_step.items()}
            for worker, by_step in self.has.items()
        }

    def holders(self, weight: str, step: int) -> set[str]:
        found = {worker for worker, by_step in self.has.items() if weight in by_step.get(step, ())}
        return found | ({COORDINATOR} if self.saved is not None and self.saved.steps_done == step else set())

    def latest(self) -> int | None:
        """By looking everywhere."""
        steps = [step for step in range(7) if step <= self.most_steps or self.holders_of_saved(step)]
        return max((step for step in steps if all(self.holders(one, step) for one in WEIGHTS)), default=None)

    def holders_of_saved(self, step: int) -> bool:
        return self.saved is not None and self.saved.steps_done == step


def saved_at(step: int) -> RunState:
    tensors = {name: torch.zeros(SIZES[name], dtype=torch.float64) for name in WEIGHTS}
    optimizer = {f"{name}/momentum_buffer": tensor for name, tensor in tensors.items()} if step else {}
    return RunState(tensors, optimizer, {f"{name}/step": step for name in WEIGHTS}, step)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    names = draw(st.sets(st.sampled_from(WORKERS), min_size=1))
    some = st.dictionaries(STEPS, st.sets(st.sampled_from(WEIGHTS)), max_size=3)
    saved = draw(st.none() | STEPS.map(saved_at))
    return Drawn({name: draw(some) for name in sorted(names)}, saved, draw(STEPS))


@pytest.mark.slow
@given(drawn())
def test_the_latest_complete_step_is_found(one: Drawn) -> None:
    found = located(one.holdings, one.scalars, WEIGHTS, one.most_steps, one.saved)
    if found is None:
        assert one.latest() is None
        return
    step = found.steps_done
    assert step == one.latest()
    assert set(found.entries) == {name for weight in WEIGHTS for name in tensors_of(weight, step)}
    for name, listed in found.entries.items():
        assert listed == entry(name)
        assert set(found.holders[name]) == one.holders(weight_of(name), step)
        assert len(set(found.holders[name])) == len(found.holders[name])
        assert (name in found.here) == (COORDINATOR in found.holders[name])
    assert found.scalars == {f"{weight}/step": step for weight in WEIGHTS}


def test_a_step_whose_optimizer_state_is_gone_is_not_found() -> None:
    """A gateway alone steps its stage's weights: the others have them, and no momentum."""
    weights = tuple(entry(WEIGHT + name) for name in WEIGHTS)
    momentum = tuple(entry(name) for one in WEIGHTS for name in tensors_of(one, 4) if name.startswith(OPTIMIZER))
    needed = [each.name.removeprefix(OPTIMIZER) for each in momentum]
    scalars: dict[str, dict[int, dict[str, Any]]] = {"a": {}, "b": {}}
    with_gateway = {"a": {2: (*weights, *momentum), 4: (*weights, *momentum)}, "b": {2: weights, 4: weights}}
    kept_elsewhere = {"a": {}, "b": {2: (*weights, *momentum), 4: weights}}
    for holdings, step in ((with_gateway, 4), (kept_elsewhere, 2)):
        found = located(holdings, scalars, WEIGHTS, 4, None, optimizer_entries=needed)
        assert found is not None
        assert found.steps_done == step
    assert located({"b": {4: weights}}, scalars, WEIGHTS, 4, None, optimizer_entries=needed) is None
    found = located({"b": {4: weights}}, scalars, WEIGHTS, 4, saved_at(3), optimizer_entries=needed)
    assert found is not None
    assert found.steps_done == 3


@pytest.mark.slow
@given(drawn(), st.data())
def test_everybody_gets_what_it_wants_from_somebody_who_has_it(one: Drawn, data: st.DataObject) -> None:
    found = located(one.holdings, one.scalars, WEIGHTS, one.most_steps, one.saved)
    assume(found is not None)
    assert found is not None
    found = found.with_here({LOSS + "constant": torch.zeros(2)})
    devices = data.draw(st.lists(st.sampled_from((*one.has, "new")), unique=True, min_size=1))
    held = {device: data.draw(st.sets(st.sampled_from(WEIGHTS))) for device in devices}
    stepped = {
        device: data.draw(st.sets(st.sampled_from(sorted(names)))) if names else names for device, names in held.items()
    }
    wanted = {device: [*found.wanted_by(held[device], stepped[device]), LOSS + "constant"] for device in devices}
    for device, names in wanted.items():
        assert {weight_of(name) for name in names if name.startswith(OPTIMIZER)} <= stepped[device]
        assert {weight_of(name) for name in names if name.startswith(WEIGHT)} == held[device]
    sources = found.assigned(wanted)
    assert list(sources) == devices
    for device, own in sources.items():
        given_names = [name for names in own.values() for name in names]
        assert sorted(given_names) == sorted(wanted[device]), "each once"
        for source, names in own.items():
            assert names, "nobody is named who has nothing to give"
            for name in names:
                assert source in found.holders[name]
                assert source == device or device not in found.holders[name], "its own is not sent"
    _assert_as_even_as_by_hand(found, wanted, sources)


def _assert_as_even_as_by_hand(
    found: Located, wanted: dict[str, list[str]], sources: dict[str, dict[str, tuple[str, ...]]]
) -> None:
    """Tensor by tensor: no other who has it had sent less by then."""
    sent: Counter[str] = Counter()
    of = {(device, name): source for device, own in sources.items() for source, names in own.items() for name in names}
    for device, names in wanted.items():
        for name in names:
            source = of[device, name]
            if source != device:
                assert sent[source] == min(sent[one] for one in found.holders[name])
                sent[source] += byte_count([found.entries[name]])


@pytest.mark.slow
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 5))
def test_givers_have_nearly_as_much_to_send_as_each_other(sizes: list[int], givers: int, readers: int) -> None:
    names = [f"{WEIGHT}{number}" for number in range(len(sizes))]
    entries = {name: TensorEntry(name, "float32", (size,)) for name, size in zip(names, sizes)}
    who = tuple(WORKERS[:givers])
    found = Located(3, {}, entries, dict.fromkeys(names, who))
    sources = found.assigned({f"new-{number}": names for number in range(readers)})
    sent = dict.fromkeys(who, 0)
    for own in sources.values():
        for source, given_names in own.items():
            sent[source] += byte_count(entries[name] for name in given_names)
    assert max(sent.values()) - min(sent.values()) <= 4 * max(sizes)


def test_a_step_whose_loss_is_not_known_is_not_taken() -> None:
    """One has ended a step more, and the other's part of its loss is gone."""
    one = Drawn({"a": {4: set(WEIGHTS), 5: set(WEIGHTS)}}, saved_at(2), 4)
    found = located(one.holdings, one.scalars, WEIGHTS, 4, one.saved)
    assert found is not None
    assert found.steps_done == 4
    found = located(one.holdings, one.scalars, WEIGHTS, 3, one.saved)
    assert found is not None
    assert found.steps_done == 2
    assert set(found.holders.values()) == {(COORDINATOR,)}


def test_what_is_saved_helps_out() -> None:
    """Of the same step, the coordinator has what nobody else has."""
    one = Drawn({"a": {4: {"0.weight"}}, "b": {4: {"0.bias"}}}, saved_at(4), 5)
    found = located(one.holdings, one.scalars, WEIGHTS, 5, one.saved)
    assert found is not None
    assert found.steps_done == 4
    assert found.holders[WEIGHT + "0.weight"] == (COORDINATOR, "a")
    assert found.assigned({"a": found.wanted_by(["0.weight", "0.bias"], ["0.weight", "0.bias"])})["a"]["a"] == (
        WEIGHT + "0.weight", OPTIMIZER + "0.weight/momentum_buffer",
    )  # fmt: skip


def test_nothing_is_complete() -> None:
    one = Drawn({"a": {4: {"0.weight"}}, "b": {3: set(WEIGHTS) - {"0.weight"}}}, None, 5)
    assert located(one.holdings, one.scalars, WEIGHTS, 5) is None


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("weight:0.weight", "0.weight"),
        ("optimizer:0.weight/momentum_buffer", "0.weight"),
        ("optimizer:1/odd.weight/step", "1/odd.weight"),
        ("loss:0.weight", ""),
    ],
)
def test_which_weight_a_tensor_belongs_to(name: str, weight: str) -> None:
    assert state.weight_of(name) == weight
