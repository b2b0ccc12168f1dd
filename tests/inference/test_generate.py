"""mh.generate goes on with prompts, token for token as one device does that computes the whole text again each time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from test_infer import not_measured

import manyhands as mh
from manyhands.facts.errors import BadData, BadPlan, BadValue
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.inference import infer as inference
from manyhands.inference.config import InferConfig
from manyhands.inference.generate import Generated, TokenNetwork, generate_on, token_network
from manyhands.inference.infer import Inference
from manyhands.runtime.coordinator import Coordinator
from real_runs import names, restart, workers
from tiny_decoder import POSITIONS, WORDS, TinyDecoder, on_one_device

pytestmark = pytest.mark.xdist_group("inference")

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [11], [7, 7, 12]]
NEW = 6


@pytest.fixture(scope="module")
def decoder() -> TinyDecoder:
    return TinyDecoder().double()


@pytest.fixture(scope="module")
def greedy(decoder: TinyDecoder) -> TokenNetwork:
    """Room for two prompts at a time, of at most 15 tokens."""
    return token_network(InferConfig(max_new_tokens=NEW), decoder, 2, 15)


@pytest.fixture(scope="module")
def session() -> Iterator[Coordinator]:
    with pytest.MonkeyPatch.context() as patch, workers(3) as coordinator:
        patch.setattr(inference, "measure_who_stays", not_measured)
        yield coordinator


@pytest.fixture
def cluster(session: Coordinator) -> Coordinator:
    restart(session)
    return session


def in_stages(network: TokenNetwork, devices: tuple[str, ...]) -> Plan:
    """As many layers on each device, as far as that goes."""
    count = len(network.graph.layers)
    bounds = [round(place * count / len(devices)) for place in range(len(devices) + 1)]
    stages = [Stage((first, last), (name,)) for first, last, name in zip(bounds, bounds[1:], devices)]
    return Plan(network.graph.name, 1, tuple(stages), order="stream")


def new_tokens(generated: Generated) -> list[list[int]]:
    return [list(tokens) for tokens in generated.tokens]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.quick("2")
def test_the_likeliest_tokens_are_those_of_one_device(
    cluster: Coordinator, decoder: TinyDecoder, greedy: TokenNetwork, count: int
) -> None:
    """Three prompts of unequal lengths, the third in the cells that another leaves."""
    plan = in_stages(greedy, names(cluster)[:count])
    config = InferConfig(cluster=cluster, plan=plan, max_new_tokens=NEW, chunk=4)
    generated = generate_on(config, greedy, PROMPTS)
    expected = on_one_device(decoder, PROMPTS, NEW)
    assert new_tokens(generated) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert len(set(expected[0])) > 1
    assert len(generated.plan.stages) == count
    assert generated.restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.quick("3")
def test_drawn_tokens_are_those_of_one_device(cluster: Coordinator, decoder: TinyDecoder, count: int) -> None:
    config = InferConfig(max_new_tokens=NEW, temperature=1.5, top_p=0.9, seed=7)
    network = token_network(config, decoder, 2, 15)
    plan = in_stages(network, names(cluster)[:count])
    given = InferConfig(cluster=cluster, plan=plan, max_new_tokens=NEW, temperature=1.5, top_p=0.9, seed=7)
    generated = generate_on(given, network, PROMPTS)
    from manyhands.inference.generate import sampling_of

    expected = on_one_device(decoder, PROMPTS, NEW, sampling_of(config), seed=7)
    assert new_tokens(generated) == expected
    assert expected != on_one_device(decoder, PROMPTS, NEW, sampling_of(config), seed=8)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_tokens_do_not_depend_on_how_many_are_computed_at_once(
    cluster: Coordinator, decoder: TinyDecoder, greedy: TokenNetwork, chunk: int
) -> None:
    plan = in_stages(greedy, names(cluster)[:2])
    config = InferConfig(cluster=cluster, plan=plan, max_new_tokens=NEW, chunk=chunk)
    assert new_tokens(generate_on(config, greedy, PROMPTS)) == on_one_device(decoder, PROMPTS, NEW)


@pytest.mark.slow
def test_an_end_token_ends_a_text(cluster: Coordinator, decoder: TinyDecoder) -> None:
    whole = on_one_device(decoder, PROMPTS, NEW)
    end = whole[0][2]
    generated = mh.generate(decoder, PROMPTS, cluster=cluster, plan="pipeline", max_new_tokens=NEW, end_tokens=(end,))
    assert new_tokens(generated) == on_one_device(decoder, PROMPTS, NEW, ends=[end])
    assert len(generated.tokens[0]) < NEW
    assert generated.sequences[0] == PROMPTS[0] + list(generated.tokens[0])


@pytest.mark.slow
def test_the_largest_numbers_alone_are_sent_where_no_others_are_drawn(
    cluster: Coordinator, decoder: TinyDecoder
) -> None:
    from manyhands.inference.generate import sampling_of

    config = InferConfig(max_new_tokens=NEW, top_k=4, seed=3)
    network = token_network(config, decoder, 2, 15)
    assert [network.graph.network.tensors[name].shape for name in network.graph.outputs] == [(1, 4), (1, 4)]
    generated = generate_on(
        InferConfig(cluster=cluster, max_new_tokens=NEW, top_k=4, seed=3, plan="pipeline"), network, PROMPTS
    )
    assert new_tokens(generated) == on_one_device(decoder, PROMPTS, NEW, sampling_of(config), seed=3)


def test_a_worker_that_is_killed_costs_no_token(
    cluster: Coordinator, decoder: TinyDecoder, greedy: TokenNetwork
) -> None:
    """What it carried is gone, and every prompt is read again by the others."""
    came: list[int] = []

    def kill(running: Inference) -> None:
        came.append(len(running.plan.stages))

    def on_token(_: int, token: int) -> None:
        came.append(token)
        if len(came) == 4:
            pid = cluster.local.running()[names(cluster)[1]]
            os.kill(pid, signal.SIGKILL)

    plan = in_stages(greedy, names(cluster)[:2])
    config = InferConfig(cluster=cluster, plan=plan, max_new_tokens=NEW)
    generated = generate_on(config, greedy, PROMPTS, on_token, kill)
    assert generated.restarts > 0
    assert names(cluster)[1] not in generated.plan.devices
    assert new_tokens(generated) == on_one_device(decoder, PROMPTS, NEW)


@pytest.mark.slow
def test_the_planner_divides_what_fits_no_device(decoder: TinyDecoder, greedy: TokenNetwork) -> None:
    """Weights and cache count."""
    network = greedy.graph.network
    needed = sum(weight.bytes for weight in network.weights.values())
    from manyhands.plans.inference import plan_for

    cluster = mh.Cluster.local(2)
    import msgspec

    small = tuple(msgspec.structs.replace(device, memory_bytes=int(needed * 0.8)) for device in cluster.devices)
    planned = plan_for(network, msgspec.structs.replace(cluster, devices=small))
    assert len(planned.plan.stages) == 2


def test_what_cannot_be_done_is_refused(greedy: TokenNetwork, decoder: TinyDecoder) -> None:
    from manyhands.facts.plan_check import resolve

    everything = (0, len(greedy.graph.layers))
    with pytest.raises(BadPlan, match="lies on one device"):
        resolve(
            Plan(greedy.graph.name, 2, (Stage(everything, ("a", "b"), BySamples((1, 1))),), order="stream"),
            greedy.graph.network,
        )
    with pytest.raises(BadPlan, match="the plan trains"):
        resolve(Plan(greedy.graph.name, 2, (Stage(everything, ("a",)),)), greedy.graph.network)
    with pytest.raises(BadData, match=f"token {WORDS}; tokens are numbers from 0 to {WORDS - 1}"):
        mh.generate(decoder, [[1, WORDS]])
    with pytest.raises(BadData, match="Prompt 1 has no tokens"):
        mh.generate(decoder, [[1], []])
    with pytest.raises(BadValue, match="takes no cache"):
        mh.generate(torch.nn.Linear(2, 2), [1])
    with pytest.raises(BadValue, match=r"temperature is an option of mh\.generate"):
        mh.infer(decoder, torch.zeros(2, POSITIONS), temperature=0.5)
