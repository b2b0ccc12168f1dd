"""Training by the command line over devices that join with data of their own: none of it need be here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import TimedOut
from manyhands.job.config_sections import DATA
from manyhands.job.devices import JOIN_SECONDS
from manyhands.job.named import build_model, load_data, loss_of
from manyhands.session.joining import join_text, parse_address
from manyhands.split.arguments import DOCUMENT
from manyhands.split.config import BATCH_SIZE, EPOCHS, SplitConfig
from manyhands.split.presets import optimizer_of

if TYPE_CHECKING:
    from torch import nn

    from manyhands.split.job import SplitResult


def split_with_joined(config: SplitConfig) -> SplitResult:
    """Wait for the devices that --silos names, train over what they have, and return the result."""
    model, loss, test = _model(config)
    from manyhands.runtime.addresses import DEFAULT_PORT
    from manyhands.runtime.coordinator import Coordinator
    from manyhands.runtime.shared_token import shared_token
    from manyhands.split.training import split_with

    silos = config.holders
    assert silos is not None
    report = config.say or (lambda text: None)
    with Coordinator(
        *parse_address(config.listen, DEFAULT_PORT), config.token or shared_token(report), on_event=config.say,
        title=config.model,
    ) as coordinator:  # fmt: skip
        coordinator.wanted = set(silos)
        more = " --name NAME --silo FILE"
        report(f"Waiting for {', '.join(silos)}. On each:\n{join_text(coordinator, more)}")
        try:
            coordinator.wait_for(list(silos), JOIN_SECONDS)
        except TimedOut as error:
            error.hint = f"On each device: {coordinator.join_command()}{more}"
            raise
        resolved = replace(
            config, batch_size=config.batch_size or BATCH_SIZE, epochs=config.epochs or EPOCHS, cloud=coordinator,
            trace=None, listen="", test=test, name=config.model, config={DOCUMENT: config.document()},
            is_command=False,
        )  # fmt: skip
        return split_with(resolved, model, None, loss, optimizer_of(config, None, 1))


def _model(config: SplitConfig) -> tuple[nn.Module, Any, Any]:
    """Return the model, its loss and held-out data; without --data a model of its usual size, and no held-out data."""
    import torch

    from manyhands.models import registry

    if config.data != DATA:
        data = load_data(config.model, config.data, config.input)
        return build_model(config.model, data), loss_of(config.model, data), data.test
    torch.manual_seed(0)
    loss = registry.ZOO[config.model].loss if config.model in registry.ZOO else "cross_entropy"
    return registry.build(config.model), registry.loss_function(loss), None
