"""Process groups among devices that are threads of this process, with a store of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from manyhands.executor.collectives import Collectives
from manyhands.executor.process_groups import GroupKey, Hosts, ProcessGroups, keys_of
from manyhands.facts.collective_terms import CollectiveTerms
from manyhands.facts.collectives import AUTO
from manyhands.runtime.collective_store import store_at
from manyhands.schedule.policy import Schedule
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.switchboard import Switchboard

HERE = Hosts("127.0.0.1", "127.0.0.1")
FORM_SECONDS = 20.0


@contextlib.contextmanager
def process_groups(
    mailboxes: Mapping[str, Mailbox], keys: Mapping[str, Sequence[GroupKey]], way: str = "torch"
) -> Iterator[dict[str, ProcessGroups]]:
    """The groups of each device, formed; closed afterwards."""
    store, port = store_at("127.0.0.1")
    terms = CollectiveTerms(way, port, trusts_network=False)
    groups = {name: ProcessGroups(box, terms, HERE, 0, keys[name], "cpu") for name, box in mailboxes.items()}
    errors: list[BaseException] = []

    def form(one: ProcessGroups) -> None:
        try:
            one.form(FORM_SECONDS)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=form, args=(one,), daemon=True) for one in groups.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FORM_SECONDS)
        assert not thread.is_alive(), "a group is not formed"
    try:
        for error in errors:
            raise error
        yield groups
    finally:
        for one in groups.values():
            one.close()
        del store


@contextlib.contextmanager
def grouped_devices(board: Switchboard, schedule: Schedule, way: str) -> Iterator[dict[str, Collectives]]:
    """What forms the sums of each device of a schedule through process groups."""
    devices = list(schedule.lowering.work)
    keys = {device: keys_of(schedule.every_action(device)) for device in devices}
    mailboxes = {device: board.endpoints[device].mailbox for device in devices}
    stride = schedule.plan.steps_per_round
    with process_groups(mailboxes, keys, way) as groups:
        yield {
            device: Collectives(own, is_measured=way == AUTO, first_step=0, stride=stride)
            for device, own in groups.items()
        }


def on_all(tasks: Mapping[str, Callable[[], Any]], limit_seconds: float = 20.0) -> dict[str, Any]:
    """What each device's task returns, or the error that it raises; each runs on a thread of its own."""
    results: dict[str, Any] = {}

    def work(name: str) -> None:
        try:
            results[name] = tasks[name]()
        except Exception as error:
            results[name] = error

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_seconds)
        assert not thread.is_alive(), "a device hangs"
    return results
