"""A decoupled network computes what it should: groups are alone between shuffles, and taken weights mean the same."""

from __future__ import annotations

import copy

import pytest
import torch
from decoupled_networks import NETWORKS, SHAPE, Joined, Residual, network, pictures
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from manyhands.decoupling.decouple import Decoupled, decouple
from manyhands.decoupling.layers import GroupedConcat, GroupShuffle, dealt_order
from manyhands.decoupling.rewriting import Rewriting


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    x = pictures(3)
    with torch.no_grad():
        return float((one.eval()(x) - other.eval()(x)).abs().max())


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize("widen", [1.0, 1.5, 2.0])
def test_one_group_with_the_original_weights_is_the_original(name: str, widen: float) -> None:
    """Widened too: channels that stand for the same old one share its weights."""
    module = network(name)
    if name == "excited" and widen != 1.0:
        module.norm = nn.Identity()  # group norm's groups would be others
    made = decouple(module, 1, 0, widen, weights="original", inputs=SHAPE)
    wider = made.report.after.parameters > made.report.before.parameters
    assert wider == (widen > 1)
    assert largest_difference(module, made) <= (1e-12 if widen > 1 else 0.0)


def test_the_given_network_is_left_alone() -> None:
    module = network("residual")
    before = copy.deepcopy(module.state_dict())
    modes = [child.training for child in module.modules()]
    decouple(module, 4, 1, 1.5, weights="original", inputs=SHAPE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [child.training for child in module.modules()] == modes


def mask(convolution: nn.Module, outputs: list[int], inputs: list[int]) -> None:
    """Cut what connects different groups; `outputs` and `inputs` say which group every channel is of."""
    weight: Tensor = convolution.weight  # type: ignore[assignment]
    rows, columns = torch.tensor(outputs), torch.tensor(inputs)
    same = rows[:, None] == columns[None, :]
    if isinstance(convolution, nn.ConvTranspose2d):
        same = same.T
    with torch.no_grad():
        weight *= same.to(weight.dtype)[:, :, None, None]


def groups_of(channels: int, groups: int) -> list[int]:
    return [channel * groups // channels for channel in range(channels)]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("widen", [1.0, 1.5])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_network_of_groups_already_is_kept_as_it_is(groups: int, widen: float) -> None:
    """Nothing is dropped that was not zero, so nothing changes: widths, concatenations and their order are right."""
    module = network("joined")
    assert isinstance(module, Joined)
    both = groups_of(8, groups) + groups_of(24, groups)
    mask(module.left, groups_of(8, groups), groups_of(8, groups))
    mask(module.right, groups_of(24, groups), groups_of(8, groups))
    mask(module.mixed, groups_of(16, groups), both)
    mask(module.up, groups_of(8, groups), groups_of(16, groups))
    mask(module.last, groups_of(16, groups), groups_of(8, groups) + both)
    made = decouple(module, groups, 0, widen, weights="original", inputs=SHAPE)
    assert len(made.report.concats) == 2
    assert largest_difference(module, made) <= 1e-12


def test_a_shuffle_is_what_the_next_convolution_expects() -> None:
    groups, width = 2, 16
    module = network("residual")
    assert isinstance(module, Residual)
    own, wide = groups_of(width, groups), groups_of(2 * width, groups)
    mask(module.first, own, own)
    mask(module.down, wide, own)
    mask(module.third, wide, wide)
    mask(module.shortcut, wide, own)
    dealt = dealt_order(width, groups)
    mask(module.second, own, [dealt.index(channel) * groups // width for channel in range(width)])
    made = decouple(module, groups, 1, 1.0, weights="original", inputs=SHAPE)
    assert [one.before for one in made.report.shuffles] == ["third"]
    again = decouple(module, groups, "all", 1.0, weights="original", inputs=SHAPE)
    assert [one.before for one in again.report.shuffles] == ["second", "third"]
    # Its weights fit a shuffle before `second` and none before `third`.
    with torch.no_grad():
        before_third = again.get_submodule(again.report.shuffles[1].name)
        assert isinstance(before_third, GroupShuffle)
        before_third.groups = 1
        again.get_submodule("third").load_state_dict(
            decouple(module, groups, 0, 1.0, weights="original", inputs=SHAPE).get_submodule("third").state_dict()
        )
    assert largest_difference(module, again) <= 1e-12


def test_dropped_inputs_are_made_up_for() -> None:
    """Every output sees a quarter of the inputs: its weights keep their size, so that outputs vary as before."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 2, 1)).double()
    made = decouple(module, 4, 0, 1.0, weights="original", inputs=(3, 16, 16))
    old, new = module[1].weight.flatten(1), made.get_submodule("1").weight.flatten(1)  # type: ignore[operator]
    assert new.shape == (64, 16 * 9)
    assert torch.allclose(old.norm(dim=1), new.norm(dim=1), rtol=1e-12)
    assert torch.allclose(new[:16] * (old[:16, :144].norm(dim=1) / new[:16].norm(dim=1))[:, None], old[:16, :144])


# Groups are alone between shuffles


def values_of(made: Decoupled, x: Tensor) -> dict[str, Tensor]:
    """What every layer makes."""
    found: dict[str, Tensor] = {}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            if isinstance(result, Tensor):
                found[n.name] = result.detach().clone()
            return result

    with torch.no_grad():
        Noting(made.eval()).run(x)
    return found


def changed_groups(one: Tensor, other: Tensor, groups: int) -> set[int]:
    differs = (one != other).flatten(2).any(2).any(0)
    return {group for group, part in enumerate(differs.view(groups, -1)) if part.any()}


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", ["residual", "joined"])
@pytest.mark.parametrize("shuffles", [0, 1])
def test_a_group_is_alone_until_the_next_shuffle(name: str, shuffles: int) -> None:
    groups = 4
    made = decouple(network(name), groups, shuffles, 1.5, inputs=SHAPE).double()
    x = pictures(2)
    before = values_of(made, x)
    stem = made.get_submodule("stem")
    with torch.no_grad():  # another stem makes other numbers in the channels of one group
        rows = len(stem.weight) // groups  # type: ignore[arg-type]
        stem.weight[rows : 2 * rows] += 1.0  # type: ignore[index, operator]
    after = values_of(made, x)
    seen_alone = seen_mixed = 0
    mixed: set[str] = set()
    for node in made.graph.nodes:
        if node.op in ("placeholder", "output") or node.name == "head" or before[node.name].dim() != 4:
            continue
        found = changed_groups(before[node.name], after[node.name], groups)
        if node.op == "call_module" and isinstance(made.get_submodule(str(node.target)), GroupShuffle):
            mixed.add(node.name)
        if mixed.intersection(source.name for source in node.all_input_nodes):
            mixed.add(node.name)
        if node.name in mixed:
            assert found == set(range(groups)), node.name
            seen_mixed += 1
        else:
            assert found == {1}, node.name
            seen_alone += 1
    assert seen_alone > 5
    assert bool(seen_mixed) == bool(shuffles)


@settings(max_examples=20, deadline=None)
@given(groups=st.integers(1, 5), size=st.integers(1, 4), parts=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_shuffle_and_concatenation_by_hand(groups: int, size: int, parts: list[int]) -> None:
    x = torch.arange(2.0 * groups * size * groups * 6).view(2, groups * size * groups, 2, 3)
    dealt = GroupShuffle(groups)(x)
    assert torch.equal(dealt, x[:, dealt_order(x.shape[1], groups)])
    assert torch.equal(dealt, torch.channel_shuffle(x, groups))
    # A group has the same number of channels from every group.
    for group in range(groups):
        channels = torch.tensor(dealt_order(x.shape[1], groups)).view(groups, -1)[group]
        assert (channels // (groups * size)).bincount(minlength=groups).tolist() == [size] * groups
    maps = [torch.randn(2, groups * part, 2, 3) for part in parts]
    joined = GroupedConcat(groups)(*maps)
    chunks = [torch.cat([m.chunk(groups, 1)[group] for m in maps], 1) for group in range(groups)]
    assert torch.equal(joined, torch.cat(chunks, 1))


class WritesInPlace(nn.Module):
    """What a branch adds to is read again afterwards, by the name it had before."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first = nn.Conv2d(16, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 1)
        self.beside = nn.Conv2d(16, 16, 1)
        self.third = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        beside, same = self.beside(x), x
        x = x.add_(self.second(torch.relu(self.first(x))))
        x = torch.relu(x) + self.third(same) + beside
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("name", [*sorted(NETWORKS), "in place"])
def test_moved_calls_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = WritesInPlace().double() if name == "in place" else network(name)
    moved = decouple(model.eval(), 2, "all", 1.0, weights="original", inputs=SHAPE).eval()
    monkeypatch.setattr(Rewriting, "_delay", lambda *_: None)
    plain = decouple(model, 2, "all", 1.0, weights="original", inputs=SHAPE).eval()
    assert {n: t.shape for n, t in moved.state_dict().items()} == {n: t.shape for n, t in plain.state_dict().items()}
    with torch.no_grad():
        assert torch.equal(moved(pictures(2)), plain(pictures(2)))
