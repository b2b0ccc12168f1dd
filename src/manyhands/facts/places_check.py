"""The check of a plan's places: where its devices are, for the groups that its sums go through."""

from __future__ import annotations

import re
from collections.abc import Mapping

from manyhands.facts.errors import BadPlan

MOST_LEVELS = 9
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_PLACE = re.compile(rf"({_NAME}(/{_NAME}){{0,{MOST_LEVELS - 1}}})?")


def check_places(places: Mapping[str, str]) -> None:
    """Refuse a place that is not the names of a few groups within each other."""
    for device, place in places.items():
        if not _PLACE.fullmatch(place):
            raise BadPlan(
                f"places.{device} is '{place:.80}'; it must be up to {MOST_LEVELS} names of letters, digits, '.', '_' "
                "and '-', divided by '/'.",
                hint="Write it like places: {pi-1: site/host}.",
            )
