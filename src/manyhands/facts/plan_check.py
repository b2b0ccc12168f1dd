"""Checks of a plan against its network and cluster. Every refusal names the field, the value and the limit."""

from __future__ import annotations

from itertools import pairwise
from math import inf, prod

import msgspec

from manyhands.facts.boxes import cut_points
from manyhands.facts.carried_state import check_carried
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, BadValue, UnknownName, did_you_mean
from manyhands.facts.extensions import INSTALL_HINT
from manyhands.facts.network import Network
from manyhands.facts.places_check import check_places
from manyhands.facts.plan import (
    EVERYWHERE,
    ByChannels,
    BySamples,
    ByTiles,
    LayerName,
    MissingShare,
    Plan,
    Share,
    Single,
    Stage,
)
from manyhands.facts.recompute_check import check_recompute
from manyhands.facts.tied_weights import check_tied_weights

BITS = (2, 4, 8, 16, 32)
MOST_SAMPLES = 10**9
MOST_MICRO_BATCHES = 10_000
"""The most micro-batches: each is some actions of every device, and a line in a file must not cost all memory."""


def resolve(plan: Plan, network: Network, cluster: Cluster | None = None) -> Plan:
    """Return the plan with layers as numbers, checked against the network and, where given, the cluster."""
    for index, stage in enumerate(plan.stages):
        if isinstance(stage.share, MissingShare):
            raise BadPlan(
                f"stages[{index}] is shared by '{stage.share.name}', which is not registered on this device.",
                hint=INSTALL_HINT,
            )
    plan = Plan.from_dict(msgspec.to_builtins(plan))  # one made in Python is held to the same types as one from a file
    if plan.network != network.name:
        raise BadPlan(f"network is '{plan.network}'; the network at hand is '{network.name}'.")
    if not 1 <= plan.batch_size <= MOST_SAMPLES:
        raise BadPlan(f"batch_size is {plan.batch_size}; it must be at least 1 and at most {MOST_SAMPLES}.")
    if plan.micro_batches < 1 or plan.batch_size % plan.micro_batches:
        raise BadPlan(
            f"micro_batches is {plan.micro_batches}; it must divide batch_size = {plan.batch_size}.",
            hint="Choose one of "
            + ", ".join(str(n) for n in range(1, min(plan.batch_size, 1024) + 1) if plan.batch_size % n == 0),
        )
    if plan.micro_batches > MOST_MICRO_BATCHES:
        raise BadPlan(f"micro_batches is {plan.micro_batches}; it must be at most {MOST_MICRO_BATCHES}.")
    if not 0 <= plan.optimizer_slots <= 8:
        raise BadPlan(f"optimizer_slots is {plan.optimizer_slots}; it must be between 0 and 8.")
    if plan.bucket_bytes < 1:
        raise BadPlan(f"bucket_bytes is {plan.bucket_bytes}; it must be at least 1.")
    check_places(plan.places)
    if not plan.stages:
        raise BadPlan("stages is empty; a plan has at least one stage.")
    stages = tuple(_resolve_stage(plan, index, network) for index in range(len(plan.stages)))
    resolved = msgspec.structs.replace(plan, stages=stages)
    _check_cover(stages, network)
    _check_devices(resolved, network, cluster)
    _check_warm_up(resolved)
    for index, stage in enumerate(stages):
        _check_share(resolved, index, stage, network, plan.stages[index].share)
        stage.share.check(resolved, index, network)
        _check_eager(resolved, index, stage, network)
        check_recompute(resolved, index, network)
    check_tied_weights(resolved, network, [network.weights_of(*op_range(stage, network)) for stage in stages])
    check_carried(resolved, network)
    _check_replay(resolved, network)
    _check_micro_batches(resolved, network)
    _check_loss(resolved, network)
    return resolved


def _layer(network: Network, name: LayerName, field: str) -> int:
    try:
        return network.find_layer(name)
    except (BadValue, UnknownName) as error:
        raise BadPlan(f"{field} is {name!r}: {error.message}", hint=error.hint) from None


def _resolve_stage(plan: Plan, index: int, network: Network) -> Stage:
    stage = plan.stages[index]
    first = _layer(network, stage.layers[0], f"stages[{index}].layers[0]")
    last = _layer(network, stage.layers[1], f"stages[{index}].layers[1]")
    share = stage.share
    if isinstance(share, ByTiles):
        resolved_groups = {
            field: None
            if groups is None
            else tuple(_group(network, g, f"stages[{index}].share.{field}") for g in groups)
            for field, groups in (("forward_groups", share.forward_groups), ("backward_groups", share.backward_groups))
        }
        early = tuple(_group(network, g, f"stages[{index}].share.interior_first") for g in share.interior_first)
        share = msgspec.structs.replace(share, **resolved_groups, interior_first=early)
    elif isinstance(share, ByChannels):
        field, based = f"stages[{index}].share", share.input_based
        share = msgspec.structs.replace(
            share,
            input_based=None if based is None else tuple(_group(network, g, f"{field}.input_based") for g in based),
            everywhere=tuple(_group(network, g, f"{field}.everywhere") for g in share.everywhere),
        )
    again = tuple((_layer(network, a, "recompute"), _layer(network, b, "recompute")) for a, b in stage.recompute)
    return msgspec.structs.replace(stage, layers=(first, last), share=share, recompute=again)


