"""Devices that join with data of their own, by the command line: nothing of it is here, nor need a data set be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import TimedOut
from manyhands.job import named as jobs
from manyhands.job.machines import JOIN_SECONDS
from manyhands.session.joining import join_text, parse_address
from manyhands.split.config import BATCH_SIZE, EPOCHS, SplitWish, optimizer_of, parse_silos

if TYPE_CHECKING:
    from torch import nn

    from manyhands.job.base import OnOpened, OnPlanned, OnStep
    from manyhands.split.job import SplitResult


def joined_job(
    wish: SplitWish,
    *,
    token: str = "",
    folder: Path | None = None,
    resume: Path | None = None,
    on_opened: OnOpened | None = None,
    on_planned: OnPlanned | None = None,
    on_step: OnStep | None = None,
    say: jobs.Say | None = None,
) -> SplitResult:
    """Wait for the devices that --silos names, and train over what they have."""
    model, loss, test = _model(wish)
    from manyhands.runtime.coordinator import DEFAULT_PORT, Coordinator
    from manyhands.runtime.shared_token import shared_token
    from manyhands.split.training import split_train

    silos = parse_silos(wish.silos)
    assert silos is not None
    said = say or (lambda text: None)
    with Coordinator(
        *parse_address(wish.listen, DEFAULT_PORT), token or shared_token(said), on_event=say, title=wish.model
    ) as coordinator:
        coordinator.wanted = set(silos)
        more = " --name NAME --silo FILE"
        said(f"Waiting for {', '.join(silos)}. On each:\n{join_text(coordinator, more)}")
        try:
            coordinator.wait_for(silos, JOIN_SECONDS)
        except TimedOut as error:
            error.hint = f"On each device: {coordinator.join_command()}{more}"
            raise
        return split_train(
            model, None, loss=loss, optimizer=optimizer_of(wish, None, 1), batch_size=wish.batch_size or BATCH_SIZE,
            epochs=wish.epochs or EPOCHS, steps=wish.steps, cut=wish.cut, bits=wish.bits, k=wish.k, mode=wish.mode,
            cloud=coordinator, silos=silos, seed=wish.seed, freeze=wish.freeze, weights=wish.weights or None,
            rival=wish.rival, folder=folder, resume=resume or False, test=test, granularity=wish.granularity,
            name=wish.model, config={"split_wish": dataclasses.asdict(wish)}, on_opened=on_opened,
            on_planned=on_planned, on_step=on_step, say=say,
        )  # fmt: skip


def _model(wish: SplitWish) -> tuple[nn.Module, Any, Any]:
    """The model, its loss, and held-out data; without --data a model of its usual size, and none is held out."""
    import torch

    from manyhands.models import registry

    if wish.data != jobs.DATA:
        data = jobs.load_data(jobs.Wish(model=wish.model, data=wish.data, input=wish.input))
        return jobs.build_model(wish.model, data), jobs.loss_of(wish.model, data), data.test
    torch.manual_seed(0)
    loss = registry.ZOO[wish.model].loss if wish.model in registry.ZOO else "cross_entropy"
    return registry.build(wish.model), registry.loss_function(loss), None
