"""Checks of confinement: what this machine's kernel offers, and what the workers that have joined report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from manyhands.doctor.check import HERE, OK, WARNING, Check
from manyhands.facts.errors import BadValue

if TYPE_CHECKING:
    from manyhands.runtime.confinement import Confinement

SUBJECT = "confinement"
NEEDED = "no new privileges, seccomp, Landlock and a temp folder of its own for each worker"


def confinement_checks() -> Iterator[Check]:
    """Yield one check: the confinement that a worker started on this machine would get."""
    from manyhands.runtime.confinement import CONFINE_VARIABLE, available, is_asked_for

    try:
        is_on = is_asked_for()
    except BadValue as error:
        yield Check(SUBJECT, WARNING, error.message, NEEDED, error.hint)
        return
    if not is_on:
        yield Check(SUBJECT, WARNING, f"switched off by {CONFINE_VARIABLE}", NEEDED, f"unset {CONFINE_VARIABLE}")
        return
    yield confinement_check(available())


def confinement_check(confinement: Confinement, where: str = HERE) -> Check:
    """Return a check of the confinement in effect: what is missing and why."""
    if not confinement.missing:
        return Check(SUBJECT, OK, confinement.text, NEEDED, where=where)
    lacking = " ".join(confinement.missing)
    if "switched off" in lacking:
        fix = "Start it without --no-confine, and without MANYHANDS_CONFINE=off."
    elif "Landlock" in lacking and "threads" not in lacking:
        fix = "A run works. For all of it: Linux 5.13 or newer, with landlock in the kernel's lsm= option."
    else:
        fix = "A run works. For all of it: Linux 5.13 or newer on x86-64 or 64-bit Arm."
    return Check(SUBJECT, WARNING, confinement.text, NEEDED, fix, where)