def _group(network: Network, name: LayerName, field: str) -> LayerName:
    """Return the layer at which a group starts, as a number; an operator inside a layer keeps its name."""
    index = network.op_index.get(name) if isinstance(name, str) and name not in network.layer_index else None
    if index is None:
        return _layer(network, name, field)
    number = network.layer_of_op[index]
    return number if network.layers[number].first == index else name


def group_ops(groups: tuple[LayerName, ...], network: Network) -> tuple[int, ...]:
    """Return the operators at which the groups of a resolved plan start."""
    firsts = [*(layer.first for layer in network.layers), len(network.ops)]
    return tuple(firsts[g] if isinstance(g, int) else network.op_index[g] for g in groups)


def layer_range(stage: Stage) -> tuple[int, int]:
    """Return the layers of a resolved stage, as numbers."""
    first, last = stage.layers
    assert isinstance(first, int), "resolve the plan first"
    assert isinstance(last, int), "resolve the plan first"
    return first, last


def op_range(stage: Stage, network: Network) -> tuple[int, int]:
    """Return the operators of a resolved stage."""
    first, last = layer_range(stage)
    return network.layers[first].first, network.layers[last - 1].last


def _check_cover(stages: tuple[Stage, ...], network: Network) -> None:
    expected = 0
    for index, stage in enumerate(stages):
        first, last = layer_range(stage)
        if first != expected:
            raise BadPlan(f"stages[{index}].layers starts at layer {first}; the stage before it ends at {expected}.")
        if last <= first:
            raise BadPlan(f"stages[{index}].layers is [{first}, {last}]; it must hold at least one layer.")
        expected = last
    if expected != len(network.layers):
        raise BadPlan(
            f"stages[{len(stages) - 1}].layers ends at layer {expected}; {network.name} has {len(network.layers)} "
            f"layers at granularity '{network.granularity}'."
        )


def _check_devices(plan: Plan, network: Network, cluster: Cluster | None) -> None:
    used: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        if not stage.devices:
            raise BadPlan(f"stages[{index}].devices is empty; a stage has at least one device.")
        for place, name in enumerate(stage.devices):
            if name in stage.devices[:place]:
                raise BadPlan(f"stages[{index}].devices names '{name}' twice.")
            if name in used and not plan.may_repeat_devices:
                raise BadPlan(
                    f"stages[{index}].devices names '{name}', which already works in stages[{used[name]}], and order "
                    f"is {plan.order} with {plan.micro_batches} micro-batches: the two could wait for each other.",
                    hint="Use order: sequential, or another device.",
                )
            if cluster is not None and name not in cluster.names:
                raise BadPlan(
                    f"stages[{index}].devices names '{name}', which is not in cluster {cluster.name}.",
                    hint=did_you_mean(name, cluster.names),
                )
            used[name] = index
        if stage.codec.bits not in BITS:
            raise BadPlan(f"stages[{index}].codec.bits is {stage.codec.bits}; it must be one of {BITS}.")
    for name, home in plan.homes.items():
        if name not in network.inputs:
            raise BadPlan(
                f"homes names input '{name}'; {network.name} has {', '.join(network.inputs)}.",
                hint=did_you_mean(name, network.inputs),
            )
        names = used if cluster is None else cluster.names
        if home != EVERYWHERE and home not in names:
            where = "in no stage" if cluster is None else f"not in cluster {cluster.name}"
            raise BadPlan(f"homes.{name} is '{home}', which is {where}.", hint=did_you_mean(home, names))


def _check_warm_up(plan: Plan) -> None:
    if isinstance(plan.warm_up, tuple):
        if len(plan.warm_up) != len(plan.stages):
            raise BadPlan(f"warm_up has {len(plan.warm_up)} numbers; there are {len(plan.stages)} stages.")
        for stage, count in enumerate(plan.warm_up):
            if not 1 <= count <= plan.micro_batches:
                raise BadPlan(
                    f"warm_up[{stage}] is {count}; it must be between 1 and micro_batches = {plan.micro_batches}."
                )
        for stage, (before, after) in enumerate(pairwise(plan.warm_up)):
            if before < after:
                raise BadPlan(
                    f"warm_up[{stage}] is {before}, less than warm_up[{stage + 1}] = {after}: they would wait forever."
                )


