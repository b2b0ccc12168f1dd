"""The figures of a walk, and its failures by reason."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from manyhands_bench.figures import Figures
from manyhands_bench.networks.outcome import LIBRARIES, TRAINED_LIMIT, NetworkOutcome, Problem

FORWARD_LIMIT = 1e-12
"""The largest relative difference to the module that counts as equal."""
_NAMED = 6
"""The number of networks that a line of the table of failures names."""
_PLACE = re.compile(r"\n  at .*", re.DOTALL)
_VARYING = (
    (re.compile(r"torch\.export cannot capture \w+: "), "torch.export cannot capture: "),
    (re.compile(r"\b(torchvision|timm|hf):[\w.\-]+"), "NETWORK"),
    (re.compile(r"'[^']{0,200}'"), "'…'"),
    (re.compile(r"\([^()]*\d[^()]*\)"), "(…)"),
    (re.compile(r"\[[^\[\]]*\d[^\[\]]*\]"), "[…]"),
    (re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?"), "N"),
    (re.compile(r"\b(\w+?)_\d+\b"), r"\1"),
)
Row = tuple[int, str, str, str]
"""Networks, step, reason, and the names of some of them."""


def summarize(outcomes: Sequence[NetworkOutcome]) -> Figures:
    """Return the figures of a walk.

    Shares count every network that runs here by itself, captured or not; torchvision's detectors are counted apart. A
    figure that nothing was walked for is left out.
    """
    ran = [outcome for outcome in outcomes if not outcome.not_run]
    networks = [outcome for outcome in ran if not outcome.is_detector]
    convolutional = [outcome for outcome in networks if outcome.is_convolutional]
    drawn = [outcome for outcome in networks if outcome.is_drawn]
    figures: Figures = {"networks": len(ran), "networks_not_run": len(outcomes) - len(ran)}

    def share(key: str, of: Iterable[NetworkOutcome], has_it: Callable[[NetworkOutcome], bool]) -> None:
        counted = [has_it(outcome) for outcome in of]
        if counted:
            figures[key] = sum(counted) / len(counted)

    share("captured_share", networks, lambda outcome: outcome.captured)
    for library in LIBRARIES:
        of_it = [outcome for outcome in networks if outcome.library == library]
        share(f"captured_{library}", of_it, lambda outcome: outcome.captured)
        if of_it:
            figures[f"networks_{library}"] = len(of_it)
    of_it = [outcome for outcome in ran if outcome.is_detector]
    share("captured_detectors", of_it, lambda outcome: outcome.captured)
    figures["networks_detectors"] = len(of_it)
    share("forward_equal_share", [outcome for outcome in networks if outcome.captured], has_equal_forward)
    share("samples_share", networks, lambda outcome: outcome.shares.get("samples", False))
    share("pipeline_share", networks, lambda outcome: outcome.shares.get("pipeline", False))
    share("tiles_share_convolutional", convolutional, lambda outcome: outcome.shares.get("tiles", False))
    figures["networks_convolutional"] = len(convolutional)
    share("trained_exact_share", drawn, has_trained_exactly)
    share("trained_within_rounding_share", drawn, has_trained_within_rounding)
    figures["networks_drawn"] = len(drawn)
    figures["bare_errors"] = sum(problem.is_bare for outcome in ran for problem in outcome.problems)
    return figures


def has_equal_forward(outcome: NetworkOutcome) -> bool:
    return outcome.forward_difference is not None and outcome.forward_difference <= FORWARD_LIMIT


def has_trained_exactly(outcome: NetworkOutcome) -> bool:
    return outcome.trained_difference is not None and outcome.trained_difference <= TRAINED_LIMIT


def has_trained_within_rounding(outcome: NetworkOutcome) -> bool:
    """Return whether a network was trained exactly, or no further from plain PyTorch than twice what plain PyTorch is
    from itself with the samples of each batch in another order."""
    if outcome.trained_difference is None or outcome.reordered_difference is None:
        return has_trained_exactly(outcome)
    return outcome.trained_difference <= 2 * outcome.reordered_difference


def failures(outcomes: Iterable[NetworkOutcome]) -> list[Row]:
    """Return the failures by step and reason, the most frequent first. A network that is not convolutional is not
    expected to be tiled: that it is refused is no failure."""
    names: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.not_run:
            names["not run", reason_of(outcome.not_run)].append(outcome.name)
        for problem in outcome.problems:
            if problem.step != "tiles" or outcome.is_convolutional or problem.is_bare:
                names[problem.step, _described(problem)].append(outcome.name)
        if outcome.forward_difference is not None and not has_equal_forward(outcome):
            names["forward", "The graph returns something else than the module."].append(outcome.name)
        if outcome.trained_difference is not None and not has_trained_exactly(outcome):
            names["train", "The weights differ from plain PyTorch's."].append(outcome.name)
    rows = [(len(each), step, reason, _some(each)) for (step, reason), each in names.items()]
    return sorted(rows, key=lambda row: (-row[0], row[1], row[2]))


def _described(problem: Problem) -> str:
    mark = f"[bare {problem.kind}] " if problem.is_bare else ""
    return mark + reason_of(problem.text)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def reason_of(text: str) -> str:
    """Return the first line of an error without what differs from network to network: names, shapes, numbers."""
    line = _PLACE.sub("", text).strip().splitlines()[0] if text.strip() else ""
    for pattern, replacement in _VARYING:
        line = pattern.sub(replacement, line)
    return line[:300]
