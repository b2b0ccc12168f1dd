"""Runs a command on a device of a lab: in its network, within its share of the processor and its memory, on its cores.

    python -m manyhands.lab.enter LAB DEVICE COMMAND ...
    python -m manyhands.lab.enter --network LAB DEVICE COMMAND ...     in its network only, at this machine's full speed

The process becomes the command, so that its parent has the command itself as its child.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from manyhands.facts.errors import ManyhandsError
from manyhands.lab import groups, record
from manyhands.lab.lines import namespace_of
from manyhands.lab.spaces import COORDINATOR_SPACE, entered

CANNOT_RUN = 127
_NETWORK = "--network"


def words(lab: str, device: str, *, only_network: bool = False) -> tuple[str, ...]:
    """Return the words to write before a command so that it runs there."""
    return (sys.executable, "-P", "-m", "manyhands.lab.enter", *[_NETWORK] * only_network, lab, device)


def run(lab: str, device: str, command: list[str], *, only_network: bool) -> NoReturn:
    """Replace this process by the command, on the device."""
    entry = record.load(lab)
    if device != COORDINATOR_SPACE and not only_network:
        seat = entry.played.seat(device)
        groups.find().enter(lab, device)
        os.sched_setaffinity(0, seat.cores)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    with entered(namespace_of(lab, device)):
        os.execvp(command[0], command)


def main() -> None:
    only_network = sys.argv[1] == _NETWORK
    lab, device, *command = sys.argv[1 + only_network :]
    try:
        run(lab, device, command, only_network=only_network)
    except ManyhandsError as error:
        print(f"Error: {error.message}\n{error.hint}".strip(), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"Error: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_RUN)


if __name__ == "__main__":
    main()