def _check_share(plan: Plan, index: int, stage: Stage, network: Network, named_share: Share) -> None:
    """Refuse a stage that cannot be shared as the plan says; `named_share` is its share with layers as they were
    named."""
    share, count, field = stage.share, len(stage.devices), f"stages[{index}]"
    if isinstance(share, Single):
        if count != 1:
            raise BadPlan(
                f"{field}.devices has {count} devices and {field}.share is single.",
                hint="Write share: {by: samples, samples: [...]} or name one device.",
            )
    elif isinstance(share, BySamples):
        _check_samples(plan, field, share, stage, network)
    elif isinstance(share, ByTiles):
        assert isinstance(named_share, ByTiles)
        _check_tiles(field, share, stage, network, named_share)
    elif isinstance(share, ByChannels):
        _check_channels(plan, field, share, count)


def _check_samples(plan: Plan, field: str, share: BySamples, stage: Stage, network: Network) -> None:
    if len(share.samples) != len(stage.devices):
        raise BadPlan(
            f"{field}.share.samples has {len(share.samples)} numbers; there are {len(stage.devices)} devices."
        )
    if any(number < 1 for number in share.samples):
        raise BadPlan(f"{field}.share.samples is {list(share.samples)}; every device takes at least 1, or is left out.")
    if sum(share.samples) != plan.micro_batch_size:
        raise BadPlan(
            f"{field}.share.samples adds up to {sum(share.samples)}; a micro-batch has {plan.micro_batch_size} samples "
            f"(batch_size {plan.batch_size} / micro_batches {plan.micro_batches})."
        )
    first, last = op_range(stage, network)
    for op in network.ops[first:last]:
        if op.mixes_samples and len(stage.devices) > 1:
            raise BadPlan(
                f"{field} is shared by samples, but operator {op.name} ({op.target}, {op.where or op.module}) "
                "mixes samples.",
                hint="Give that layer to a stage with one device.",
            )


def _check_tiles(field: str, share: ByTiles, stage: Stage, network: Network, named_share: ByTiles) -> None:
    slots, count = prod(len(sizes) for sizes in share.cuts), len(stage.devices)
    if slots != count:
        raise BadPlan(f"{field}.share is a grid of {share.grid_text} = {slots} tiles; there are {count} devices.")
    if not all(0 < number < inf for sizes in share.cuts for number in sizes):
        depths = f"depths {list(share.depths)}, " if share.depths else ""
        raise BadPlan(
            f"{field}.share has {depths}rows {list(share.rows)} and columns {list(share.columns)}; all must be > 0."
        )
    first, last = layer_range(stage)
    start, end = op_range(stage, network)
    for name, groups in (("forward_groups", share.forward_groups), ("backward_groups", share.backward_groups)):
        if groups is None:
            continue
        starts, named = group_ops(groups, network), list(getattr(named_share, name))
        if not starts or starts[0] != start:
            raise BadPlan(
                f"{field}.share.{name} is {named}; its first group must start at layer {first}, "
                "where the stage starts.",
                hint=f"Begin with {first}: [{first}, ...].",
            )
        if any(a >= b for a, b in pairwise(starts)) or starts[-1] >= end:
            raise BadPlan(
                f"{field}.share.{name} is {named}; it must increase and stay below layer {last}, where the stage ends."
            )
    image = network.first_map(start)
    if image is not None:
        cuts = [*zip(("columns", "rows", "depths"), share.cuts[::-1], network.extents(image.name)[::-1])]
        for name, weights, extent in reversed(cuts):
            if any(a == b for a, b in pairwise(cut_points(extent, weights))):
                raise BadPlan(
                    f"{field}.share.{name} is {list(weights)}: "
                    f"a tile would have 0 of the {extent} {name} of {image.name}."
                )


def _check_channels(plan: Plan, field: str, share: ByChannels, count: int) -> None:
    if len(share.groups) != count:
        raise BadPlan(f"{field}.share.groups has {len(share.groups)} numbers; there are {count} devices.")
    if any(number < 1 for number in share.groups):
        raise BadPlan(f"{field}.share.groups is {list(share.groups)}; every device takes at least 1 group.")
    if plan.is_training and count > 1:
        raise BadPlan(
            f"{field} is shared by channels, which is for inference, and order is {plan.order}.",
            hint="Use order: stream or interleave (manyhands infer does); to train, share it by samples or tiles.",
        )


