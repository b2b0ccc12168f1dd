"""Apply the last of the vocabulary table: run once from the root of a checkout, then deleted.

Identifiers are replaced as whole words in src, tests and benchmarks; names that are stored in files, sent over the wire
or typed on the command line are not in the table.
"""

from __future__ import annotations

import re
from pathlib import Path

EVERYWHERE = {
    "SplitPilot": "SplitController",
    "SiloPilot": "SiloController",
    "HOPELESS": "PRUNED_RATIO",
    "hopeless": "pruned_ratio",
    "as_rival": "as_baseline",
}
IN_FILES = {
    "src/manyhands/explaining/critical_path.py": {
        "_Journey": "_Transfer", "journey": "transfer", "journeys": "transfers",
    },
    "src/manyhands/planner/split.py": {"journeys": "transfers"},
    "src/manyhands/split/job.py": {"pilot": "controller"},
    "src/manyhands/split/silo_job.py": {"pilot": "controller", "RIVALS": "SILO_BASELINES"},
    "src/manyhands/job/base.py": {"pilot": "controller", "journey": "elastic_job"},
}  # fmt: skip
CLASSES = {
    ("manyhands.runtime.device_book", "Device"): "KnownDevice",
    ("manyhands.transport.pake", "Exchange"): "KeyExchange",
    ("manyhands.runtime.fork_server", "Wanted"): "ForkRequest",
    ("manyhands.split.controller", "Wanted"): "SplitChoice",
    ("manyhands.runtime.member", "Joined"): "MemberJoined",
    ("manyhands.split.silos", "Joined"): "JoinedSilos",
    ("manyhands.runtime.control_parts", "Job"): "DeviceJob",
    ("manyhands.runtime.reachability", "Answer"): "ProbeAnswer",
    ("manyhands.transport.rendezvous", "Rendezvous"): "PeerRendezvous",
    ("manyhands.session.joining", "Rendezvous"): "JoinPoint",
    ("manyhands.runtime.control_messages", "Send"): "SendState",
}
"""(module, class) -> new name: also where it is imported from there."""


def replaced(text: str, table: dict[str, str]) -> str:
    return re.sub(rf"\b({'|'.join(table)})\b", lambda match: table[match[1]], text)


def main() -> None:
    for folder in ("src", "tests", "benchmarks"):
        for path in Path(folder).rglob("*.py"):
            if not path.is_symlink():
                text = path.read_text()
                table = EVERYWHERE | IN_FILES.get(path.as_posix(), {})
                for (module, name), new in CLASSES.items():
                    imports = rf"from {re.escape(module)} import (\([^)]*\b{name}\b|[^(\n]*\b{name}\b)"
                    if path.as_posix() == f"src/{module.replace('.', '/')}.py" or re.search(imports, text):
                        table = table | {name: new}
                changed = replaced(text, table)
                if changed != text:
                    path.write_text(changed)


if __name__ == "__main__":
    main()
