"""The field's words: retired names do not come back, and a public class name means one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from source_trees import BENCHMARKS, PACKAGE, source_files, source_nodes, source_text, source_tree

pytestmark = pytest.mark.xdist_group("source")
RETIRED = {
    "nursery": "fork server", "journey": "elastic job", "crew": "membership", "endurance": "retry policy",
    "pilot": "controller", "knock": "reachability probe", "household": "shared token", "turnstile": "rate limiter",
    "culprit": "root cause", "witness": "symptom", "honesty": "prediction accuracy", "wish": "config",
    "shelf": "resident dataset", "hopeless": "pruned", "mending": "incremental re-planning", "wheel": "event loop",
    "patience": "timeout factor", "mend": "fix", "mended": "fixed", "beating": "heartbeat",
    "desk": "coordinator namespace",
}  # fmt: skip
EXEMPT = {
    ("nursery", "cli/fork_server.py"): "the hidden command's name, which older versions start",
    ("nursery", "cli/main.py"): "the same",
    ("nursery", "runtime/fork_server.py"): "the same",
    ("knock", "runtime/control_messages.py"): "a message's tag on the wire",
    ("shelf", "runtime/control_parts.py"): "a field's name on the wire",
    ("wish", "training/arguments.py"): "the key in config.yaml that runs of 0.2.0 have",
    ("wish", "split/arguments.py"): "the same",
    ("wish", "inference/model.py"): "the same",
    ("patience", "runtime/processes.py"): "a hidden option, which is passed to workers",
    ("patience", "cli/worker.py"): "the same hidden option, which coordinators of 0.2.0 pass",
    ("patience", "training/callbacks.py"): "the keyword of EarlyStopping, as everywhere",
    ("desk", "lab/spaces.py"): "a name in the kernel, which `lab down` of another version looks for",
}
"""Names that are stored, sent or typed stay as they are: (word, file) -> why."""


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_used_nowhere(word: str) -> None:
    whole = re.compile(rf"(?<![A-Za-z]){word}(s|ed|ing|'s)?(?![A-Za-z])|{word.capitalize()}(?![a-z])")
    spellings = (word, word.capitalize())
    texts = {name: source_text(path) for name, path in source_files(PACKAGE, BENCHMARKS)}
    used = {name for name, text in texts.items() if any(map(text.__contains__, spellings)) and whole.search(text)}
    exempt = {name for one, name in EXEMPT if one == word}
    assert used - exempt == set(), f"say {RETIRED[word]}"
    assert exempt <= used, "an exemption that nothing needs"


VAGUE = {"found", "one", "own", "known", "asked"}
"""Names that do not say what they hold. Fields of structs are exempt: some are stored or sent."""
OPENINGS = re.compile(r"(Of|Who|Whose|So|Told|What|Those|Its|Why|How|Which|Where|Have|Let)\b")


def test_bindings_say_what_they_hold() -> None:
    vague = []
    for name, path in source_files(PACKAGE, BENCHMARKS):
        nodes = source_nodes(path)
        fields = {
            id(line.target)
            for node in nodes
            if isinstance(node, ast.ClassDef)
            for line in node.body
            if isinstance(line, ast.AnnAssign)
        }
        for node in nodes:
            is_binding = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields
            bound = node.id if is_binding else node.arg if isinstance(node, ast.arg) else ""  # type: ignore[attr-defined]
            if bound in VAGUE:
                vague.append(f"{name}:{node.lineno}: {bound}")  # type: ignore[attr-defined]
    assert vague == []


def test_a_docstring_says_first_what_the_thing_returns_does_or_is() -> None:
    opened = []
    for name, path in source_files(PACKAGE, BENCHMARKS):
        for node in source_nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text and OPENINGS.match(text):
                    opened.append(f"{name}: {text.splitlines()[0]}")
    assert opened == []


def test_a_public_class_name_is_used_once() -> None:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in source_files(PACKAGE):
        for node in source_tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name)
    assert {name: places for name, places in where.items() if len(places) > 1} == {}