def _check_eager(plan: Plan, index: int, stage: Stage, network: Network) -> None:
    """Refuse a plan in which devices that choose their own order meet inside a pass."""
    if plan.order != "eager" or len(stage.devices) == 1:
        return
    first, last = op_range(stage, network)
    statistics = plan.batch_norm == "synchronised" and any(op.statistics for op in network.ops[first:last])
    if statistics or not isinstance(stage.share, BySamples):
        raise BadPlan(
            f"order is eager, but the devices of stages[{index}] exchange data inside a pass "
            "and could each pick another.",
            hint="Use order: 1f1b, or batch_norm: local with a share by samples.",
        )


def _check_replay(plan: Plan, network: Network) -> None:
    """Refuse stages before the last that do not run ahead by themselves: on one device, from the network's inputs
    alone."""
    if plan.order != "replay":
        return
    if plan.replay.k is not None and not 0 <= plan.replay.k < 2**16:
        raise BadPlan(f"replay.k is {plan.replay.k}; it must be between 0 and {2**16 - 1}, or null for no bound.")
    runs_ahead = isinstance(plan.warm_up, tuple) and max(plan.warm_up) > 1
    if plan.gradient_norm and (plan.replay.k != 0 or runs_ahead):
        raise BadPlan(
            f"gradient_norm needs all gradients of one batch at once; with order replay and K = {plan.replay.k} some "
            "come after later updates.",
            hint="Use replay: {k: 0}, or leave out gradient_norm.",
        )
    for name, home in plan.homes.items():
        if home != EVERYWHERE:
            raise BadPlan(
                f"order is replay, and homes gives '{name}' to {home}; inputs are fed to whoever reads them.",
                hint="Leave it out, or use order: 1f1b.",
            )
    for index, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            raise BadPlan(
                f"order is replay, and stages[{index}] has {len(stage.devices)} devices; each has one.",
                hint="Use order: 1f1b to share a stage.",
            )
        if index == len(plan.stages) - 1:
            continue
        first, last = op_range(stage, network)
        foreign = next(
            (name for op in network.ops[first:last] for name in op.inputs if network.producer.get(name, first) < first),
            None,
        )
        if foreign is not None:
            raise BadPlan(
                f"order is replay, and stages[{index}] reads '{foreign}' of another stage; stages before the last read "
                "the network's inputs only.",
                hint="Use two stages, or one for each input and a last one that joins them.",
            )


def _check_micro_batches(plan: Plan, network: Network) -> None:
    """Refuse micro-batches for a network in which samples meet (batch statistics apart): it must see the whole batch at
    once."""
    mixing = next((op for op in network.ops if op.mixes_samples), None)
    if mixing is not None and plan.micro_batches > plan.steps_per_round:
        raise BadPlan(
            f"micro_batches is {plan.micro_batches}, but operator {mixing.name} ({mixing.target}, "
            f"{mixing.where or mixing.module}) mixes samples: it must see the whole batch.",
            hint="Use micro_batches: 1.",
        )
    for index, stage in enumerate(plan.stages):
        _check_statistics(plan, index, stage, network)


def _check_statistics(plan: Plan, index: int, stage: Stage, network: Network) -> None:
    """Refuse batch statistics over a single number: its variance is zero, and the running one becomes NaN."""
    if not plan.is_training:
        return
    least = plan.micro_batch_size
    if plan.batch_norm == "local":
        least = min(stage.share.sample_counts(least, len(stage.devices)))
    first, last = op_range(stage, network)
    for op in network.ops[first:last]:
        if op.statistics:
            spec = network.tensors[op.inputs[0]]
            if least * spec.elements // op.statistics <= 1:
                raise BadPlan(
                    f"stages[{index}]: the batch norm {op.name} ({op.where or op.module}) would see one value per "
                    f"channel: {least} sample(s) of {spec.shape}.",
                    hint="Use fewer micro-batches, a larger batch, or batch_norm: synchronised.",
                )


def _check_loss(plan: Plan, network: Network) -> None:
    """Refuse to split the batch for a loss that is made of no parts: it must see all samples."""
    if network.loss_combination != "whole" or not plan.is_training:
        return
    last = plan.stages[-1]
    reason = "The loss is no mean or sum over samples, weighted by targets or not, so it needs all samples in one place"
    hint = "Use micro_batches: 1 and a single device for the last stage: strategy 'single' (--share single)."
    if plan.micro_batches > plan.steps_per_round:
        raise BadPlan(f"micro_batches is {plan.micro_batches}. {reason}.", hint=hint)
    if len(last.devices) > 1 and last.share.splits_samples:
        field = f"stages[{len(plan.stages) - 1}]"
        raise BadPlan(f"{field} is shared by {last.share.by} among {len(last.devices)} devices. {reason}.", hint=hint)
