"""The boxes of a stage shared by channels: what is split, fetched and added up, and which weights are where."""

from __future__ import annotations

import pytest
import torch
from box_drawing import is_partition, volume
from torch import Tensor, nn

from hand_made import chain
from manyhands.facts.boxes import Layout
from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import ByChannels, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.schedule.actions import Forward, Send
from manyhands.schedule.channels import ChannelGeometry
from manyhands.schedule.policy import Schedule

GROUPS = 4


def geometry(network: Network, *groups: int, **share: object) -> ChannelGeometry:
    devices = tuple(f"d{number}" for number in range(len(groups)))
    stage = Stage((0, len(network.layers)), devices, ByChannels(groups, **share))  # type: ignore[arg-type]
    found = Schedule(resolve(Plan(network.name, 1, (stage,), order="stream"), network), network).lowering.geometries[0]
    assert isinstance(found, ChannelGeometry)
    return found


class Decoupled(nn.Module):
    """A dense first layer, two grouped ones with a shuffle between them, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.before = nn.Conv2d(16, 16, 3, padding=1, groups=GROUPS)
        self.after = nn.Conv2d(16, 32, 1, groups=GROUPS)
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.before(torch.relu(self.norm(self.first(x)))))
        x = torch.channel_shuffle(x, GROUPS)
        out: Tensor = self.classifier(torch.relu(self.after(x)).mean((2, 3)))
        return out


@pytest.fixture(scope="module")
def decoupled() -> Network:
    return capture(Decoupled(), torch.zeros(2, 3, 8, 8), granularity="operators").network


def test_a_dense_operator_fetches_the_others_or_adds_up() -> None:
    fetching = geometry(chain(4), 3, 1, input_based=())
    assert [sum(map(volume, group.fetches.values())) for group in fetching.groups] == [0, 192, 192, 192]
    assert fetching.fractions("d0") == (0.75,) * 4
    adding = geometry(chain(4), 3, 1, input_based=(1, 3))
    assert adding.input_based == {1, 3}
    sent = [volume(moves) for group in adding.groups for moves in group.sums.values()]
    assert sent == [192, 192]  # each sends the other's channels: 48 of d1's by d0, 144 of d0's by d1
    assert adding.fractions("d1") == (0.25,) * 4


@pytest.mark.slow
def test_a_decoupled_network_asks_for_others_at_shuffles_and_for_the_classifier_only(decoupled: Network) -> None:
    found = geometry(decoupled, 1, 1, 1, 1)
    asking = [decoupled.ops[group.first].name for group in found.groups if group.fetches or group.sums]
    assert asking == ["channel_shuffle", "linear"]
    shuffle = next(group for group in found.groups if group.fetches)
    (moves,) = shuffle.fetches.values()
    assert len(moves) == 12
    assert volume(moves) == 16 * 64 * 3 // 4  # every device has a quarter of what it needs
    classifier = next(group for group in found.groups if group.sums)
    assert sum(map(volume, classifier.sums.values())) == 3 * 10
    assert found.groups[-1].sums == classifier.sums


@pytest.mark.parametrize("groups", [(1, 1), (3, 1), (1, 2, 1), (1, 1, 1, 1)])
def test_every_weight_is_somewhere_and_large_ones_at_one_place_only(
    decoupled: Network, groups: tuple[int, ...]
) -> None:
    found = geometry(decoupled, *groups)
    for name, weight in decoupled.weights.items():
        boxes = {device: found.weight_box(device, name) for device in found.devices}
        if weight.elements == 1:  # a counter
            assert set(boxes.values()) == {None}
            continue
        layout = Layout.of({device: [box] for device, box in boxes.items() if box is not None})
        assert is_partition(layout, weight.shape), name


def test_sums_everywhere_spare_the_next_dense_operator_its_fetch() -> None:
    apart = geometry(chain(3), 1, 1, input_based=(1,))
    assert [bool(group.fetches) for group in apart.groups] == [False, False, True]
    everywhere = geometry(chain(3), 1, 1, input_based=(1,), everywhere=(1,))
    assert not any(group.fetches for group in everywhere.groups)
    assert "t1" not in everywhere.split
    assert sum(volume(moves) for group in everywhere.groups for moves in group.sums.values()) == 2 * 192


def test_groups_that_do_not_fit_are_computed_by_everybody(decoupled: Network) -> None:
    found = geometry(decoupled, 1, 1, 1)  # four groups of convolutions, three devices
    made = {op.name: op.outputs[0] for op in decoupled.ops if op.outputs}
    assert made["conv2d"] in found.split
    assert made["conv2d_1"] not in found.split


def test_what_a_schedule_does_with_partial_sums(decoupled: Network) -> None:
    found = geometry(decoupled, 1, 1)
    actions = Schedule(found.plan, decoupled).actions["d0"]
    last = [action for action in actions if isinstance(action, Forward)][-2:]
    assert [action.part for action in last] == ["partial", "sum"]
    (partial,) = [one.message for one in actions if isinstance(one, Send) and one.message.kind == "partial"]
    assert [str(part) for part in partial.parts] == ["linear[0:1,5:10]"]


def test_training_by_channels_is_refused(decoupled: Network) -> None:
    stage = Stage((0, len(decoupled.layers)), ("a", "b"), ByChannels((1, 1)))
    with pytest.raises(BadPlan, match="for inference, and order is 1f1b") as caught:
        resolve(Plan(decoupled.name, 2, (stage,)), decoupled)
    assert "manyhands infer" in caught.value.hint


class TwoBranches(nn.Module):
    """What is shuffled in one branch of a block is on its way while the other is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.before = nn.Conv2d(16, 16, 3, padding=1, groups=GROUPS)
        self.beside = nn.Conv2d(16, 32, 1, groups=GROUPS)
        self.after = nn.Conv2d(16, 32, 1, groups=GROUPS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = torch.relu(self.before(x))
        z = self.beside(x)
        return torch.relu(self.after(torch.channel_shuffle(y, GROUPS)) + z)


def test_channels_leave_as_soon_as_they_are_made() -> None:
    network = capture(TwoBranches(), torch.zeros(1, 3, 8, 8), granularity="operators").network
    stage = Stage((0, len(network.layers)), ("d0", "d1"), ByChannels((2, 2)))
    plan = resolve(Plan(network.name, 1, (stage,), order="stream"), network)
    actions = Schedule(plan, network).lowering.work["d0"].forward_actions
    named = [network.ops[a.first].name if isinstance(a, Forward) else type(a).__name__ for a in actions]
    assert named == ["conv2d", "Send", "conv2d_2", "Receive", "channel_shuffle"]
    ends = [action.last for action in actions if isinstance(action, Forward)]
    assert ends == [4, 5, len(network.ops)]  # a group that asks nobody goes on where the one before it ended
