"""reference/errors.md: every kind of error, its exit code and what to do, from facts/errors.py."""

from __future__ import annotations

import inspect

from making.words import cell, table

START = """# Errors and exit codes

What a script can tell from an exit code, and what a person can do about each kind. Every error prints what is wrong,
with both values, and on the next line what to type. In Python the same errors are exceptions, all of them
`mh.ManyhandsError`, with `.message`, `.hint` and `.exit_code`; other exceptions are bugs. The last column is for
restart policies ([launching](../howto/launch.md#exit-codes)): "no" means that the same command fails again until
somebody changes something. This page is made from the program by `python docs/generate.py`.

"""
TO_DO = {
    "ManyhandsError": "Read the hint; this is any error that has no kind of its own.",
    "UnknownName": "Look at the names that are close: the hint has them. `manyhands models` and `devices` list all.",
    "BadFile": "Check the path; if a file was cut short, make it again or take it from a backup. "
    "See [files.md](files.md) for what belongs into it.",
    "DiskFull": "Free as many bytes as the message says, or choose another folder: `--out`, `MANYHANDS_HOME`. "
    "The run's folder is whole: `manyhands train --resume RUN` goes on.",
    "BadPlan": "The message names the stage and both values. `manyhands plan --out plan.yaml` writes one that fits.",
    "CaptureFailed": "The message names the line of your module. See [own models](../howto/own-model.md).",
    "BadGraph": "Do not load it; capture the network again from its source.",
    "GpuOutOfMemory": "As for `OutOfMemory`; the job has tried once with twice as many micro-batches, if it could.",
    "OutOfMemory": "More devices, more micro-batches, or tiles: `--share auto` looks at all. "
    "The message says what is missing where.",
    "BadSchedule": "A plan written by hand that deadlocks, or a bug: `manyhands plan --schedule` prints every action.",
    "BadValue": "Type a value within the limits that the message gives.",
    "WorkerLost": "Look at the device (`workers/*.log` of the run); `manyhands train --resume RUN` goes on from the "
    "last checkpoint. See [staying alive](../explanation/alive.md).",
    "Refused": "Copy the token, install the same version on both, or give the worker a `--name` of its own, "
    "as the hint says.",
    "BadData": "The message names the sample. See [own data](../howto/own-data.md).",
    "NotFinite": "A new run with a smaller learning rate, as the hint writes it, or look at the layer that the message "
    "names. `--resume` as it was comes to the same numbers again.",
    "DataNotFinite": "Fix the data of the step that the message names; then `manyhands train --resume RUN` goes on.",
    "TimedOut": "Look at the device that was waited for: is it up, is its port open? `manyhands doctor` tells.",
    "AddressTaken": "Another port, or end whoever has it.",
    "LabError": "Run as root on Linux, and take old labs down: `manyhands lab down`. "
    "See [the lab](../explanation/lab.md).",
    "NotInstalled": "Install the extra that the hint names, such as `pip install 'manyhands[onnx]'`.",
    "Unfit": "Fix what the doctor marked, in its order: each line has the command. "
    "See [the doctor](../howto/doctor.md).",
}  # fmt: skip


def page() -> str:
    from manyhands.cli.main import INTERNAL_ERROR, INTERRUPTED
    from manyhands.facts import errors

    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.ManyhandsError) and kind.__module__ == errors.__name__
    ]
    kinds.sort(key=lambda kind: (kind.exit_code, kind.__subclasses__() == [], kind.__name__))
    unsaid = [kind.__name__ for kind in kinds if kind.__name__ not in TO_DO]
    if unsaid:
        raise SystemExit(f"docs/making/errors.py says nothing of {', '.join(unsaid)}: add what to do to TO_DO.")
    rows = [
        [
            f"{kind.exit_code}", f"`{kind.__name__}`", cell(inspect.getdoc(kind) or ""), TO_DO[kind.__name__],
            "no" if kind.is_lasting else "yes",
        ]
        for kind in kinds
    ]  # fmt: skip
    others = [
        ["0", "Everything was done; a worker has left as it was asked to, or with its coordinator.", "no"],
        ["2", "A command or option that does not exist, or a value that it cannot take.", "no"],
        ["20", "`manyhands status` of a run that failed, or whose process is gone without a word.", "no"],
        [f"{INTERNAL_ERROR}", "A bug in manyhands. `--debug` shows the traceback: please report it.", "yes"],
        [
            f"{INTERRUPTED}", "Ctrl-C. A run leaves a checkpoint. (A worker leaves, with 0; typed twice, with 130.)",
            "no",
        ],
        ["137", "Killed (128 + 9): often because memory ran out.", "yes"],
        ["141", "The reader of the output went away (`manyhands lab run … \\| head`).", "no"],
        [
            "143", "A worker asked to end by SIGTERM (128 + 15) that had not joined, was asked twice, or had more to "
            "hand over than `--grace` gave it time for.", "yes",
        ],
    ]  # fmt: skip
    return (
        START
        + table(["exit code", "kind", "what it is", "what to do", "start again?"], rows)
        + "\nExit codes that are no error kinds:\n\n"
        + table(["exit code", "what it is", "start again?"], others)
    )
